"""A batch of an engine whose rows have no names: which row is which sequence, and one exchange a step for all."""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.client import DraftClient
from outrider.drafting.pace import Pace
from outrider.drafting.peer import DraftLate
from outrider.drafting.sequence import DraftSequence, Guesses
from outrider.errors import PeerLost

KEEP_STEPS = 64  # for which a sequence that no row has is kept: a request that was preempted may come back

log = logging.getLogger("outrider.drafting")

Ids = NDArray[np.int32]
Lengths = Sequence[int] | Ids


@dataclass(slots=True)
class Counters:
    """What the proposer has done since it began. Of rows each counts once a step."""

    steps: int = 0
    exchanges: int = 0
    """Steps in which a draft was asked."""
    rows_asked: int = 0
    rows_answered: int = 0
    rows_late: int = 0
    rows_lost: int = 0
    """Rows without a draft that can be asked."""
    rows_refused: int = 0
    guesses: int = 0
    kept: int = 0
    sequences_opened: int = 0
    sequences_closed: int = 0
    errors: int = 0
    """Faults of the proposer itself, which are in the log."""
    seconds_waited: float = 0.0


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence, the step in which a row had it last, and how many guesses that row got then."""

    sequence: DraftSequence
    step: int
    guessed: int = 0

    def begins(self, token_ids: Ids) -> bool:
        """Whether the sequence is how the tokens begin."""
        length = len(self.sequence)
        return length <= len(token_ids) and np.array_equal(
            np.frombuffer(self.sequence.token_ids, np.int32), token_ids[:length]
        )


class RowProposer:
    """Guesses for the rows of a batch, which are known by their tokens alone; never raises."""

    def __init__(self, client: DraftClient, max_count: int, max_len: int, deadline_s: float) -> None:
        """At most max_count guesses a row, no row past max_len tokens, no step waits longer than deadline_s."""
        self.counters = Counters()
        self.pace = Pace(max_count)
        self._client = client
        self._max_len = max_len
        self._deadline_s = deadline_s
        self._rows: list[_Row] = []  # of the last step, in the order of its rows
        self._away: list[_Row] = []  # those that no row had then
        self._count = 0
        self._began_s = 0.0
        self._is_decoding = False

    def propose(self, sampled: Sequence[Sequence[int]], lengths: Lengths, token_ids: Ids) -> list[list[int]]:
        """Guesses of each row, none where there are none.

        `sampled` has the tokens that each row got in this step, none while its prompt is read; lengths how many tokens
        each has, prompt included; token_ids [rows, at least the longest] the tokens themselves.
        """
        try:
            return self._propose(sampled, lengths, token_ids)
        except Exception:
            # An engine must not end for what only makes it faster.
            self.counters.errors += 1
            log.exception("the proposer failed; this step has no guesses")
            return [[] for _ in sampled]

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: Lengths, token_ids: Ids) -> list[list[int]]:
        began_s = time.monotonic()
        self.counters.steps += 1
        before = self._rows
        rows = self._match(sampled, [token_ids[row, : lengths[row]] for row in range(len(sampled))])
        # What was kept of the guesses of the last step, and what that step cost.
        pairs = zip(rows, sampled, strict=True)
        verified = [(row.guessed, len(each) - 1) for row, each in pairs if row.guessed and each]
        self.counters.kept += sum(kept for _, kept in verified)
        if verified:
            self.pace.verified(verified)
        was_decoding, self._is_decoding = self._is_decoding, all(sampled)
        if rows and was_decoding and self._is_decoding and set(before) == set(rows):
            self.pace.step(len(rows), self._count, began_s - self._began_s)
        num_decoded = sum(1 for each in sampled if each)
        count = self.pace.choose(num_decoded) if num_decoded else 0
        self._count, self._began_s = count, began_s
        # A prompt that the engine still reads, the draft reads meanwhile.
        asks = [(row.sequence, count if each else 0) for row, each in zip(rows, sampled, strict=True)]
        if not count:
            asks = [(sequence, 0) for sequence, _ in asks if sequence.link is None]
        found = dict(zip([id(each) for each, _ in asks], self._client.guess(asks, self._deadline_s), strict=True))
        self.counters.exchanges += bool(count)
        self.counters.seconds_waited += time.monotonic() - began_s
        guesses: list[list[int]] = []
        for row, each in zip(rows, sampled, strict=True):
            room = self._max_len - len(row.sequence) - 1
            token_list = [*found.get(id(row.sequence), Guesses()).token_ids[: max(room, 0)]] if each else []
            row.guessed = len(token_list)
            guesses.append(token_list)
        if count:
            answers = [found[id(row.sequence)] for row, each in zip(rows, sampled, strict=True) if each]
            num_answered = sum(1 for each in answers if each.token_ids)
            self.counters.rows_asked += len(answers)
            self.counters.rows_answered += num_answered
            self.counters.guesses += sum(len(each.token_ids) for each in answers)
            for error in (each.error for each in answers):
                self.counters.rows_late += isinstance(error, DraftLate)
                self.counters.rows_lost += isinstance(error, PeerLost)
                self.counters.rows_refused += error is not None and not isinstance(error, DraftLate | PeerLost)
            self.pace.answered(len(answers), num_answered)
        return guesses

    def _match(self, sampled: Sequence[Sequence[int]], tokens: Sequence[Ids]) -> list[_Row]:
        """The sequence of each row, moved to the row's tokens; a new one where no sequence fits."""
        step, free = self.counters.steps, {*self._rows, *self._away}
        rows: list[_Row | None] = []
        for place, ids in enumerate(tokens):
            held = self._rows[place] if place < len(self._rows) else None
            rows.append(held if held is not None and held.begins(ids) else None)
        free.difference_update(rows)
        by_length = defaultdict[int, list[_Row]](list)
        for each in free:
            by_length[len(each.sequence)].append(each)
        for place, ids in enumerate(tokens):
            if rows[place] is not None:
                continue
            candidates = by_length[len(ids) - len(sampled[place])]
            found = next((each for each in candidates if each.begins(ids)), None)
            if found is None:
                found = _Row(self._client.open(ids.tolist(), self._max_len), step)
                self.counters.sequences_opened += 1
            else:
                candidates.remove(found)
                free.discard(found)
            rows[place] = found
        matched = [row for row in rows if row is not None]
        for row, ids in zip(matched, tokens, strict=True):
            row.sequence.extend(ids[len(row.sequence) :].tolist())
            row.step = step
        gone = [each for each in free if step - each.step > KEEP_STEPS]
        self._client.close_sequences([each.sequence for each in gone])
        self.counters.sequences_closed += len(gone)
        self._rows, self._away = matched, [each for each in free if step - each.step <= KEEP_STEPS]
        for each in self._away:
            # What was guessed for it is not verified.
            each.guessed = 0
        return matched

    def told(self) -> str:
        """The counters as a line of a log."""
        return ", ".join(f"{name} {value:.6g}" for name, value in asdict(self.counters).items() if value)
