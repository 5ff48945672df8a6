"""READ FIRST: one request as rounds of tokens, over a session with a draft that guesses and one with a target.

The draft guesses the next tokens; the target checks all guesses in one forward pass, keeps those that it would have
said itself and adds one token of its own. An empty proposal makes the round plain decoding: that is the first round,
which reads the prompt, every round without a draft, and the last token before the limit. So there is one kind of
round and no special case. The token log is the truth, and what either service holds is a cache of it.

Guesses come from three places. A draft service makes them with a model. A lookup finds them here, in the request's own
text and the like, without a model and without a message; it may end a stretch that the target goes on unasked. And a
target may have a drafter in its own process: then it is asked to make the proposal itself, and a round is one message,
or none within such a stretch.

While the target verifies, the draft may run ahead: it guesses on for what may come of it, and the target, to which that
is handed on, begins with what fits by itself. Then a round needs no message, and the draft hears how the log goes on.

The draft may fail in any way: then its proposal is empty and says why. The target may be lost, and its session goes on
with another one; only when there is none for too long does `verify` raise, and the request ends.
"""

import math
from collections.abc import AsyncGenerator

from gateway.lookup.guesses import LookupGuesses
from gateway.rounds.planner import RoundPlan, RoundPlanner
from gateway.rounds.round import Place, Proposal, Round, TokenLog
from gateway.sessions.draft import AbsentDraftSession, RemoteDraftSession
from gateway.sessions.draft_team import DraftTeam
from gateway.sessions.target import RemoteTargetSession


async def speculate(
    log: TokenLog,
    planner: RoundPlanner,
    target: RemoteTargetSession,
    draft: RemoteDraftSession | DraftTeam | AbsentDraftSession,
    lookup: LookupGuesses | None = None,
) -> AsyncGenerator[Round, None]:
    """Yields the rounds of a request until its log is finished; all sessions are closed whatever happens."""
    lookup = lookup or LookupGuesses()

    async def begin() -> tuple[RoundPlan, Proposal]:
        """The plan of the next round, and what the draft has guessed."""
        log.begin_round()
        # Where the target has run ahead, this round is under way, and nothing can be added to it.
        went_on = target.went_on
        look = lookup.look(planner.room(log), math.inf if went_on else planner.looks_for(log))
        # How many tokens to draft, and how many the target may commit unasked while there is nothing to draft.
        outstanding = 0 if went_on else target.outstanding
        plan = planner.plan(
            log,
            outstanding,
            draft.outlook,
            target.drafter,
            look.tree.values,
            went_on=went_on,
            takes_branches=target.takes_branches,
        )
        return plan, await draft.propose(plan.asked(Place.REMOTE))

    with planner:
        async with target, draft, lookup:
            begun: tuple[RoundPlan, Proposal] | None = None
            while True:
                plan, drafted = begun or await begin()
                proposal = planner.complete(plan, drafted, lookup.proposal(plan.asked(Place.LOOKUP).count))
                verdict = await target.verify(proposal, plan.plain_budget, plan.asked(Place.HOSTED))
                committed = log.commit(proposal, verdict)
                planner.observe(committed)
                lookup.commit(committed.token_ids)
                is_over = log.finish_reason is not None
                # A draft that is to keep ahead hears of it before the client does; it is not waited for.
                begun = await begin() if target.went_on and not is_over else None
                yield committed
                if is_over:
                    return
