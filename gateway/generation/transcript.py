"""What one sample says: its tokens as text, which ends at a stop string.

A stop string is found in text that arrives in pieces, and no text is given past one or that may become one. Which stop
string wins does not depend on how the text is cut: the one that is complete first, and of several that are complete at
the same character the longest. A special token is no text for clients, and for stop strings only where they have the
name of one in them: for those it stands in its place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from gateway.generation.events import GuessFacts, OutputToken
from gateway.rounds.round import Round
from gateway.text.tokenizer import Detokenizer
from gateway.tools.channels import ChannelReader
from gateway.tools.reader import AnswerReader, joined
from outrider.answer import ContentDelta, Delta
from outrider.parameters import FinishReason

ENDING_TOKENS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


class StopScanner:
    """Passes text through and holds back its tail while that may still turn into a stop string; none is empty."""

    def __init__(self, stops: Sequence[str], naming: Collection[str] = ()) -> None:
        """`naming` are those stop strings that have the name of a token in them that is no text."""
        self._stops = [_StopString(stop, stop in naming) for stop in stops]
        self._held: list[str] = []  # an entry for each character, empty where no client sees it
        self.found: str | None = None

    def push(self, piece: str, *, is_name: bool = False, num_spared: int = 0) -> str:
        """Takes more text; returns the text that is final now. After a stop string was found it returns nothing.

        The name of a token that is no text is never returned. A stop string that is complete within the first
        num_spared characters of the piece is text like any other.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return "" if is_name else piece
        shown = [""] * len(piece) if is_name else list(piece)
        looking = [each for each in self._stops if each.sees_names] if is_name else self._stops
        complete = [(end, -len(each.text), each) for each in looking if (end := each.end_in(piece, num_spared))]
        if complete:
            end, _, first = min(complete, key=itemgetter(0, 1))
            self.found = first.text
            text, _ = self._parted(shown[:end], {first.sees_names: len(first.text)})
            return text
        begun_lens: dict[bool, int] = {}
        for each in self._stops:
            if len(each.begun) > begun_lens.get(each.sees_names, 0):
                begun_lens[each.sees_names] = len(each.begun)
        text, self._held = self._parted(shown, begun_lens)
        return text

    def flush(self) -> str:
        """Returns what is still held: no more of this text comes, so it cannot become a stop string."""
        for each in self._stops:
            each.begun = ""
        text, self._held = "".join(self._held), []
        return text if self.found is None else ""

    def _parted(self, shown: Sequence[str], tails: Mapping[bool, int]) -> tuple[str, list[str]]:
        """Text that was held or is new, parted before the longest of some tails; by whether a length counts names."""
        characters = [*self._held, *shown]
        cut = len(characters)
        for counts_names, length in tails.items():
            start, left = len(characters), length
            while left:
                start -= 1
                left -= counts_names or characters[start] != ""
            cut = min(cut, start)
        return "".join(characters[:cut]), characters[cut:]


@dataclass(slots=True)
class _StopString:
    """A stop string; `begun` is how much of it the text ends with, less than all."""

    text: str
    sees_names: bool
    begun: str = ""

    def end_in(self, piece: str, num_spared: int) -> int | None:
        """Takes a piece; returns where in it the stop string is complete first, after the spared characters."""
        seen, size = self.begun + piece, len(self.text)
        place = seen.find(self.text, max(0, len(self.begun) + num_spared + 1 - size))
        if place >= 0:
            return place + size - len(self.begun)
        start = seen.find(self.text[0], max(0, len(seen) + 1 - size))
        while start >= 0 and not self.text.startswith(seen[start:]):
            start = seen.find(self.text[0], start + 1)
        self.begun = seen[start:] if start >= 0 else ""
        return None


