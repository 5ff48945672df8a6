"""READ FIRST: one request as rounds. Knows neither text nor gRPC, only tokens, a draft that guesses and a target.

The draft guesses the next tokens; the target checks all guesses in one forward pass, keeps those that it would have
said itself and adds one token of its own. An empty proposal makes the round plain decoding: that is the first round,
which reads the prompt, every round without a draft, and the last token before the limit. So there is one kind of
round and no special case. The token log is the truth, and what either service holds is a cache of it.
"""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.rounds.planner import DraftOutlook, RoundPlanner
from gateway.rounds.round import Proposal, Round, TokenLog, Verdict


class TargetSession(AbstractAsyncContextManager["TargetSession"], Protocol):
    """A session of the target service. Leaving the context closes it and frees what it holds."""

    @property
    def outstanding(self) -> int:
        """Tokens that the target may still commit unasked; while there are any, a proposal has nothing to build on."""

    async def verify(self, proposal: Proposal, plain_budget: int) -> Verdict:
        """Returns the verdict on the log's length: of the proposal, or the next of those that come unasked.

        With an empty proposal the target may go on alone for plain_budget tokens. Raises PeerLost, CacheFull.
        """


class DraftSession(DraftOutlook, AbstractAsyncContextManager["DraftSession"], Protocol):
    """A session of the draft service, which may fail in any way without harm. Leaving the context closes it."""

    async def propose(self, draft_count: int) -> Proposal:
        """Returns at most draft_count guesses behind the log, in time; never raises for a fault of the draft.

        With draft_count 0 nothing is sent. A proposal that could not be had is empty and says why.
        """


async def speculate(
    log: TokenLog, planner: RoundPlanner, target: TargetSession, draft: DraftSession
) -> AsyncGenerator[Round, None]:
    """Yields the rounds of a request until its log is finished; both sessions are closed whatever happens."""
    async with target, draft:
        while log.finish_reason is None:
            log.begin_round()
            plan = planner.plan(log, target.outstanding, draft)
            proposal = plan.explain(await draft.propose(plan.draft_count))
            verdict = await target.verify(proposal, plan.plain_budget)
            committed = log.commit(proposal, verdict)
            planner.observe(committed)
            yield committed
