"""A draft that guesses after masks, in whole stacks: every token is plain decoding's, whatever becomes of the draft."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import TARGET, TRAINED
from support.stack import PATIENT, answers, request_of, running_stack, token_ids

from outrider.drafters.masked import PARD
from outrider.v1 import types_pb2

PROMPTS = ["Once upon a time there was a miller who had", "A fox met a wolf. A fox met", "The king said", "Long ago"]
WAYS: list[dict[str, Any]] = [
    {"draft_count": 4},
    {"draft_count": 4, "drafter": "model"},
    {"draft_count": 6, "drafter": PARD, "shape": types_pb2.TreeShape(max_depth=3)},
    {"draft_count": 4, "drafters": [PARD, "lookup"]},
    {"draft_count": None},
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft, as if it had been trained with masks: its first guesses are good, and the others bad."""
    folder = Path(shutil.copytree(TRAINED, tmp_path_factory.mktemp("pard") / "draft"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 4095, "spd_type": "pard"}))
    return folder


async def test_tokens_are_those_of_plain_decoding(masked: Path) -> None:
    """Chains, trees, lists and what the gateway chooses, at two temperatures."""
    async with running_stack(str(TARGET), str(masked), gateway=PATIENT) as stack:
        assert next(iter((await stack.info(stack.draft)).drafters)) == PARD
        for temperature in (0.0, 0.8):
            fields = {"max_tokens": 40, "temperature": temperature, "ignore_eos": True}
            plain = token_ids(await answers(stack, PROMPTS, enabled=False, **fields))
            for way in WAYS:
                found = await answers(stack, PROMPTS, **fields, **way)
                assert token_ids(found) == plain, way
                # Where the gateway chooses, plain decoding may be what pays.
                counts = [each.facts.draft_count for answer in found for each in answer.rounds]
                assert max(counts) > 1 or way["draft_count"] is None, way
        await stack.quiet()


async def test_a_draft_that_dies_costs_no_token(masked: Path) -> None:
    """It is lost in the middle of the answer, comes back, and holds nothing at last."""
    async with running_stack(str(TARGET), str(masked), gateway=PATIENT) as stack:
        fields = {"text": PROMPTS[0], "seed": 3, "max_tokens": 400, "temperature": 0.8, "ignore_eos": True}
        plain = await stack.generate(**fields, draft_count=0)
        said: list[int] = []
        num_rounds = 0
        async for message in stack.call(request_of(**fields, draft_count=4, drafter=PARD)):
            said += [token.token_id for token in message.round.tokens]
            num_rounds += 1
            if num_rounds == 5:
                await stack.stop_draft()
            if num_rounds == 15:
                await stack.start_draft()
        assert tuple(said) == plain.token_ids
        assert message.completion.speculation.fallback_rounds > 0
        await stack.quiet()
