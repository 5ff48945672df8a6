"""`outrider generate`: one request, to a running gateway or to a stack that lives as long as it. Knows no protobuf."""

import asyncio
import os
import sys
from contextlib import aclosing

from rich.console import Console

from outrider.cli.asking import Ask
from outrider.cli.client import generate
from outrider.cli.json_view import JsonView
from outrider.cli.rendering import PlainView, TerminalView, View
from outrider.cli.running import Interrupts, Work, note, service_log
from outrider.cli.samples import InOrder
from outrider.cli.stack import Stack, start_stack
from outrider.client import Round
from outrider.errors import InvalidRequest, OutriderError
from outrider.supervisor import Supervisor


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-". Raises InvalidRequest when it is not text."""
    given = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return given.decode()
    except UnicodeError:
        raise InvalidRequest("prompt", given, "valid UTF-8") from None


def choose_view(*, as_json: bool) -> View:
    """JSON when asked for; otherwise styles in a terminal, and the bare text into a pipe or file."""
    if as_json:
        return JsonView(sys.stdout)
    if sys.stdout.isatty():
        return TerminalView(Console(highlight=False))
    return PlainView(sys.stdout, sys.stderr)


async def show_generation(address: str, ask: Ask, view: View) -> None:
    """Streams one request into a view. Raises OutriderError."""
    view.begin(ask)
    try:
        await _show_events(address, ask, view)
    except (OutriderError, asyncio.CancelledError):
        view.interrupt()
        raise
    view.end()


async def _show_events(address: str, ask: Ask, view: View) -> None:
    in_order = InOrder()
    async with aclosing(generate(address, ask)) as events:
        async for event in events:
            for turn in in_order.take(event):
                if isinstance(turn, Round):
                    view.show(turn)
                else:
                    view.finish(turn)


def generation(ask: Ask, view: View, address: str | None, stack: Stack | None) -> Work:
    """The work of the command: against `address`, or else within a stack of its own."""

    async def work(interrupts: Interrupts) -> None:
        if address is not None or stack is None:
            await show_generation(address or "", ask, view)
            return
        async with Supervisor(note, service_log) as supervisor:
            interrupts.urgent = supervisor.kill
            addresses = await start_stack(supervisor, stack)
            await show_generation(addresses.gateway, ask, view)

    return work
