"""More requests than the target's cache holds: they take turns, and say what they say in a roomy one."""

import asyncio

import pytest
from support.stack import RunningStack, running_stack

MAX_TOKENS = 120


async def _answers(stack: RunningStack, draft_count: int) -> list[tuple[int, ...]]:
    """Eight requests at once."""
    request = {"text": "Once upon a time", "max_tokens": MAX_TOKENS, "ignore_eos": True, "draft_count": draft_count}
    answers = await asyncio.gather(*(stack.generate(**request, seed=seed) for seed in range(8)))
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("draft_count", [0, 4])
async def test_requests_that_fill_the_pool_together_all_end(draft_count: int) -> None:
    """None is refused in mid-stream; the stack checks at its end that no block is lost."""
    async with running_stack() as roomy:
        expected = await _answers(roomy, draft_count)
    async with running_stack(target_options={"kv_tokens": 512}) as full:
        assert await _answers(full, draft_count) == expected
    assert all(len(token_ids) == MAX_TOKENS for token_ids in expected)
