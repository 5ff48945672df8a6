"""State of a conversation: what was said so far, what the next request says, and what a line of input means."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.cli.options import INT64_MAX
from outrider.cli.views import rule_words
from outrider.client import ChatMessage, Event, OutriderError, Result, Round

SEED_BITS = 31
# Argument of each command, and what it does.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "retry": ("[#N]", "answer the last message, or message N, again with another seed"),
    "edit": ("[#N] TEXT", "change the last message, or message N, and answer it again"),
    "race": ("", "answer the last message with and without speculation, and compare"),
    "list": ("", "show the messages and their numbers"),
    "system": ("[TEXT|-]", "show, set or, with -, remove the system message"),
    "temperature": ("[X|-]", "show or set the temperature, from 0 to 100; - is what the chat began with"),
    "length": ("[N|-]", "show or set the most tokens of an answer, from 1; - is what the chat began with"),
    "reset": ("", "forget the conversation, but not the system message"),
    "help": ("", "show this list"),
    "quit": ("", "leave, as Ctrl-D does"),
}
MAX_TEMPERATURE, MAX_LENGTH = 100, 2**31 - 1
NUMBER = re.compile(r"#([0-9]{1,6})(?:\s+|$)")


class WrongCommand(OutriderError):
    """The user must write another line: this one cannot be done here and now."""

    status = "INVALID_ARGUMENT"
    reason = "WRONG_COMMAND"
    exit_code = 64


def parse_line(line: str) -> tuple[str, str]:
    """A command and its argument; a message has no command, and a line without a word neither. The argument of
    /retry and /edit may begin with the number of a message, for `numbered`.

    A command begins with a slash, two slashes a message that begins with one. Raises WrongCommand about a command that
    there is not, that takes no argument, or that needs one.
    """
    text = line.strip()
    if not text.startswith("/") or text.startswith("//"):
        return "", text.removeprefix("/")
    name, _, argument = text[1:].partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        raise WrongCommand(f"There is no command /{name}; /help lists all, and // begins a message with a slash.")
    if argument and not COMMANDS[name][0]:
        raise WrongCommand(f"/{name} takes nothing behind it.")
    text = numbered(argument)[1]
    if name == "edit" and not text:
        raise WrongCommand("/edit needs the new text behind it.")
    if name == "retry" and text:
        raise WrongCommand("/retry takes #N, the number of a message, and nothing else.")
    return name, argument


def numbered(argument: str) -> tuple[int | None, str]:
    """The number of a message at the beginning of an argument, None where there is none, and the rest."""
    found = NUMBER.match(argument)
    return (int(found[1]), argument[found.end() :]) if found else (None, argument)


def parse_temperature(argument: str) -> float:
    """Temperature of the answers to come. Raises WrongCommand."""
    try:
        found = float(argument)
    except ValueError:
        found = -1
    if not 0 <= found <= MAX_TEMPERATURE:
        raise WrongCommand(f"/temperature is {argument!r}, but must be a number from 0 to {MAX_TEMPERATURE}, or -.")
    return found


def parse_length(argument: str) -> int:
    """Most tokens of the answers to come. Raises WrongCommand."""
    found = int(argument) if argument.isdecimal() and len(argument) <= len(str(MAX_LENGTH)) else 0
    if not 1 <= found <= MAX_LENGTH:
        raise WrongCommand(f"/length is {argument!r}, but must be a whole number from 1 to {MAX_LENGTH}, or -.")
    return found


def help_text() -> str:
    """All commands, one a line."""
    usages = {f"/{name} {argument}".rstrip(): meaning for name, (argument, meaning) in COMMANDS.items()}
    width = max(map(len, usages))
    keys = "Ctrl-C stops an answer and keeps what came, twice leaves. A \\ at its end goes on with a line."
    return "\n".join([*(f"{usage:<{width}}  {meaning}" for usage, meaning in usages.items()), keys])


@dataclass(slots=True)
class ChatTurn:
    """A user's message, and what came back so far. A stopped answer has no result."""

    user: str
    seed: int
    rounds: list[Round] = field(default_factory=list)
    result: Result | None = None

    def add(self, event: Event) -> None:
        """Takes the next event of the answer."""
        if isinstance(event, Round):
            self.rounds.append(event)
        else:
            self.result = event

    def forget_answer(self) -> None:
        """Forgets all that came back."""
        self.rounds, self.result = [], None

    @property
    def answer(self) -> str | None:
        """Text that came back, None for nothing yet. An empty answer that ended by itself is one."""
        text = "".join(event.text for event in self.rounds) + (self.result.rest if self.result else "")
        return text if text or self.result else None

    def figures(self) -> str:
        """The line under the answer. The time to the first token is the gateway's, without the network."""
        if self.result is None:
            return f"stopped, {sum(len(event.tokens) for event in self.rounds)} tokens, seed {self.seed}"
        result = self.result
        rate = f"acceptance rate {result.speculation.acceptance_rate:.2f}"
        parts = [
            f"{result.completion_tokens} tokens",
            f"{result.tokens_per_second:.0f} tokens/s",
            f"first token {result.first_token_us / 1e3:.0f} ms",
            f"cached {result.cached_prompt_tokens} of {result.prompt_tokens} prompt tokens",
            rate if result.speculation.draft_tokens else "no guesses",
            f"seed {result.seed}",
            *rule_words(result.acceptance),
        ]
        if result.finish_reason == "length":
            parts.append("ended at the length limit")
        return ", ".join(parts)


