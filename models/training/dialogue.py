"""What a target is made to write: conversations through its own chat template, or plain text after openings.

An empty user turn lets an instructed model write the user's message itself (Magpie: Xu et al., 2024, arXiv 2406.08464).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Self

import torch
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidRequest

MARK = "\u2603\u2603"  # stands where a message's text will be
REQUESTS = (
    "Continue this text:\n\n{}",
    "Summarize the following text in a few sentences:\n\n{}",
    "{}\n\nWhat does this text tell us? Answer briefly.",
    "Translate this text to English:\n\n{}",
    "Explain this step by step:\n\n{}",
    "{}\n\nList the most important points.",
    "Rewrite this text in simpler words:\n\n{}",
    "Write three questions about this text, with their answers:\n\n{}",
    "Use the following passage to answer: what is it about, and what follows from it?\n\n{}",
    "Extract all names, numbers and dates from this text as a list:\n\n{}",
    "{}\n\nIs this good? Say why or why not.",
    "Translate this text to German:\n\n{}",
    "Translate this text to French:\n\n{}",
    "Translate this text to Spanish:\n\n{}",
    "Write a title and one sentence for this:\n\n{}",
    "{}\n\nExplain this with an example.",
    "Write a Python function that has to do with this:\n\n{}",
    "Fix the mistakes in this text and write it again:\n\n{}",
)
# How users begin, a kind of task each line; the target goes on from there.
OPENINGS = (
    *("How do I", "How can I", "How does", "What is", "What are", "Why do", "Why is", "Which", "Who", "When", "Where"),
    *("Can you", "Should I", "I want to", "I have", "My", "Tell me", "Give me", "Help me", "Is it", "Recommend"),
    *("Explain", "Describe", "Compare", "List", "Suggest", "What does", "What were the causes of", "Discuss"),
    *("Write a", "Write an email", "Compose a", "Write a short story about", "Write a poem about", "Draft a"),
    *("Imagine you are", "Pretend to be", "You are a", "Act as"),
    *("A shop sells", "Calculate", "Solve", "If a train", "Tom has", "A rectangle", "Find the", "What is 1"),
    *("Write a Python function", "Write a program", "Implement", "Write a SQL query", "What does this code do?\n\n```"),
    *("Extract the", "From the following text,", "Read the passage and answer the question.\n\n", "Context:"),
    *("Summarize the following", "Translate the following sentence to", "Translate into English:"),
    *("Was ist", "Comment"),
)
MAX_USER_TOKENS, MAX_ANSWER_TOKENS = 120, 320
OPENING_TOKENS = (24, 240)
USER_TEMPERATURE = 0.9


@dataclass(frozen=True, slots=True)
class Turns:
    """A chat template as the ids between the messages."""

    before_user: tuple[int, ...]
    """Tokens from the beginning to the first user's message."""
    before_answer: tuple[int, ...]
    """Tokens from the end of a user's message to the answer."""
    between: tuple[int, ...]
    """Tokens from the end of an answer to the next user's message."""
    end_ids: frozenset[int]
    """Ids that end a message, any of them."""

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerFast, end_ids: frozenset[int]) -> Self | None:
        """Turns of a tokenizer's template; None if it has none. Raises InvalidRequest about one that hides messages."""
        if tokenizer.chat_template is None:
            return None
        messages = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = str(text).split(MARK)
        if len(parts) != 4:
            raise InvalidRequest("--target", tokenizer.name_or_path, "a model whose chat template shows every message")
        first, answer, user, _ = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in parts)
        # What the template puts between a message and an answer that follows it may differ from what a history shows.
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        answer = tuple(tokenizer.encode(str(asked).split(MARK)[1], add_special_tokens=False))
        return cls(first, answer, user, end_ids | {answer[0], user[0]})

    def ask(self, message: Sequence[int]) -> list[int]:
        """The ids from the beginning of a conversation to the answer to its first message."""
        return [*self.before_user, *message, *self.before_answer]


class Text:
    """A text while it grows: which tokens are given, and at which temperature others are drawn."""

    def __init__(self, given: Sequence[int], temperature: float, turns: Turns | None, *, user_writes: bool) -> None:
        """`given` leads to an answer, or to a user's message that the target writes. Without turns it only grows."""
        self._given, self._temperature, self._turns = deque(given), temperature, turns
        self._user_writes, self._drawn = user_writes, 0

    @property
    def temperature(self) -> float:
        """Temperature of the next token that is drawn."""
        return USER_TEMPERATURE if self._user_writes else self._temperature

    def follow(self, token_id: int) -> tuple[int, bool]:
        """The next token, where the target drew token_id; and whether it is one of an answer that the target drew."""
        if self._given:
            return self._given.popleft(), False
        self._drawn += 1
        turns, is_answer = self._turns, not self._user_writes
        limit = MAX_ANSWER_TOKENS if is_answer else MAX_USER_TOKENS
        if turns is None or (token_id not in turns.end_ids and self._drawn < limit):
            return token_id, is_answer
        # The end of an answer is the target's own, unless it was cut.
        is_own = is_answer and token_id == turns.between[0]
        self._given.extend(turns.between if is_answer else turns.before_answer)
        self._user_writes, self._drawn = is_answer, 0
        return self._given.popleft(), is_own


@dataclass(frozen=True, slots=True)
class Writing:
    """Beginnings of the texts of a run."""

    tokenizer: PreTrainedTokenizerFast
    turns: Turns | None
    bos: tuple[int, ...]
    """Tokens that a plain text begins with."""
    temperatures: tuple[float, ...]
    documents: Sequence[str]
    """Texts of the user's own data; may be empty."""
    own_share: float
    """Share of the texts that begin with a piece of a document."""

    def texts(self, count: int, generator: torch.Generator) -> list[Text]:
        """New texts, `count` of them; the temperatures take turns."""
        made = []
        for _, temperature in zip(range(count), cycle(self.temperatures), strict=False):
            is_own = bool(torch.rand((), generator=generator) < self.own_share) and bool(self.documents)
            piece = self._piece(generator) if is_own else ()
            if self.turns is None:
                made.append(Text([*self.bos, *piece], temperature, None, user_writes=False))
            elif is_own:
                made.append(Text(self.turns.ask(piece), temperature, self.turns, user_writes=False))
            else:
                given = [*self.turns.before_user, *self._opening(generator)]
                made.append(Text(given, temperature, self.turns, user_writes=True))
        return made

    def _opening(self, generator: torch.Generator) -> Sequence[int]:
        """Tokens with which a user's message begins, none for every other one."""
        number = int(torch.randint(2 * len(OPENINGS), (), generator=generator))
        return list(self.tokenizer.encode("".join(OPENINGS[number : number + 1]), add_special_tokens=False))

    def _piece(self, generator: torch.Generator) -> Sequence[int]:
        """Tokens of a document from the beginning of a line on; as a request, where there are turns."""

        def number(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        document = self.documents[number(len(self.documents))]
        start = number(len(document))
        start = document.rfind("\n", 0, start) + 1
        length = OPENING_TOKENS[0] + number(OPENING_TOKENS[1] - OPENING_TOKENS[0])
        # No token has more than a few characters in the mean, so this is text enough for them.
        ids = self.tokenizer.encode(document[start : start + 8 * length], add_special_tokens=False)[:length]
        if self.turns is None:
            return list(ids)
        request = REQUESTS[number(len(REQUESTS))]
        return list(self.tokenizer.encode(request.format(self.tokenizer.decode(ids)), add_special_tokens=False))
