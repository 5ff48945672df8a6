"""Reads an answer that comes as messages in channels, as gpt-oss writes them (the harmony format of OpenAI).

A message has a header, which names its channel and perhaps a recipient, and then a text: of the channel "analysis" that
is reasoning, of one to a function the arguments of its call, and else text for the user. The prompt has begun the first
header.
"""

import re
import secrets
from collections.abc import Collection

from gateway.tools.bodies import strict_object
from gateway.tools.reader import Reading, begun_len
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
REASONING_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([^\s<]+)")
# What a header may go on with where the prompt has begun it and no marker comes first.
FURTHER = "to="


class ChannelReader:
    """Reader of one answer; see AnswerReader, whose interface it has."""

    def __init__(self, reading: Reading, special_tokens: Collection[str]) -> None:
        """`special_tokens` are those of the tokenizer, by name: one of them counts only as that token."""
        self._tools = reading.tools
        self._special = frozenset(special_tokens)
        self._markers = [marker for marker in MARKERS if marker not in self._special]
        self._may_go_on = not reading.is_shaped
        """Whether the header that the prompt has begun may go on: nothing was said yet."""
        self._header: str | None = None
        """Text of a header that is not whole; None within a message."""
        self._is_reasoning = False
        self._call: str | None = None
        """Function whose arguments come, and not text."""
        self._arguments = ""
        self._held = ""
        self._num_calls = 0
        self._last: type[Delta] | None = None
        self._is_new = False
        """Whether a message has begun that has said nothing yet."""
        self._deltas: list[Delta] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._is_reasoning

    @property
    def num_calls(self) -> int:
        """Number of calls that were handed out."""
        return self._num_calls

    @property
    def held_len(self) -> int:
        """Number of characters that are neither handed out nor dropped yet."""
        return len(self._held) + len(self._arguments)

    def push(self, text: str, *, is_special: bool = False) -> list[Delta]:
        """Takes the text of a token, or the name of a special one; returns what is certain now."""
        if is_special and text in MARKERS:
            self._take_text(self._held)
            self._held = ""
            self._mark(text)
        elif not is_special or self._is_reasoning:
            # Text is taken as far as it cannot become a marker that is no token of its own.
            text, self._held = self._held + text, ""
            while found := [marker for marker in self._markers if marker in text]:
                marker = min(found, key=text.index)
                before, _, text = text.partition(marker)
                self._take_text(before)
                self._mark(marker)
            said = text[: len(text) - begun_len(text, self._markers)]
            if self._may_go_on and self._header is None and FURTHER.startswith(text.strip()):
                said = ""
            self._held = text[len(said) :]
            self._take_text(said)
        return self._new_deltas()

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """No more comes, because the request's limit was reached or else because the model ended."""
        rest, self._held = self._held, ""
        if is_cut:
            rest = rest[: len(rest) - begun_len(rest, self._markers)]
            # A call that was cut off is none, and no text either.
            self._call, self._arguments = None, ""
        self._take_text(rest)
        self._close()
        return self._new_deltas()

    def _new_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _mark(self, marker: str) -> None:
        if marker in ENDS:
            self._close()
        elif marker == MESSAGE:
            # A message begins, whose header is whole.
            header = self._header or ""
            self._close()
            recipient = RECIPIENT.search(header)
            if recipient is not None and recipient[1] in self._tools:
                self._call = recipient[1]
            # What goes to a tool that was not offered is for no user.
            self._is_reasoning = self._call is None and bool(recipient or REASONING_CHANNEL.search(header))
            self._is_new = True
        elif marker == START or self._header is None:
            self._close()
            self._header = marker
        else:
            self._header += marker
        self._may_go_on = False

    def _close(self) -> None:
        """Ends a message, and hands out its call."""
        name, said = self._call, self._arguments
        self._call, self._arguments = None, ""
        if name is not None:
            try:
                arguments = strict_object(said.strip() or "{}")
            except ValueError:
                self._say(said)
            else:
                call_id, index = f"call_{secrets.token_hex(12)}", self._num_calls
                self._deltas += [CallBegun(index, call_id, name), CallArguments(index, arguments)]
                self._num_calls += 1
        self._header, self._is_reasoning = None, False

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._header is None and self._may_go_on and text.lstrip().startswith(FURTHER):
            self._header = ""
        if self._header is not None:
            self._header += text
        elif self._call is not None:
            self._arguments += text
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        """Hands out text or reasoning; a message after one of the same kind begins on a line of its own."""
        kind = ReasoningDelta if self._is_reasoning else ContentDelta
        if self._is_new and self._last is kind:
            text = f"\n{text}"
        self._deltas.append(kind(text))
        self._last, self._is_new, self._may_go_on = kind, False, False
