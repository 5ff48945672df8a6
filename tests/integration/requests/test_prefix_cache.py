"""The prefix caches of a whole stack: what is sent again is found, and no token changes."""

from typing import Any

import pytest
from support.stack import Answer, RunningStack, running_stack

from outrider.v1 import model_service_pb2 as model_pb

OFF = {"prefix_cache": False}
TURNS = (
    "Once upon a time there was a little girl named Lily who loved to play outside in the sun with her dog.",
    " One day her mother said that they would all go to the park, and Lily was very happy about that.",
    " What did they see there?",
)


async def conversation(stack: RunningStack, **fields: Any) -> tuple[list[tuple[int, ...]], list[Answer]]:
    """Each turn is sent with all that was said before."""
    text, answers = "", []
    for number, turn in enumerate(TURNS):
        text += turn
        answers.append(await stack.generate(text=text, max_tokens=24, seed=number, draft_count=4, **fields))
        text += answers[-1].text
    return [answer.token_ids for answer in answers], answers


async def infos(stack: RunningStack) -> list[model_pb.GetModelInfoResponse]:
    return [await stack.info(service) for service in (stack.target, stack.draft)]


@pytest.mark.slow
async def test_a_conversation_says_the_same_with_and_without_the_cache() -> None:
    """Under `match`, with and without a draft, and sent twice; both services find most of what is sent again."""
    async with running_stack(target_options=OFF, draft_options=OFF) as stack:
        expected, answers = await conversation(stack)
        await stack.quiet()
        assert [(info.prefix_query_tokens, info.cached_block_count) for info in await infos(stack)] == [(0, 0)] * 2
        assert [answer.completion.usage.cached_prompt_tokens for answer in answers] == [0, 0, 0]
    async with running_stack() as stack:
        assert (await conversation(stack))[0] == expected
        again, answers = await conversation(stack)
        assert again == expected
        assert (await conversation(stack, enabled=False))[0] == expected
        for answer in answers:
            usage = answer.completion.usage
            assert usage.cached_prompt_tokens == (usage.prompt_tokens - 1) // 16 * 16
        # The last close is on its way while the answer is.
        await stack.quiet()
        for info in await infos(stack):
            assert info.prefix_hit_tokens > info.prefix_query_tokens / 2
            assert info.cached_block_count > 0
            assert info.free_block_count == info.block_count
        salted, answers = await conversation(stack, cache_salt="another tenant")
        assert salted == expected
        assert answers[0].completion.usage.cached_prompt_tokens == 0
