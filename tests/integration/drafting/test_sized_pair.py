"""A stack of sized models, named as an operator names them, through the whole house."""

from typing import Any

import pytest
from support.stack import PATIENT, TARGET, Answer, RunningStack, running_stack

from outrider.cli.bench.common import OPENINGS


async def said(stack: RunningStack) -> list[Answer]:
    """One answer at temperature 0 and one at 0.8."""
    fields = {"text": OPENINGS[0], "max_tokens": 16, "seed": 3, "ignore_eos": True, "draft_count": 4}
    return [await stack.generate(temperature=temperature, **fields) for temperature in (0.0, 0.8)]


@pytest.mark.slow
async def test_a_sized_pair_says_what_the_embedded_target_says() -> None:
    """Target, draft and the gateway's tokenizer by their names alone; in float32 not one token differs."""
    options: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4096, "gateway": PATIENT}
    async with running_stack("sized:200m", "sized:10m", threads=2, **options) as stack:
        answers = await said(stack)
        info = await stack.info(stack.target)
    assert (info.model_name, info.parameter_count, info.context_len) == ("sized:target-200m", 184_583_168, 4096)
    async with running_stack(TARGET, **options) as stack:
        expected = await said(stack)
    for answer, embedded in zip(answers, expected, strict=True):
        assert answer.token_ids == embedded.token_ids
        assert answer.completion.speculation.accepted_tokens == embedded.completion.speculation.accepted_tokens > 0
