"""A request that the target's key-value cache can never hold is refused before anything is spent on it."""

import pytest
from support.stack import running_stack

from outrider.errors import PromptTooLong

KV_TOKENS = 64


@pytest.mark.slow
async def test_the_cache_is_filled_to_the_last_token_and_no_further() -> None:
    """As many tokens as the cache holds are served, drafted or not; one more is refused with all three numbers."""
    async with running_stack(kv_tokens=KV_TOKENS) as stack:
        for draft_count in (0, 4):
            fields = {"token_ids": [7] * 20, "ignore_eos": True, "draft_count": draft_count}
            answer = await stack.generate(**fields, max_tokens=KV_TOKENS - 20)
            assert len(answer.token_ids) == KV_TOKENS - 20
            with pytest.raises(PromptTooLong, match=r"prompt of 20 tokens and max_tokens 45 .* cache of 64 tokens"):
                await stack.generate(**fields, max_tokens=KV_TOKENS - 19)
            assert len((await stack.generate(**fields)).token_ids) == KV_TOKENS - 20
        await stack.quiet()
