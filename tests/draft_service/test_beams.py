"""The guesses for a beam search: those of a search by the draft, from the target's beams and sums."""

import os
import random
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from support.basics import Answers, SteppedDevice, check_empty, spec_of

from draft_service.sessions import DraftSessions
from draft_service.states import DraftState, Search, Wanted
from outrider.beams import LiveBeam, split
from outrider.drafters.beam_drafter import BeamDrafter, BeamDraftTask
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.model_service.leases import LeaseTable
from outrider.rpc.fencing import Fence
from outrider.token_tree import TokenTree

PROMPT = tuple(range(100, 140))
WIDTH, DRAFT_COUNT = 2, 28
STEPS, CANDIDATES = 4, 7
SPEC = spec_of(PROMPT, 200, eos=(0,), temperature=1.0)
LIVE = (LiveBeam((7, 8, 9), -1.0), LiveBeam((50, 60, 70), -2.0))


class Searcher:
    """One search on a draft, whose tasks advance when a test says so."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.device = SteppedDevice[BeamDraftTask]()
        self.table = LeaseTable[DraftState](60.0)
        self.sessions = DraftSessions(runner, self.table, self.device.submit)
        self.drafter = BeamDrafter(runner, self.table.with_room)
        self.answers = Answers()
        self.session_id = os.urandom(16)

    def fence(self, epoch: int, live: Sequence[LiveBeam]) -> Fence:
        return Fence(self.session_id, epoch, len(PROMPT) + (len(live[0].token_ids) if live else 0))

    def open(self, epoch: int, live: Sequence[LiveBeam]) -> None:
        self.sessions.open(self.fence(epoch, live), SPEC, wanted(live), self.answers)

    def advance(self, epoch: int, live: Sequence[LiveBeam]) -> None:
        self.sessions.advance(self.fence(epoch, live), (), wanted(live), self.answers)

    def proposals(self) -> list[TokenTree | None]:
        """The answers since the last call, None for one that wants tokens."""
        self.device.run(self.drafter.advance)
        answers, self.answers[:] = list(self.answers), []
        assert all(answer.error is None for answer in answers)
        # One that was overtaken is answered with what there is.
        assert all(each.cached_len == each.fence.base_len for each in answers[-1:] if each.content is not None)
        return [answer.content for answer in answers]


def wanted(live: Sequence[LiveBeam]) -> Wanted:
    return Wanted(DRAFT_COUNT, time.perf_counter_ns(), search=Search(WIDTH, tuple(live)))


@pytest.fixture
def searcher(runner: ModelRunner) -> Iterator[Searcher]:
    made = Searcher(runner)
    yield made
    made.table.clear()
    check_empty(runner.pool)


def searched(runner: ModelRunner, live: Sequence[LiveBeam]) -> list[LiveBeam]:
    """All beams of a search from these, each computed from a whole sequence."""
    found: list[LiveBeam] = []
    for _ in range(STEPS):
        candidates = []
        for beam in found[-CANDIDATES:] or live:
            session = runner.open((*PROMPT, *beam.token_ids), 1)
            logits = runner.forward([Feed(session)]).logits[0, : runner.vocabulary_size]
            session.free()
            sums = logits.log_softmax(dim=-1) + torch.tensor(beam.score)
            candidates += [LiveBeam((*beam.token_ids, place), float(each)) for place, each in enumerate(sums) if place]
        found += sorted(candidates, key=lambda each: -each.score)[:CANDIDATES]
    return found


def sequences(tree: TokenTree | None, live: Sequence[LiveBeam]) -> list[tuple[int, ...]]:
    """What a proposal guesses, each with all before it."""
    assert tree is not None
    found = []
    for beam, own in zip(live, split(tree, [each.token_ids[-1] for each in live]), strict=True):
        for row in range(1, len(own.tree) + 1):
            found.append((*beam.token_ids, *(own.tree.token_ids[each - 1] for each in own.tree.path(row))))
    return sorted(found)


def expected(runner: ModelRunner, live: Sequence[LiveBeam]) -> list[tuple[int, ...]]:
    return sorted(each.token_ids for each in searched(runner, live))


def test_guesses_are_the_beams_of_a_search(searcher: Searcher) -> None:
    """From the prompt on, where nothing is guessed yet, over beams that go on from guesses, and from others."""
    searcher.open(1, ())
    assert searcher.proposals() == [TokenTree()]
    searcher.advance(1, LIVE)
    [found] = searcher.proposals()
    assert sequences(found, LIVE) == expected(searcher.runner, LIVE)
    deepest = searched(searcher.runner, LIVE)[-CANDIDATES:]
    later = (deepest[0], LiveBeam((*LIVE[1].token_ids, 3, 4, 5, 6), -9.0))
    searcher.advance(1, later)
    [found] = searcher.proposals()
    assert sequences(found, later) == expected(searcher.runner, later)


@pytest.mark.slow
def test_whatever_happens_to_a_session_the_guesses_are_the_same(searcher: Searcher) -> None:
    """Rollbacks, new openings, repetitions, lost caches, and requests that overtake each other."""
    chance, epoch, live = random.Random(3), 1, LIVE
    searcher.open(1, live)
    for _ in range(14):
        event = chance.randrange(6)
        held = searcher.table.get(searcher.session_id)
        assert held is not None
        if event == 0:
            epoch += 1
            searcher.sessions.rollback(Fence(searcher.session_id, epoch, chance.randrange(1, len(PROMPT) + 4)))
            searcher.advance(epoch, live)
            searcher.proposals()
            epoch += 1
            searcher.open(epoch, live)
        elif event == 1:
            epoch += 1
            searcher.open(epoch, live)
        elif event == 2:
            assert held.beams is not None
            searcher.proposals()
            for session in held.beams.all_sessions:
                session.free()
        elif event == 3:
            searcher.advance(epoch, live)
            searcher.advance(epoch, live)
        else:
            # Between two steps of the draft.
            searcher.device.step(searcher.drafter.advance)
        live = tuple(LiveBeam((*beam.token_ids, chance.randrange(1, 257)), beam.score - 1) for beam in live)
        searcher.advance(epoch, live)
        assert sequences(searcher.proposals()[-1], live) == expected(searcher.runner, live)
        searcher.runner.pool.check_integrity()


def test_beams_and_other_requests_do_not_mix(searcher: Searcher) -> None:
    searcher.open(1, LIVE)
    searcher.proposals()
    with pytest.raises(InvalidRequest, match="beams"):
        searcher.sessions.advance(Fence(searcher.session_id, 1, 44), (5,), Wanted(3, 0), searcher.answers)
    with pytest.raises(InvalidRequest, match="base_len"):
        searcher.sessions.advance(Fence(searcher.session_id, 2, 42), (), wanted(LIVE), searcher.answers)
