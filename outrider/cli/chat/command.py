"""Puts a conversation together: its input, its screen, its gateway. Knows nothing about what is said."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import typer
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from outrider.cli.chat.commands import COMMANDS
from outrider.cli.chat.conversation import Conversation
from outrider.cli.chat.live_screen import LiveScreen
from outrider.cli.chat.readers import PipeReader, Reader, TerminalReader
from outrider.cli.chat.screens import JsonScreen, PlainScreen, Screen
from outrider.cli.chat.talk import Talk
from outrider.cli.local_stack import Stack, Supervisor, start_stack
from outrider.cli.options import OPTIONS
from outrider.cli.running import failures_told, note, service_log
from outrider.client import Client, GenerationOptions, OutriderError


@dataclass(frozen=True, slots=True)
class Chat:
    """What the command line asks for; a gateway's address, or the stack to start instead."""

    options: GenerationOptions
    system: str
    address: str | None
    stack: Stack | None
    as_json: bool
    rejected: bool


def chatting(chat: Chat) -> None:
    """Carries a conversation out. Raises typer.Exit unless it ended well."""
    signal.signal(signal.SIGTERM, _terminate)
    with failures_told(OPTIONS):
        try:
            with _gateway(chat) as address, Client(address) as client:
                reader, screen = choose_ends(chat)
                conversation = Conversation(chat.system, chat.options.get("seed"))
                Talk(client, conversation, chat.options, reader, screen).run()
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None


def choose_ends(chat: Chat) -> tuple[Reader, Screen]:
    """A terminal on both sides gets history and a live view, a dumb one plain text; a pipe gets one line a turn."""
    rounds = chat.rejected
    if chat.as_json:
        return PipeReader(sys.stdin.buffer), JsonScreen(sys.stdout, sys.stderr, tells_rounds=rounds)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PipeReader(sys.stdin.buffer), PlainScreen(sys.stdout, sys.stderr)
    reader = TerminalReader(list(COMMANDS))
    if os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        return reader, PlainScreen(sys.stdout, sys.stderr)
    return reader, LiveScreen(Console(highlight=False), rejected=rounds)


@contextmanager
def _gateway(chat: Chat) -> Iterator[str]:
    """The address of the gateway; a stack of its own is kept alive by another thread, because this one reads lines."""
    if chat.stack is None:
        yield chat.address or ""
        return
    with start_blocking_portal() as portal, ExitStack() as open_until_the_end:
        with Console(stderr=True).status("Starting the services"):
            address = open_until_the_end.enter_context(portal.wrap_async_context_manager(_kept(chat.stack)))
        yield address


@asynccontextmanager
async def _kept(stack: Stack) -> AsyncIterator[str]:
    async with Supervisor(note, service_log) as supervisor:
        addresses = await start_stack(supervisor, stack)
        watching = asyncio.create_task(supervisor.watch())
        try:
            yield addresses.gateway
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
        # The stack could not be kept alive: that is why the last answers failed.
        if isinstance(ended, OutriderError):
            raise ended


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Leaves as after Ctrl-C: everything on the way out is closed."""
    raise SystemExit(128 + number)
