"""Run-ahead changes no token under any rule that it serves: a round that begins with a branch verifies what it would
have verified without, with the same keys, and so a request says the same with its seed.
"""

from collections import Counter
from typing import Any

import pytest
from support.drafting.branches import Ways, doubled, lost, reordered, sent
from support.stack import PATIENT, Answer, answers, running_stack, token_ids

from outrider.v1 import types_pb2

PROMPTS = ["Once upon a time", "The fox said to the wolf,", "A king", "She"]
RULES = [getattr(types_pb2, f"ACCEPTANCE_RULE_{name}") for name in ("MATCH", "RATIO", "BLOCK", "LENIENT")]
FIELDS: dict[str, Any] = {"drafter": "model", "max_tokens": 40, "ignore_eos": False}


async def said(branches: int) -> list[Answer]:
    """The answers under each rule, hot and cold, with few guesses and more."""
    found = []
    async with running_stack(gateway={**PATIENT, "branches": branches}) as stack:
        for rule in RULES:
            for temperature, count in ((1.0, 2), (0.7, 4), (0.0, 1)):
                fields = {**FIELDS, "rule": rule, "temperature": temperature, "draft_count": count}
                found += await answers(stack, PROMPTS, **fields)
    return found


@pytest.mark.slow
async def test_a_request_says_the_same_with_branches_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under four rules, while branches are lost, come late, twice and in another order; many rounds are hits."""
    plain = await said(0)
    led = Ways((sent, sent, lost, doubled, reordered)).lead(monkeypatch)
    ahead = await said(16)
    assert token_ids(ahead) == token_ids(plain)
    outcomes = Counter(each.facts.branches for answer in ahead for each in answer.rounds)
    assert outcomes["hit"] > 0.1 * sum(outcomes.values())
    assert led.told > 100