class Conversation:
    """Turns, of which the last may still be without an answer; such a turn is forgotten when the next one begins.

    A fixed `seed` holds for every turn, and each repetition adds one to it; without one every answer draws its own.
    """

    def __init__(self, system: str = "", seed: int | None = None) -> None:
        self.system = system
        self.seed = seed
        self.turns: list[ChatTurn] = []

    def ask(self, text: str) -> ChatTurn:
        """Begins a turn with a message of the user."""
        if self.turns and self.turns[-1].answer is None:
            self.turns.pop()
        return self._begin(text, self.seed)

    def again(self) -> ChatTurn:
        """Begins the last turn again, with its seed. Raises WrongCommand when there is none."""
        last = self._back_to(None)
        return self._begin(last.user, last.seed)

    def retry(self, number: int | None = None) -> ChatTurn:
        """Begins the last turn, or one by its number from 1, again with another seed; the turns after it are
        forgotten. Raises WrongCommand when there is none.
        """
        last = self._back_to(number)
        # Where seeds are fixed it is the next one, so that the repetition can be repeated.
        next_seed = last.seed + 1 if last.seed < INT64_MAX else -INT64_MAX
        return self._begin(last.user, None if self.seed is None else next_seed)

    def edit(self, text: str, number: int | None = None) -> ChatTurn:
        """Begins the last turn, or one by its number from 1, again with other words, and forgets the turns after it."""
        self._back_to(number)
        return self.ask(text)

    def listing(self) -> str:
        """All messages with their numbers, one a line."""
        lines = (f"#{number} {' '.join(turn.user.split())}" for number, turn in enumerate(self.turns, start=1))
        return "\n".join(lines) or "Nothing was said yet."

    def messages(self) -> list[ChatMessage]:
        """The whole conversation, as a request takes it."""
        said = [ChatMessage(role="system", content=self.system)] if self.system else []
        for turn in self.turns:
            said.append(ChatMessage(role="user", content=turn.user))
            if turn.answer is not None:
                said.append(ChatMessage(role="assistant", content=turn.answer))
        return said

    def _begin(self, text: str, seed: int | None) -> ChatTurn:
        self.turns.append(ChatTurn(text, secrets.randbits(SEED_BITS) if seed is None else seed))
        return self.turns[-1]

    def _back_to(self, number: int | None) -> ChatTurn:
        if not self.turns:
            raise WrongCommand("There is no message yet that could be sent again.")
        if number is not None and not 1 <= number <= len(self.turns):
            raise WrongCommand(f"There is no message #{number}; the last one is #{len(self.turns)}.")
        place = (number or len(self.turns)) - 1
        found = self.turns[place]
        del self.turns[place:]
        return found
