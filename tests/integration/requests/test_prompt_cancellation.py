"""A cancelled request is over at once: its sessions are closed without another forward on either service."""

import asyncio

import pytest
from support.basics import PATIENCE_S, held
from support.models.tiny_models import TARGET, TRAINED
from support.stack import request_of, running_stack


@pytest.mark.slow
@pytest.mark.parametrize("draft_count", [0, 4, None])
@pytest.mark.parametrize("num_rounds", [1, 3, 6])
async def test_a_cancelled_request_is_closed_without_another_forward(num_rounds: int, draft_count: int | None) -> None:
    """With both devices held between two forwards, the cancellation alone makes both services free the session."""
    counts = {} if draft_count is None else {"draft_count": draft_count}
    request = request_of(text="Once upon a time", seed=5, max_tokens=900, ignore_eos=True, **counts)
    async with running_stack(str(TARGET), str(TRAINED)) as stack:
        call = stack.call(request)
        for _ in range(num_rounds):
            await call.read()
        services = (stack.target, stack.draft)
        async with held(stack.target) as target, held(stack.draft) as draft:
            sessions = [each.session for service in services for each in service.table]
            forwards = [session.last_forward for session in sessions]
            assert sessions
            call.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while len(stack.target.table) or len(stack.draft.table):
                    await asyncio.gather(target.run_jobs(), draft.run_jobs())
        await stack.quiet()
        assert [session.last_forward for session in sessions] == forwards
