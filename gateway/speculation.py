"""READ FIRST: one request as rounds of tokens, over a session with a draft that guesses and one with a target.

The draft guesses the next tokens; the target checks all guesses in one forward pass, keeps those that it would have
said itself and adds one token of its own. An empty proposal makes the round plain decoding: that is the first round,
which reads the prompt, every round without a draft, and the last token before the limit. So there is one kind of
round and no special case. The token log is the truth, and what either service holds is a cache of it.

A target may have a drafter in its own process: then it is asked to make the proposal itself, and a round is one
message, or none within a stretch that it goes on unasked.

The draft may fail in any way: then its proposal is empty and says why. The target may be lost, and its session goes on
with another one; only when there is none for too long does `verify` raise, and the request ends.
"""

from collections.abc import AsyncGenerator

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.round import Round, TokenLog
from gateway.sessions.draft import AbsentDraftSession, RemoteDraftSession
from gateway.sessions.target import RemoteTargetSession


async def speculate(
    log: TokenLog, planner: RoundPlanner, target: RemoteTargetSession, draft: RemoteDraftSession | AbsentDraftSession
) -> AsyncGenerator[Round, None]:
    """Yields the rounds of a request until its log is finished; both sessions are closed whatever happens."""
    with planner:
        async with target, draft:
            while log.finish_reason is None:
                log.begin_round()
                # How many tokens to draft, and how many the target may commit unasked while there is nothing to draft.
                plan = planner.plan(log, target.outstanding, draft.outlook, target.drafter)
                proposal = plan.explain(await draft.propose(plan.draft_count))
                verdict = await target.verify(proposal, plan.plain_budget, plan.own_draft_count)
                committed = log.commit(proposal, verdict)
                planner.observe(committed)
                yield committed
