"""Branches on their way to a target's sessions: held verdicts that wait for them, and what may become of them before.

Everything happens on the target's device thread, between two steps, where messages come to its sessions.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from outrider.engine.noise import Purpose, first_uniforms, round_key
from outrider.model_service.outbox import Outbox
from outrider.parameters import DraftDistribution
from outrider.rpc.fencing import Fence
from outrider.token_tree import Branch
from target_service.sessions import TargetSessions
from target_service.states import PushedBranches, Step, TargetState

Arrival = tuple[Fence, PushedBranches]
Way = Callable[["Ways", Fence, PushedBranches, TargetState], Iterator[Arrival]]
"""What comes of branches in their place, at once."""


@dataclass
class Ways:
    """Lets the verdict on a proposal wait for the branches after it, which come in one of some ways, by the dice."""

    ways: tuple[Way, ...]
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    num_tokens: int = 16
    waiting: dict[bytes, tuple[TargetState, Step]] = field(default_factory=dict)
    seen: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Epoch and length of the last branches of each session, which may come before what they are to follow."""
    late: list[tuple[Fence, PushedBranches, Outbox]] = field(default_factory=list)
    earlier: dict[bytes, Arrival] = field(default_factory=dict)
    told: int = 0
    """How many came in another way than as they were sent."""

    def lead(self, monkeypatch: pytest.MonkeyPatch) -> "Ways":
        """Takes the place of what the sessions of all targets do with branches; returns itself."""
        start, run_ahead = TargetSessions._start, TargetSessions.run_ahead

        def hold(sessions: TargetSessions, session_id: bytes, held: TargetState, step: Step) -> None:
            length = held.committed_len
            has_come = self.seen.get(session_id) == (held.epoch, length)
            # Near the end of a request no branch has room.
            if step.tree and not step.is_of_branch and not has_come and length + 3 <= held.spec.max_len:
                self.waiting[session_id] = held, step
            else:
                start(sessions, session_id, held, step)

        def come(sessions: TargetSessions, fence: Fence, ahead: PushedBranches, owner: Outbox) -> None:
            held = sessions.table.get(fence.session_id)
            self.seen[fence.session_id] = fence.epoch, fence.base_len
            if isinstance(held, TargetState):
                for arrival in self.dice.choice(self.ways)(self, fence, ahead, held):
                    self.told += arrival != (fence, ahead)
                    run_ahead(sessions, *arrival, owner)
            if fence.session_id in self.waiting:
                start(sessions, fence.session_id, *self.waiting.pop(fence.session_id))
            late, self.late = self.late, [(fence, ahead, owner)] * (held is not None and self.dice.random() < 0.2)
            for each in late:
                run_ahead(sessions, *each)

        monkeypatch.setattr(TargetSessions, "_start", hold)
        monkeypatch.setattr(TargetSessions, "run_ahead", come)
        return self


def sent(_ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """They come as they were sent."""
    yield fence, ahead


def lost(ways: Ways, _fence: Fence, _ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """They are lost."""
    ways.told += 1
    yield from ()


def doubled(_ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """They come twice."""
    yield fence, ahead
    yield fence, replaced(ahead, [*ahead.branches, *ahead.branches])


def reordered(ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """They come in another order, and those of an earlier round behind them."""
    yield fence, replaced(ahead, ways.dice.sample(ahead.branches, len(ahead.branches)))
    if fence.session_id in ways.earlier:
        yield ways.earlier[fence.session_id]
    ways.earlier[fence.session_id] = fence, ahead


def swapped(ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """Each outcome has what was drawn after another one with the same number of accepted guesses, and its laws."""
    found = []
    for each in ahead.branches:
        others = [other for other in ahead.branches if other.accepted_count == each.accepted_count]
        found.append(ways.dice.choice(others)._replace(next_token_id=each.next_token_id))
    yield fence, replaced(ahead, found)


def forged(ways: Ways, fence: Fence, ahead: PushedBranches, held: TargetState) -> Iterator[Arrival]:
    """No draft has made them: any outcomes, tokens and lengths, each drawn from a law of one token."""
    dice, needs_laws = ways.dice, held.spec.acceptance.rule.needs_distributions
    found = []
    for _ in range(64):
        accepted_count = dice.randrange(4)
        room = held.spec.max_len - fence.base_len - accepted_count - 1
        if room > 0:
            token_ids = tuple(dice.randrange(ways.num_tokens) for _ in range(dice.randint(1, min(room, 4))))
            laws = tuple(DraftDistribution((each,), (1,)) for each in token_ids) if needs_laws else ()
            found.append(Branch(accepted_count, dice.randrange(ways.num_tokens), token_ids, distributions=laws))
    yield fence, replaced(ahead, found)


def mislabelled(_ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """The planted fault: guesses come with laws by which those that were likely are not."""

    def other(law: DraftDistribution) -> DraftDistribution:
        return DraftDistribution(law.token_ids, law.weights[::-1])

    branches = [each._replace(distributions=tuple(map(other, each.distributions))) for each in ahead.branches]
    yield fence, replaced(ahead, branches)


def peeking(_ways: Ways, fence: Fence, ahead: PushedBranches, held: TargetState) -> Iterator[Arrival]:
    """Only those come whose first guess is likely to be accepted, as the coin of its test says."""
    found = []
    for each in ahead.branches:
        length = fence.base_len + each.accepted_count + 1
        [coin] = first_uniforms([round_key(held.spec.seed, length, length, Purpose.ACCEPTANCE)])
        if coin < 0.5:
            found.append(each)
    yield fence, replaced(ahead, found)


def picked(ways: Ways, fence: Fence, ahead: PushedBranches, _held: TargetState) -> Iterator[Arrival]:
    """The planted fault: only those come whose first guess is one of some tokens, and else there is no proposal."""
    found = [each for each in ahead.branches if each.token_ids[0] >= ways.num_tokens // 2]
    yield fence, replaced(ahead, found)._replace(plain_on_miss=True)


def replaced(ahead: PushedBranches, branches: list[Branch]) -> PushedBranches:
    """The same with other branches."""
    return ahead._replace(branches=branches)
