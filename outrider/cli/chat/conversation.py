"""What was said so far, and what the next request says. Pure: no gateway, no terminal, no clock."""

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.client import ChatMessage, OutriderError, Result

SEED_BITS = 31
INT64_MAX = 2**63 - 1


class WrongCommand(OutriderError):
    """The user must write another line: this one cannot be done here and now."""

    status = "INVALID_ARGUMENT"
    reason = "WRONG_COMMAND"
    exit_code = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and what came back: None while nothing has. A stopped answer has no result."""

    user: str
    seed: int
    answer: str | None = None
    result: Result | None = None
    fixed_seed: int | None = None
    """What seeds were fixed to when the turn began; None when it drew its own."""

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is only what had come when the user stopped it."""
        return self.answer is not None and self.result is None


class Conversation:
    """Turns, of which the last may still be without an answer; such a turn is forgotten when the next one begins.

    A fixed `seed` holds for every turn, and each repetition adds one to it; without one every turn draws its own. One
    that was fixed or changed after a turn holds for the next repetition of that turn as it is.
    """

    def __init__(self, system: str = "", seed: int | None = None) -> None:
        self.system = system
        self.seed = seed
        self.turns: list[Turn] = []

    def ask(self, text: str) -> Turn:
        """Begins a turn."""
        self._forget_unanswered()
        return self._begin(text, self._first_seed())

    def retry(self) -> Turn:
        """Begins the last turn again, with another seed. Raises WrongCommand when there is none."""
        last = self._last()
        self.turns.pop()
        return self._begin(last.user, self._next_seed(last))

    def edit(self, text: str) -> Turn:
        """Begins the last turn again with other words. Raises WrongCommand when there is none."""
        self._last()
        self.turns.pop()
        return self._begin(text, self._first_seed())

    def last_words(self) -> str:
        """What the user said last. Raises WrongCommand when that is nothing."""
        return self._last().user

    def keep(self, answer: str, result: Result | None) -> Turn:
        """Ends the turn with what came; an answer that was stopped before its first word is none."""
        kept = replace(self.turns[-1], answer=answer if answer or result else None, result=result)
        self.turns[-1] = kept
        return kept

    def reset(self) -> None:
        """Forgets all turns; the system message and the seed stay."""
        self.turns.clear()

    def messages(self) -> list[ChatMessage]:
        """The whole conversation, as a request takes it."""
        said = [ChatMessage(role="system", content=self.system)] if self.system else []
        for turn in self.turns:
            said.append(ChatMessage(role="user", content=turn.user))
            if turn.answer is not None:
                said.append(ChatMessage(role="assistant", content=turn.answer))
        return said

    def document(self) -> dict[str, Any]:
        """Everything, for a file: the messages as a request takes them, and the facts of each turn."""
        self._forget_unanswered()
        turns = [
            {"user": turn.user, "assistant": turn.answer, "seed": turn.seed, "stopped": turn.is_stopped}
            | {"result": _facts(turn.result) if turn.result else None}
            for turn in self.turns
        ]
        return {"messages": self.messages(), "turns": turns}

    def _begin(self, text: str, seed: int) -> Turn:
        self.turns.append(Turn(text, seed, fixed_seed=self.seed))
        return self.turns[-1]

    def _last(self) -> Turn:
        if not self.turns:
            raise WrongCommand("There is no message yet that could be sent again.")
        return self.turns[-1]

    def _forget_unanswered(self) -> None:
        if self.turns and self.turns[-1].answer is None:
            self.turns.pop()

    def _first_seed(self) -> int:
        return secrets.randbits(SEED_BITS) if self.seed is None else self.seed

    def _next_seed(self, last: Turn) -> int:
        """Another one: a random one, or the next where seeds are fixed, so that the repetition can be repeated."""
        if self.seed is None or last.fixed_seed != self.seed:
            return self._first_seed()
        seed = last.seed
        return seed + 1 if seed < INT64_MAX else -INT64_MAX


def _facts(result: Result) -> dict[str, Any]:
    """A result as plain values."""
    acceptance = {"rule": result.acceptance.rule, **result.acceptance.settings}
    return asdict(result) | {"acceptance": acceptance}
