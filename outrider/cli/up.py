"""`outrider up`: the whole stack on this machine, kept alive until a signal comes. Knows nothing about tokens."""

import asyncio
import errno
import socket
import sys

from rich.console import Console
from rich.text import Text

from outrider.cli.asking import Answer, Ask, Sampling, Speculation
from outrider.cli.client import model_facts
from outrider.cli.generate import choose_view, show_generation
from outrider.cli.rendering import console_for
from outrider.cli.running import Interrupts, Work, note, service_log
from outrider.cli.stack import HOST, Addresses, Stack, start_stack
from outrider.cli.tables import model_table
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


def serving(stack: Stack, *, story: bool) -> Work:
    """The work of the command."""

    async def work(interrupts: Interrupts) -> None:
        check_ports(stack)
        async with Supervisor(note, service_log) as supervisor:
            interrupts.urgent = supervisor.kill
            with Console(stderr=True).status("Starting the services"):
                addresses = await start_stack(supervisor, stack)
            await _announce(addresses)
            await _serve(supervisor, addresses.gateway, story=story)

    return work


async def _serve(supervisor: Supervisor, gateway: str, *, story: bool) -> None:
    watching = asyncio.create_task(supervisor.watch())
    try:
        if story:
            await show_generation(gateway, STORY, choose_view(as_json=False))
        note("Serving until Ctrl-C.")
        await watching
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def _announce(addresses: Addresses) -> None:
    """Prints the models and where the gateway answers."""
    served = [address for address in (addresses.target, addresses.draft) if address]
    facts = await asyncio.gather(*(model_facts(address) for address in served))
    console = console_for(sys.stdout)
    console.print(model_table(facts))
    console.print(Text(f"The gateway answers on {addresses.gateway}.\n"), soft_wrap=True)
