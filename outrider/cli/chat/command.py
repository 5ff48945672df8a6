"""`outrider chat`: starts what a conversation needs, reads a line, does what it means, shows what comes back."""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

import typer
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from outrider.cli.chat.conversation import (
    COMMANDS,
    ChatTurn,
    Conversation,
    help_text,
    numbered,
    parse_length,
    parse_line,
    parse_temperature,
)
from outrider.cli.chat.terminal import Reader, Screen, choose_ends
from outrider.cli.local_stack import Stack, start_stack
from outrider.cli.options import OPTIONS, in_options
from outrider.cli.other_work import cpu_times, others_said
from outrider.cli.race import AGAIN, SLICES, verdict
from outrider.cli.running import failures_as_exits, note, service_log
from outrider.client import ChatMessage, Client, GenerationOptions, OutriderError, Speculation, Stream
from outrider.process.children import Supervisor
from outrider.rpc.tls import Tls

HINT = "Ctrl-C again leaves, and so does /quit."


@dataclass(frozen=True, slots=True)
class Chat:
    """Arguments of the command line: a gateway's address, or the stack to start instead."""

    options: GenerationOptions
    system: str
    address: str | None
    stack: Stack | None
    api_key: str | None = field(repr=False)
    as_json: bool
    rejected: bool
    tls: Tls | None = None


def chatting(chat: Chat) -> None:
    """Carries a conversation out. Raises typer.Exit unless it ended well."""
    # As Ctrl-C does, it leaves through everything that has to be closed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with failures_as_exits(OPTIONS):
        try:
            with ExitStack() as open_until_the_end:
                address = chat.address or ""
                if chat.stack is not None:
                    # Another thread keeps the stack alive, because this one reads lines.
                    portal = open_until_the_end.enter_context(start_blocking_portal())
                    with Console(stderr=True).status("Starting the services"):
                        kept = portal.wrap_async_context_manager(kept_stack(chat.stack))
                        address = open_until_the_end.enter_context(kept)
                client = open_until_the_end.enter_context(Client(address, api_key=chat.api_key, tls=chat.tls))
                reader, screen, is_interactive = choose_ends(COMMANDS, as_json=chat.as_json, rejected=chat.rejected)
                Talk(client, chat, reader, screen, is_interactive=is_interactive).run()
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None


@asynccontextmanager
async def kept_stack(stack: Stack) -> AsyncIterator[str]:
    """The address of a gateway whose stack is restarted where it dies; raises ServiceFailed at the end if it could not.

    That is then why the last answers failed.
    """
    async with Supervisor(note, service_log) as supervisor:
        addresses = await start_stack(supervisor, stack)
        watching = asyncio.create_task(supervisor.watch())
        try:
            yield addresses.gateway
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(ended, OutriderError):
            raise ended


class Talk:
    """A conversation of one user with one gateway."""

    def __init__(self, client: Client, chat: Chat, reader: Reader, screen: Screen, *, is_interactive: bool) -> None:
        self._client = client
        self._at_first = chat.options
        self._options = chat.options.copy()
        self._owns_stack = chat.stack is not None
        self._conversation = Conversation(chat.system, chat.options.get("seed"))
        self._reader = reader
        self._screen = screen
        self._is_interactive = is_interactive
        self._interrupted = False

    def run(self) -> None:
        """Goes on until the input ends or the user leaves.

        Raises KeyboardInterrupt at the second Ctrl-C in a row. Where no person sits there, at the first one, and the
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
                self._screen.say(f"\n{HINT}")
            except OutriderError as error:
                if not self._is_interactive:
                    raise
                self._screen.say(in_options(error, OPTIONS))

    def _obey(self, line: str) -> bool:
        """Does what a line says; whether there may be another."""
        conversation, say = self._conversation, self._screen.say
        match parse_line(line):
            case "", "":
                pass
            case "", text:
                self._answer(conversation.ask(text))
            case "retry", argument:
                self._answer(conversation.retry(numbered(argument)[0]))
            case "edit", argument:
                number, text = numbered(argument)
                self._answer(conversation.edit(text, number))
            case "race", _:
                self._race()
            case "list", _:
                say(conversation.listing())
            case "system", text:
                if text:
                    conversation.system = "" if text == "-" else text
                system = conversation.system
                say(f"The system message is: {system}" if system else "There is no system message.")
            case "temperature" | "length" as name, argument:
                say(self._set(name, argument))
            case "reset", _:
                conversation.turns.clear()
                say("The conversation is forgotten.")
            case "help", _:
                say(help_text())
            case _:
                return False
        return True

    def _set(self, name: str, argument: str) -> str:
        """Sets the temperature or length of the answers to come, unless the argument is empty; says which it is.

        Raises WrongCommand about a value that it cannot have.
        """
        if name == "temperature":
            if argument:
                at_first = self._at_first.get("temperature")
                self._options["temperature"] = at_first if argument == "-" else parse_temperature(argument)
            temperature = self._options.get("temperature")
            return f"The temperature is {'the default' if temperature is None else f'{temperature:g}'}."
        if argument:
            longest = self._at_first.get("max_tokens")
            self._options["max_tokens"] = longest if argument == "-" else parse_length(argument)
        length = self._options.get("max_tokens")
        return f"An answer has at most {'as many tokens as by default' if length is None else f'{length} tokens'}."

    def _race(self) -> None:
        """Answers the last message with and without speculation, by turns because both share the machine; shows the
        first two answers.
        """
        fast = self._conversation.again()
        messages, salt = self._conversation.messages(), secrets.token_hex(8)
        lanes: dict[bool, list[ChatTurn]] = {True: [], False: []}
        before = cpu_times()
        for number, speculates in enumerate(SLICES):
            turn = ChatTurn(fast.user, fast.seed) if number else fast
            lanes[speculates].append(turn)
            speculation = self._options.get("speculation") or Speculation()
            # Each reads its prompt itself: with a salt of its own it does not find what the others left in the cache.
            changes = GenerationOptions(cache_salt=f"{salt}-{number}")
            if not speculates:
                changes["speculation"] = replace(speculation, enabled=False)
            if number < len(lanes):
                self._screen.say(f"{'With' if speculates else 'Without'} speculation:")
            elif number == len(lanes):
                self._screen.say(AGAIN)
            self._answer(turn, messages, changes, shows=number < len(lanes))
            if turn.result is None:
                break
        # A gateway elsewhere would count among the others.
        others = others_said(before, cpu_times()) if self._owns_stack else ""
        self._screen.say(verdict(lanes[True], lanes[False], others))

    def _answer(
        self,
        turn: ChatTurn,
        messages: Sequence[ChatMessage] = (),
        changes: GenerationOptions | None = None,
        *,
        shows: bool = True,
    ) -> None:
        """Requests an answer, by default to the whole conversation, and keeps it, or what came of it until Ctrl-C."""
        options = GenerationOptions(**{**self._options, **(changes or {}), "seed": turn.seed})
        said = messages or self._conversation.messages()
        try:
            with self._client.chat(said, **options) as stream, self._stoppable(stream):
                for event in stream:
                    turn.add(event)
                    if shows:
                        self._screen.show(event)
        except BaseException:
            turn.forget_answer()
            self._screen.interrupt()
            raise
        if shows:
            self._screen.end(turn)

    @contextmanager
    def _stoppable(self, stream: Stream) -> Iterator[None]:
        """Within it the first Ctrl-C ends the stream in good order; the next one is an interrupt again."""
        before = signal.getsignal(signal.SIGINT)
        if not self._is_interactive or before is signal.SIG_IGN:
            yield
            return

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            self._interrupted = True
            stream.cancel()

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