@dataclass(slots=True)
class Transcript:
    """Turns rounds into text until the request ends, by the target's word or by a stop string.

    `tells_guesses` says whether tokens carry the guess that they were. With a `reader` only content is text, in which
    stop strings are looked for. One that is complete within the text of the first `min_tokens` tokens ends nothing.
    """

    detokenizer: Detokenizer
    scanner: StopScanner
    tells_guesses: bool = False
    reader: AnswerReader | ChannelReader | None = None
    min_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    _deltas: list[Delta] = field(default_factory=list)
    _num_spared: int = 0
    """Characters of the first min_tokens tokens that the reader holds back at most."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self.reader is not None and self.reader.num_calls > 0

    def take_deltas(self) -> tuple[Delta, ...]:
        """Takes the pieces that are new since the last time, in order."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas) if len(deltas) > 1 else tuple(deltas)

    def say(self, token_id: int, *, is_end: bool = False) -> str:
        """Takes a token's text; returns what text is final with it. The token that ends the answer may be one."""
        # An end of the model's is no text, even where the tokenizer does not call it special.
        is_silent = is_end and self.finish_reason is FinishReason.EOS
        text = "" if is_silent else self.detokenizer.push(token_id)
        name = self.detokenizer.name(token_id) if is_silent else self.detokenizer.name_of_special(token_id)
        is_early = len(self.token_ids) < self.min_tokens
        if self.reader is None:
            said = self._pass([ContentDelta(text)], is_early=is_early)
        else:
            was_reasoning = self.reader.is_reasoning
            deltas: list[Delta] = []
            if name is None:
                deltas = self.reader.push(text)
            elif not is_end:
                deltas = self.reader.push(name, is_special=True)
            self.reasoning_tokens += was_reasoning or self.reader.is_reasoning
            said = self._pass(deltas, is_early=is_early)
            held_len = self.reader.held_len
            self._num_spared = held_len if is_early else min(self._num_spared, held_len)
        if name is not None:
            said += self._note(self.scanner.push(name, is_name=True, num_spared=len(name) if is_early else 0))
        return said

    def _pass(self, deltas: Sequence[Delta], *, is_early: bool) -> str:
        """Notes deltas, the content as far as it is final, until a stop string ends it all; returns that content."""
        texts = []
        for delta in deltas:
            if self.scanner.found is not None:
                break
            if isinstance(delta, ContentDelta):
                num_spared = len(delta.text) if is_early else self._num_spared
                self._num_spared = max(0, self._num_spared - len(delta.text))
                texts.append(self._note(self.scanner.push(delta.text, num_spared=num_spared)))
            else:
                texts.append(self._note(self.scanner.flush()))
                self._deltas.append(delta)
        return "".join(texts)

    def _note(self, content: str) -> str:
        if content:
            self._deltas.append(ContentDelta(content))
        return content

    def take(self, committed: Round) -> tuple[OutputToken, ...]:
        """The tokens of a round with their text. Tokens after the one that completes a stop string do not exist."""
        verdict = committed.verdict
        tokens: list[OutputToken] = []
        # The target's own token comes after all of them.
        rows = verdict.accepted_rows if self.tells_guesses else ()
        self.finish_reason = verdict.finish_reason
        last = len(committed.token_ids) - 1 if verdict.finish_reason in ENDING_TOKENS else -1
        for index, token_id in enumerate(committed.token_ids):
            text = self.say(token_id, is_end=index == last)
            logprob = verdict.logprobs[index] if verdict.logprobs else None
            guess = GuessFacts.of(committed.proposal, rows[index]) if index < len(rows) else None
            tokens.append(OutputToken(token_id, committed.origins[index], text, logprob, guess))
            self.token_ids.append(token_id)
            if self.scanner.found is not None:
                self.finish_reason = FinishReason.STOP_STRING
                break
        return tuple(tokens)

    def finish(self) -> str:
        """Text that was held back and is final now; what was held may complete a stop string at the very end."""
        is_cut = self.finish_reason is FinishReason.LENGTH
        text = self.detokenizer.flush(is_cut=is_cut)
        deltas: list[Delta] = [ContentDelta(text)]
        if self.reader is not None:
            deltas = [*self.reader.push(text), *self.reader.finish(is_cut=is_cut)]
        rest = self._pass(deltas, is_early=len(self.token_ids) <= self.min_tokens)
        if self.scanner.found is not None:
            self.finish_reason = FinishReason.STOP_STRING
        return rest + self._note(self.scanner.flush())
