"""`outrider up`: the whole stack on this machine, kept alive until a signal comes. Knows nothing about tokens."""

import asyncio
import errno
import socket

from rich.console import Console

from outrider.cli.asking import Answer, Ask, Sampling, Speculation
from outrider.cli.display import Display
from outrider.cli.generate import choose_view, show_generation
from outrider.cli.model_facts import model_facts
from outrider.cli.running import Interrupts, Work
from outrider.cli.stack import HOST, Stack, start_stack
from outrider.errors import NotReady
from outrider.supervisor import Supervisor

STORY = Ask(
    "Once upon a time there was a",
    Answer(max_tokens=128, seed=3),
    Sampling(temperature=0.7),
    Speculation(draft_count="4"),
)


def check_ports(stack: Stack) -> None:
    """Raises NotReady about the first port that something else listens on.

    A service could tell as well, but only after its model is loaded, and without the name of the option.
    """
    ports = {"port": stack.gateway_port, "target-port": stack.target_port}
    if stack.rest_port is not None:
        ports["rest-port"] = stack.rest_port
    if stack.draft:
        ports["draft-port"] = stack.draft_port
    for option, port in ports.items():
        with socket.socket() as probe:
            # Without this, connections that ended a moment ago would look like a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise NotReady(_port_sentence(option, port, error), port=port) from None


def _port_sentence(option: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is taken; stop what listens there, or choose another with --{option}, 0 for a free one."
    return f"Port {port} cannot be used ({error.strerror}); choose another with --{option}, 0 for a free one."


def serving(stack: Stack, display: Display, *, story: bool) -> Work:
    """The work of the command."""

    async def work(interrupts: Interrupts) -> None:
        check_ports(stack)
        try:
            async with Supervisor(display.report, display.log, observe=display.observe) as supervisor:
                interrupts.urgent = supervisor.kill
                await _start_and_serve(supervisor, stack, display, story=story)
        finally:
            display.close()

    return work


async def _start_and_serve(supervisor: Supervisor, stack: Stack, display: Display, *, story: bool) -> None:
    with Console(stderr=True).status("Starting the services"):
        addresses = await start_stack(supervisor, stack)
    served = [address for address in (addresses.target, addresses.draft) if address]
    display.serving(addresses, await asyncio.gather(*map(model_facts, served)))
    await _serve(supervisor, addresses.gateway, display, story=story)


async def _serve(supervisor: Supervisor, gateway: str, display: Display, *, story: bool) -> None:
    """Restarts what dies, tells a story first when that is wanted, and shows what is going on."""
    watching = asyncio.create_task(supervisor.watch())
    showing: asyncio.Task[None] | None = None
    try:
        if story:
            await show_generation(gateway, STORY, choose_view(as_json=False))
        showing = asyncio.create_task(display.run())
        await asyncio.wait({watching, showing}, return_when=asyncio.FIRST_COMPLETED)
        # Neither ends by itself but with an error.
        await (watching if watching.done() else showing)
    finally:
        running = {task for task in (watching, showing) if task is not None}
        for task in running:
            task.cancel()
        await asyncio.wait(running)
