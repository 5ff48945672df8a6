"""The choice of K on machines whose costs are known exactly."""

import pickle
import random
from dataclasses import dataclass, field

import pytest
from support.services.markov import round_of

from bench.policy.worlds import of_experts
from gateway.rounds.choice import Table, choose
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, DrafterId, Place
from gateway.rounds.tuning import TUNING


@dataclass
class Machine:
    """Simulates rounds with given costs, in microseconds, and acceptance; lets the policy run on them."""

    alpha: float
    draft_us: float = 200
    verify_us: float = 4000
    row_us: float = 100
    message_us: float = 500
    policy: SpeculationPolicy = field(default_factory=SpeculationPolicy)
    noise: random.Random = field(default_factory=lambda: random.Random(5))
    elapsed_us: float = 0.0
    tokens: int = 0
    counts: list[int] = field(default_factory=list)

    def forward_us(self, draft_count: int) -> float:
        """Cost of a forward of the target."""
        return self.verify_us + self.row_us * draft_count

    def round(self, draft_count: int, unasked: bool = False) -> None:
        """One round: the costs, the luck, and what the policy sees of them."""
        accepted = 0
        while accepted < draft_count and self.noise.random() < self.alpha:
            accepted += 1
        verify_us = self.forward_us(draft_count) * self.noise.uniform(0.9, 1.1)
        draft_us = self.draft_us * draft_count
        round_us = verify_us + draft_us + (20 if unasked else self.message_us)
        self.elapsed_us += round_us
        self.tokens += accepted + 1
        evaluated = min(accepted + 1, draft_count)
        committed = round_of(
            (1,) * (accepted + 1),
            (),
            draft_count=draft_count,
            accepted_count=accepted,
            evaluated_count=evaluated,
            draft_compute_us=int(draft_us),
            verify_compute_us=int(verify_us),
            round_us=int(round_us),
        )
        self.policy.observe(committed, unasked=unasked)

    def run(self, decisions: int, limit: int = 8) -> None:
        """Follows the policy's choices."""
        for _ in range(decisions):
            choice = self.policy.choose(limit)
            # A stretch of plain decoding that goes on pays no message: the target is never idle in it.
            self.round(choice.draft_count, unasked=not choice.draft_count and not sum(self.counts[-1:]))
            self.counts.append(choice.draft_count)
            for _ in range(choice.plain_budget):
                self.round(0, unasked=True)

    def best_speed(self) -> float:
        """Tokens per microsecond of the best fixed K, from the true costs."""
        plain = 1 / (self.forward_us(0) + 20)
        speeds = [plain]
        for count in range(1, 9):
            tau = sum(self.alpha**power for power in range(count + 1))
            cost_us = self.forward_us(count) + self.draft_us * count + self.message_us
            speeds.append(tau / cost_us)
        return max(speeds)


class ExpertMachine(Machine):
    """One whose rows read experts of their own: 8 of 64 each."""

    def forward_us(self, draft_count: int) -> float:
        return of_experts(self.verify_us, 64, 8, share=0.6, row_share=0.0)(draft_count + 1)


def common(counts: list[int]) -> int:
    """The most frequent choice."""
    return max(set(counts), key=counts.count)


def test_a_cheap_good_draft_is_used_to_the_full() -> None:
    """High acceptance at little cost: long proposals."""
    machine = Machine(alpha=0.95, draft_us=50, row_us=20)
    machine.run(300)
    assert common(machine.counts[100:]) == 8


def test_fewer_guesses_are_made_where_each_row_reads_experts_of_its_own() -> None:
    """At the same acceptance, from the first round after the services' own tables on, by the choice from a table."""
    flat, growing = (kind(alpha=0.8, draft_us=100, row_us=20, message_us=100) for kind in (Machine, ExpertMachine))
    for machine in (flat, growing):
        target = {rows: machine.forward_us(rows - 1) for rows in (1, 2, 4, 8, 16)}
        machine.policy.costs.begin(target, {ANY_DRAFT: {1: machine.draft_us}})
        machine.run(20)
        choice = machine.policy.choose(8)
        assert isinstance(choice.table, Table)
        assert choose(choice.table, TUNING) == choice
        machine.run(300)
        assert machine.tokens / machine.elapsed_us > 0.9 * machine.best_speed()
    assert 0 < common(growing.counts[:20]) < common(flat.counts[:20])
    assert 0 < common(growing.counts[20:]) < common(flat.counts[20:])


