"""Reads an answer as it comes: text for the user, reasoning, and calls of tools, each apart from the others.

What is found does not depend on how the answer is cut into pieces. A call is handed out when it is whole: one that the
request's limit cut off is never handed to a client, which might make it. Text that only looked like a call is text.
Of white space, only that around reasoning and calls is left out.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from gateway.tools.bodies import CallBody, Schema, XmlBody, new_body
from gateway.tools.formats import Body, CallSyntax, ToolFormat
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta

BARE_STARTS: Mapping[Body, str] = {Body.JSON: "{[", Body.PYTHONIC: "["}


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is to be read: for calls only where tools were offered, whose parameters' schemas are by name."""

    format: ToolFormat
    tools: Mapping[str, Schema] = field(default_factory=dict)
    open_reasoning: str = ""
    """Marker after which the answer begins, because the prompt ends with it."""
    is_shaped: bool = False
    """Whether an answer is calls or else text of a certain form, in which no marker means anything."""


@dataclass(slots=True)
class _Attempt:
    """Text that may become a call: its syntax, the white space before it, and what it is if it is none."""

    syntax: CallSyntax
    body: CallBody
    space: str
    raw: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    """Without special tokens, which users never see."""


class AnswerReader:
    """Reader of one answer."""

    def __init__(self, reading: Reading, special_tokens: Collection[str]) -> None:
        """`special_tokens` are those of the tokenizer, by name."""
        self._format, self._tools = reading.format, reading.tools
        self._special = reading.format.markers.intersection(special_tokens)
        self._is_shaped = reading.is_shaped
        self._syntaxes = reading.format.calls if reading.tools else ()
        self._openers = {syntax.open: syntax for syntax in self._syntaxes if syntax.open}
        self._closers = {marker for syntax in self._syntaxes for marker in syntax.close}
        self._closes_reasoning = dict(reading.format.reasoning).get(reading.open_reasoning, "")
        self._held = ""
        self._attempt: _Attempt | None = None
        self._is_at_start, self._is_behind_call, self._drops_space = True, False, bool(self._closes_reasoning)
        self._call_ids: list[str] = []
        self._deltas: list[Delta] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return bool(self._closes_reasoning)

    @property
    def num_calls(self) -> int:
        """Number of calls that were handed out."""
        return len(self._call_ids)

    @property
    def held_len(self) -> int:
        """Number of characters that are neither handed out nor dropped yet."""
        attempt = self._attempt
        return len(self._held) + (0 if attempt is None else len(attempt.space) + sum(map(len, attempt.raw)))

    def push(self, text: str, *, is_special: bool = False) -> list[Delta]:
        """Takes the text of a token, or the name of a special one; returns what is certain now."""
        if is_special:
            self._push_special(text)
        else:
            self._push_text(text)
        return self._take()

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """No more comes, because the request's limit was reached or else because the model ended."""
        attempt, self._attempt = self._attempt, None
        is_told = attempt is None or self._tell_calls(attempt) or (is_cut and attempt.body.may_call(self._tools))
        if attempt is not None and not is_told:
            self._restore(attempt)
        rest, self._held = self._held, ""
        if is_cut and (marker_len := begun_len(rest, self._text_markers())):
            rest = rest[:-marker_len].rstrip()
        if self.is_reasoning:
            self._say(rest.rstrip())
        elif rest.strip() or not self._is_behind_call:
            self._say(rest)
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _push_special(self, name: str) -> None:
        if self._attempt is not None:
            if self._feed(name, is_special=True) is not None:
                # It does not belong to a call, so it may be a marker.
                self._push_special(name)
        elif self._is_marker_here(name):
            text, self._held = self._held, ""
            self._mark(name, text)
        elif self.is_reasoning:
            self._push_text(name)

    def _is_marker_here(self, name: str) -> bool:
        if self._is_shaped and not (self.is_reasoning or self._is_at_start or self._is_behind_call):
            return False
        if self.is_reasoning:
            return name == self._closes_reasoning or (self._format.calls_end_reasoning and name in self._openers)
        return name in self._openers or name in self._closers or name in dict(self._format.reasoning)

    def _push_text(self, text: str) -> None:
        while text:
            text = self._feed(text) or "" if self._attempt is not None else self._search(text)

    def _search(self, piece: str) -> str:
        """Looks for a marker; returns the text from which on a call is attempted or reasoning has begun or ended."""
        text, self._held = self._held + piece, ""
        begun = text.lstrip()
        may_be_bare = not self.is_reasoning and (self._is_at_start or self._is_behind_call)
        # A marker may begin as a call without one does.
        if may_be_bare and begun and not any(map(begun.startswith, self._text_markers())) and not self._begins(begun):
            for syntax in self._syntaxes:
                # Calls of some syntaxes have no marker.
                if not syntax.open and begun[0] in BARE_STARTS.get(syntax.body, ""):
                    self._begin(syntax, text[: len(text) - len(begun)])
                    return begun
        if self._is_shaped and not self.is_reasoning:
            return self._search_beginning(text)
        markers = [marker for marker in self._text_markers() if marker in text]
        if markers:
            marker = min(markers, key=text.index)
            before, _, after = text.partition(marker)
            self._mark(marker, before)
            return after
        said = text[: len(text) - begun_len(text, self._text_markers())]
        if self._syntaxes or self.is_reasoning or self._is_at_start:
            said = said.rstrip()
        self._held = text[len(said) :]
        self._say(said)
        return ""

    def _search_beginning(self, text: str) -> str:
        """Looks for a marker only where an answer of a certain form may have one: at its beginning or after a call."""
        begun = text.lstrip()
        if self._is_at_start or self._is_behind_call:
            markers = self._text_markers()
            found = next((marker for marker in markers if begun.startswith(marker)), None)
            if found is not None:
                self._mark(found, text[: len(text) - len(begun)])
                return begun[len(found) :]
            if not begun or self._begins(begun):
                self._held = text
                return ""
        self._say(text)
        return ""

    def _begins(self, text: str) -> bool:
        """Whether a text may become a marker."""
        return any(marker.startswith(text) for marker in self._text_markers())

    def _text_markers(self) -> list[str]:
        """Markers that count wherever their letters are, in the state that the answer is in."""
        found = [*self._openers, *self._closers]
        if self.is_reasoning:
            found = [self._closes_reasoning, *(self._openers if self._format.calls_end_reasoning else ())]
        elif self._is_at_start:
            found += dict(self._format.reasoning)
        return [marker for marker in found if marker not in self._special]

    def _mark(self, marker: str, before: str) -> None:
        """Goes into the state that a marker brings, after the text before it; out of place it is text."""
        said = before.rstrip()
        if self.is_reasoning and marker == self._closes_reasoning:
            self._say(said)
            # Whatever may begin an answer may also follow its reasoning.
            self._closes_reasoning, self._drops_space, self._is_at_start = "", True, True
        elif marker in self._openers:
            self._say(said)
            self._begin(self._openers[marker], before[len(said) :])
        elif marker in self._closers:
            if said or not self._is_behind_call:
                self._say(before if marker in self._special else before + marker)
        elif self._is_at_start and not said:
            self._closes_reasoning, self._drops_space = dict(self._format.reasoning)[marker], True
            self._is_at_start = False
        else:
            self._say(before if marker in self._special else before + marker)

    def _begin(self, syntax: CallSyntax, space: str) -> None:
        attempt = _Attempt(syntax, new_body(syntax.body, self._tools, is_bare=not syntax.open), space)
        attempt.raw.append(syntax.open)
        if syntax.open not in self._special:
            attempt.shown.append(syntax.open)
        for character in syntax.open if syntax.keeps_open else "":
            attempt.body.push(character)
        self._attempt = attempt

    def _feed(self, text: str, *, is_special: bool = False) -> str | None:
        """Gives text to the call that may be in the making; returns what is left when that has ended, else None."""
        attempt = self._attempt
        if attempt is None:
            return text
        body = attempt.body
        for place, character in enumerate(text):
            body.push(character)
            if body.has_failed:
                self._attempt = None
                if is_special:
                    del attempt.raw[len(attempt.raw) - place :]
                self._restore(attempt)
                return text[place:]
            attempt.raw.append(character)
            if not is_special:
                attempt.shown.append(character)
            if body.is_whole:
                self._attempt = None
                if not self._tell_calls(attempt):
                    self._restore(attempt)
                elif isinstance(body, XmlBody) and body.overlap:
                    self._mark(body.overlap, "")
                rest = text[place + 1 :]
                return None if is_special else rest
        return None

    def _tell_calls(self, attempt: _Attempt) -> bool:
        """Hands out the calls of a body, if it has any."""
        calls = attempt.body.calls()
        if calls is None or (not attempt.syntax.open and not all(call.name in self._tools for call in calls)):
            return False
        self._closes_reasoning = ""
        self._is_at_start, self._is_behind_call, self._drops_space = False, True, False
        for call in calls:
            index = self.num_calls
            # The model's own id where it gave one that clients can use, else a random one.
            length, call_id = self._format.call_id_len, call.call_id
            fits = len(call_id) <= 64 if length is None else len(call_id) == length
            if not (fits and call_id.isascii() and call_id.isalnum() and call_id not in self._call_ids):
                call_id = f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
            self._call_ids.append(call_id)
            self._deltas += [CallBegun(index, self._call_ids[-1], call.name), CallArguments(index, call.arguments)]
        return True

    def _restore(self, attempt: _Attempt) -> None:
        """Hands out as text what was no call."""
        said = attempt.raw if self.is_reasoning else attempt.shown
        text = attempt.space + "".join(said)
        kept = text.rstrip()
        if kept:
            self._say(kept)
        self._held = text[len(kept) :]

    def _say(self, text: str) -> None:
        """Hands out more text or reasoning, whichever the answer is in at the moment."""
        if self._drops_space:
            # The form may begin with a blank.
            text = text.lstrip("\n" if self._is_shaped and not self.is_reasoning else None)
        if not text:
            return
        self._drops_space = False
        if text.strip():
            self._is_at_start = self._is_behind_call = False
        self._deltas.append(ReasoningDelta(text) if self.is_reasoning else ContentDelta(text))


def joined(deltas: Collection[Delta]) -> tuple[Delta, ...]:
    """Deltas with those joined that go on in one piece."""
    found: list[Delta] = []
    for kind, run in groupby(deltas, type):
        if kind is ContentDelta:
            found.append(ContentDelta("".join([each.text for each in run if isinstance(each, ContentDelta)])))
        elif kind is ReasoningDelta:
            found.append(ReasoningDelta("".join([each.text for each in run if isinstance(each, ReasoningDelta)])))
        else:
            found += run
    return tuple(found)


def begun_len(text: str, markers: Collection[str]) -> int:
    """Length of the end of a text that may be the beginning of a marker."""
    beginnings = (marker[:length] for marker in markers for length in range(1, len(marker)))
    return max((len(each) for each in beginnings if text.endswith(each)), default=0)
