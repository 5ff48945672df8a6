"""`outrider chat`: starts what a conversation needs, reads a line, does what it means, shows what comes back."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import typer
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from outrider.cli.chat.conversation import COMMANDS, Conversation, Turn, help_text, parse_line
from outrider.cli.chat.terminal import Reader, Screen, choose_ends
from outrider.cli.local_stack import Stack, Supervisor, start_stack
from outrider.cli.options import OPTIONS, in_options
from outrider.cli.running import failures_told, note, service_log
from outrider.client import Client, GenerationOptions, OutriderError, Stream

HINT = "Ctrl-C again leaves, and so does /quit."


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
                reader, screen, is_interactive = choose_ends(COMMANDS, as_json=chat.as_json, rejected=chat.rejected)
                Talk(client, chat, reader, screen, is_interactive=is_interactive).run()
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Leaves as after Ctrl-C: everything on the way out is closed."""
    raise SystemExit(128 + number)


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


class Talk:
    """One user with one gateway."""

    def __init__(self, client: Client, chat: Chat, reader: Reader, screen: Screen, *, is_interactive: bool) -> None:
        self._client = client
        self._options = chat.options
        self._conversation = Conversation(chat.system, chat.options.get("seed"))
        self._reader = reader
        self._screen = screen
        self._is_interactive = is_interactive
        self._interrupted = False

    def run(self) -> None:
        """Goes on until the input ends or the user leaves.

        Raises KeyboardInterrupt at the second Ctrl-C in a row. Where nobody sits there, at the first one, and the
        first OutriderError as well.
        """
        going = True
        while going:
            try:
                line = self._reader()
                self._interrupted = False
                going = line is not None and self._obey(line)
            except KeyboardInterrupt:
                if self._interrupted or not self._is_interactive:
                    raise
                self._interrupted = True
                self._screen.tell(f"\n{HINT}")
            except OutriderError as error:
                if not self._is_interactive:
                    raise
                self._screen.tell(in_options(error, OPTIONS))

    def _obey(self, line: str) -> bool:
        """Does what a line says; whether there may be another."""
        conversation, tell = self._conversation, self._screen.tell
        match parse_line(line):
            case "", "":
                pass
            case "", text:
                self._answer(conversation.ask(text))
            case "retry", _:
                self._answer(conversation.retry())
            case "edit", text:
                self._answer(conversation.edit(text))
            case "system", text:
                if text:
                    conversation.system = "" if text == "-" else text
                system = conversation.system
                tell(f"The system message is: {system}" if system else "There is no system message.")
            case "reset", _:
                conversation.turns.clear()
                tell("The conversation is forgotten.")
            case "help", _:
                tell(help_text())
            case _:
                return False
        return True

    def _answer(self, turn: Turn) -> None:
        """Asks for an answer and keeps it, or what came of it until Ctrl-C."""
        options = GenerationOptions(**{**self._options, "seed": turn.seed})
        try:
            with self._client.chat(self._conversation.messages(), **options) as stream, self._stoppable(stream):
                for event in stream:
                    turn.add(event)
                    self._screen.show(event)
        except BaseException:
            turn.forget_answer()
            self._screen.interrupt()
            raise
        self._screen.end(turn)

    @contextmanager
    def _stoppable(self, stream: Stream) -> Iterator[None]:
        """Within it the first Ctrl-C ends the stream in good order; the next one is an interrupt again."""
        if not self._is_interactive:
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            self._interrupted = True
            stream.cancel()

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
