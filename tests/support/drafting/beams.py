"""Beam searches over the sessions of a target, with whatever guesses a test makes, and proposals that come true."""

import random
import time
from collections.abc import Callable, Sequence

from support.services.stepped_target import Target

from gateway.beams.record import BeamRecord, Hypothesis
from outrider.beams import BeamSearch, LiveBeam, plant
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import OpenSearch, Step

Guess = Callable[[BeamRecord], TokenTree]


class Searching:
    """One search on a target, step by step, and its record."""

    def __init__(self, target: Target, spec: SessionSpec, search: BeamSearch, session_id: bytes | None = None) -> None:
        self.target = target
        self.spec = spec
        self.record = BeamRecord(spec, search)
        self.session_id = session_id or target.session_id
        self.epoch = 0
        self.num_passes = 0

    @property
    def fence(self) -> Fence:
        return Fence(self.session_id, self.epoch, len(self.record))

    def open(self, tree: TokenTree = EMPTY) -> None:
        """Opens the session with all that the record has, in a new epoch."""
        self.epoch += 1
        search = OpenSearch(self.record.search.width, self.record.live)
        step = Step(tree, 0, time.perf_counter_ns())
        self.target.sessions.open(self.fence, self.spec, step, self.target.answers, search=search)

    def step(self, tree: TokenTree = EMPTY) -> None:
        self.target.sessions.step(self.fence, Step(tree, 0, time.perf_counter_ns()), self.target.answers)

    def take(self) -> None:
        """Lets the target work, and takes its verdict; does nothing about an answer to something older."""
        for answer in self.target.run():
            if answer.fence == self.fence and answer.content is not None:
                self.num_passes += 1
                self.record.take(answer.content.beam_steps)

    def to_the_end(self, guess: Guess = lambda _record: EMPTY) -> tuple[Hypothesis, ...]:
        """What the search finds."""
        self.open()
        self.take()
        while self.record.finish_reason is None:
            self.step(guess(self.record))
            self.take()
        return self.record.finished


def beams_of(record: BeamRecord) -> list[int]:
    """The last tokens of the live beams."""
    return [beam.token_ids[-1] for beam in record.live]


class Oracle:
    """Guesses what an earlier search of the same request kept, so many steps ahead."""

    def __init__(self, depth: int) -> None:
        self._kept: dict[int, tuple[LiveBeam, ...]] = {}
        self._depth = depth

    def watch(self, record: BeamRecord) -> TokenTree:
        """A guess of nothing, of a search that is learnt."""
        self._kept[len(record)] = record.live
        return EMPTY

    def __call__(self, record: BeamRecord) -> TokenTree:
        last, parents, token_ids = beams_of(record), list[int](), list[int]()
        rows = {beam.token_ids: row for row, beam in enumerate(record.live, start=1)}
        for length in range(len(record) + 1, len(record) + 1 + self._depth):
            for beam in self._kept.get(length, ()):
                if beam.token_ids[:-1] in rows:
                    rows[beam.token_ids] = len(rows) + 1
                    parents.append(rows[beam.token_ids[:-1]])
                    token_ids.append(beam.token_ids[-1])
        return plant(last, parents, token_ids)


def junk(chance: random.Random, vocabulary_size: int, within: Guess) -> Guess:
    """Guesses of another guesser with random rows among them, each after any row so far."""

    def guess(record: BeamRecord) -> TokenTree:
        tree = within(record)
        num_beams = len(record.live)
        parents, token_ids = list(tree.parents[num_beams:]), list(tree.token_ids[num_beams:])
        for _ in range(chance.randrange(6)):
            parent = chance.randrange(1, num_beams + len(parents) + 1)
            parents.append(parent)
            token_ids.append(chance.randrange(vocabulary_size))
        return plant(beams_of(record), parents, token_ids)

    return guess


def last_rows(guess: Guess, limit: int) -> Guess:
    """A guess without rows deeper than `limit` tokens after the prompt."""

    def cut(record: BeamRecord) -> TokenTree:
        tree, num_beams = guess(record), len(record.live)
        room = limit - (len(record) - record.prompt_len)
        rows: dict[int, int] = {row: row for row in range(1, num_beams + 1)}
        parents, token_ids = list[int](), list[int]()
        for row in range(num_beams + 1, len(tree) + 1):
            if tree.parents[row - 1] in rows and tree.depths[row] - 1 <= room:
                rows[row] = len(rows) + 1
                parents.append(rows[tree.parents[row - 1]])
                token_ids.append(tree.token_ids[row - 1])
        return plant(beams_of(record), parents, token_ids)

    return cut


def texts(found: Sequence[Hypothesis]) -> list[tuple[int, ...]]:
    """What was found, best first."""
    return [each.token_ids for each in found]