def test_an_expensive_way_means_plain_decoding() -> None:
    """When messages cost far more than a forward, the target goes on alone."""
    machine = Machine(alpha=0.7, message_us=60_000)
    machine.run(200)
    assert common(machine.counts[100:]) == 0


def test_a_bad_draft_is_not_asked() -> None:
    """Guesses that are never accepted are not worth their cost."""
    machine = Machine(alpha=0.02, draft_us=1000)
    machine.run(200)
    assert common(machine.counts[100:]) == 0


@pytest.mark.slow
def test_is_near_the_best_fixed_count() -> None:
    """Over good, middling and bad drafts, at most a tenth of the best fixed speed is lost, learning included."""
    for alpha in (0.2, 0.5, 0.64, 0.8, 0.9):
        for draft_us in (100, 400, 1500):
            for row_us in (50, 1500):
                machine = Machine(alpha=alpha, draft_us=draft_us, row_us=row_us)
                machine.run(600)
                assert machine.tokens / machine.elapsed_us > 0.9 * machine.best_speed(), (alpha, draft_us, row_us)


def test_recovers_through_probes_when_the_draft_becomes_good() -> None:
    """After a long time without the draft, probes notice that it is worth its cost now."""
    machine = Machine(alpha=0.05, draft_us=800)
    machine.run(300)
    assert common(machine.counts[100:]) == 0
    machine.alpha, machine.draft_us = 0.9, 100
    machine.counts.clear()
    machine.run(600)
    assert common(machine.counts[400:]) > 0


def test_probes_cost_little() -> None:
    """While plain decoding is best, looking for something better costs a few hundredths of the time."""
    machine = Machine(alpha=0.1, draft_us=2000, message_us=5000)
    machine.run(300)
    assert machine.tokens / machine.elapsed_us > 0.97 * machine.best_speed()


def test_respects_the_limit() -> None:
    """No choice is above the limit, and with no room at all K is 0."""
    machine = Machine(alpha=0.95, draft_us=50)
    machine.run(100, limit=3)
    assert max(machine.counts) == 3
    assert machine.policy.choose(0).draft_count == 0


def test_starts_with_a_middling_count() -> None:
    """Before anything is known, K is the first guess or the limit."""
    assert SpeculationPolicy().choose(8).draft_count == 4
    assert SpeculationPolicy().choose(2).draft_count == 2


def test_one_outlier_changes_little() -> None:
    """A single round that hung for a minute does not end speculation."""
    machine = Machine(alpha=0.9)
    machine.run(100)
    before = machine.policy.costs.round_us(ANY_DRAFT, 4)
    machine.message_us = 60_000_000
    machine.round(4)
    assert machine.policy.costs.round_us(ANY_DRAFT, 4) < 1.5 * before


def test_an_observed_policy_chooses_what_it_would_have_chosen() -> None:
    """A copy is asked after every round, as a page does; the choices are those of a policy that is not observed."""
    alone, watched = Machine(alpha=0.7), Machine(alpha=0.7)
    for _ in range(120):
        alone.run(1)
        watched.run(1)
        before = pickle.dumps(watched.policy)
        copy = watched.policy.copied()
        known = copy.session(*copy.costs.drafters)
        copy.choose(8, known, ready=False)
        copy.row_price(known)
        assert pickle.dumps(watched.policy) == before
    assert alone.counts == watched.counts
    assert len(set(alone.counts)) > 1


def test_a_chain_of_the_target_s_own_begins_with_two_guesses() -> None:
    """Until both places were tested; costs that a service measured say nothing of what is kept there."""
    policy, head = SpeculationPolicy(), DrafterId("eagle3", Place.HOSTED)
    policy.costs.begin({1: 10_000, 9: 11_000}, {head: {1: 100}})
    session = policy.session(head)
    assert policy.choose(8, session, ready=False).draft_count == 2
    estimates = policy.costs.of(head).acceptance
    for accepted, tested, most in ((0, 1, 2), (1, 2, 8)):
        estimates.observe(accepted, tested)
        assert max(each.draft_count for each in policy.candidates(head, 8, session)) == most
