"""What the time of a round holds."""

from contextlib import aclosing

from support.services.markov import MarkovDraft, MarkovTarget

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import GuessRequest, Proposal, TokenLog, Verdict
from gateway.speculation import speculate


class SlowTarget(MarkovTarget):
    """Takes a millisecond for every verdict, on the clock that it is given."""

    now_us: int = 0

    async def verify(self, proposal: Proposal, plain_budget: int, own: GuessRequest) -> Verdict:
        """The verdict, a millisecond later."""
        self.now_us += 1000
        return await super().verify(proposal, plain_budget, own)


async def test_a_client_that_takes_its_time_is_in_no_round() -> None:
    """The clock stands while a round is being delivered, so back-pressure is not taken for the cost of messages."""
    target = SlowTarget(max_len=30)
    log = target.log = TokenLog((3, 5), lambda: target.now_us * 1000)
    draft = MarkovDraft(log=log)
    times, gaps = [], []
    async with aclosing(speculate(log, RoundPlanner(SpeculationPolicy(), 4, 30, 8), target, draft)) as rounds:
        async for committed in rounds:
            times.append(committed.round_us)
            gaps.append(committed.gap_us)
            target.now_us += 1_000_000
    assert len(times) > 3
    assert set(times) == {1000}
    # What a user waits from one burst of tokens to the next has it all.
    assert set(gaps[1:]) == {1_001_000}
