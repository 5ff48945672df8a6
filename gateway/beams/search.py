"""A beam search as passes of the target, each over guesses of the draft after every live beam.

As in gateway.speculation the record is the truth, whatever a service holds can be rebuilt from it, and a draft that
fails costs no request anything. There is one kind of pass: the first reads the prompt, and without guesses a pass makes
one step.
"""

from collections.abc import AsyncGenerator

from gateway.beams.record import BeamRecord
from gateway.beams.sessions import BeamDraftSession, BeamTargetSession
from gateway.rounds.round import NOTHING, FallbackReason, GuessRequest, Proposal, Round
from gateway.sessions.draft import AbsentDraftSession


async def search(
    record: BeamRecord,
    target: BeamTargetSession,
    draft: BeamDraftSession | AbsentDraftSession,
    draft_count: int,
) -> AsyncGenerator[Round, None]:
    """Yields the passes of a search until it is over, with draft_count guesses each; closes both sessions.

    The rounds have no tokens, because a beam may still be dropped.
    """
    async with target, draft:
        while record.finish_reason is None:
            record.begin_round()
            proposal = await _propose(record, draft, draft_count)
            verdict, steps = await target.advance(proposal)
            yield record.commit_steps(proposal, verdict, steps)


async def _propose(record: BeamRecord, draft: BeamDraftSession | AbsentDraftSession, draft_count: int) -> Proposal:
    # Nothing is guessed before the first step, nor for the last, which is the target's alone.
    if not draft_count or not record.live or record.room < 2:
        return NOTHING
    outlook = draft.outlook
    obstacle = outlook.obstacle
    if outlook.context_len is not None and len(record) >= outlook.context_len:
        obstacle = FallbackReason.DRAFT_CONTEXT
    if obstacle is not None or outlook.max_draft_count is None:
        return Proposal(fallback_reason=obstacle)
    # The beams themselves have a row each.
    count = max(min(draft_count, outlook.max_draft_count - len(record.live)), 0)
    return await draft.propose(GuessRequest(count=count))
