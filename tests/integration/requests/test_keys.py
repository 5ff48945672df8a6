"""Every key that served requests draw with under `ratio` and `block` is written down: none serves two draws.

See docs/decisions/exactness/0026-a-key-is-used-once.md. Which functions make keys is checked too, so that a new place
is seen.
"""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.stack import PATIENT, running_stack

from outrider.drafters import model_drafter
from outrider.engine import noise
from outrider.engine.noise import Purpose
from outrider.engine.sampling import draw
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from target_service import acceptance, trees

PROMPT = "The fox said to the wolf,"
SHAPE = pb.SpeculationSettings().shape.__class__(expansions=[2, 1])


class Ledger(Counter[tuple[Purpose, int]]):
    """How often a key was made for a purpose, anywhere in the two services."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()

        def round_key(seed: int, base_len: int, position: int, purpose: Purpose, lane: int = 0) -> int:
            key = noise.round_key(seed, base_len, position, purpose, lane)
            self[purpose, key] += 1
            return key

        def noise_key(seed: int, position: int, purpose: Purpose) -> int:
            key = noise.noise_key(seed, position, purpose)
            self[purpose, key] += 1
            return key

        def token_keys(seeds: list[int], positions: list[int]) -> noise.Keys:
            keys = noise.token_keys(seeds, positions)
            self.update((Purpose.TOKEN, key) for key in keys.tolist())
            return keys

        monkeypatch.setattr(model_drafter, "round_key", round_key)
        monkeypatch.setattr(draw, "token_keys", token_keys)
        for module in (acceptance, trees):
            monkeypatch.setattr(module, "round_key", round_key)
            monkeypatch.setattr(module, "noise_key", noise_key)

    def check(self, fields: dict[str, Any]) -> None:
        """Each purpose was drawn for, where K is fixed; no key twice, and none for two purposes."""
        if "draft_count" in fields:
            # Elsewhere the policy may stop guessing before a guess was wrong.
            assert {purpose for purpose, _ in self} == set(Purpose)
        assert not [drawn for drawn, count in self.items() if count > 1]
        assert len({key for _, key in self}) == len(self)


FIXED: dict[str, dict[str, Any]] = {
    "a chain": {"drafter": "model", "draft_count": 3},
    "two drafters": {"drafters": ["model", "sampled"], "draft_count": 3},
    "trees of two drafters": {"drafters": ["model", "sampled"], "shape": SHAPE},
    "four samples": {"drafter": "model", "draft_count": 2, "sample_count": 4},
}
LEARNED: dict[str, dict[str, Any]] = {
    "auto": {},
    "a list with lookups": {"drafters": ["lookup", "model"], "draft_count": 3},
    "a prediction": {"drafters": ["lookup", "model"], "draft_count": 3, "prediction_text": " I will eat you."},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [*FIXED.values(), *LEARNED.values()], ids=[*FIXED, *LEARNED])
@pytest.mark.parametrize("rule", ["RATIO", "BLOCK"])
async def test_no_key_serves_two_draws_of_a_request(
    monkeypatch: pytest.MonkeyPatch, rule: str, fields: dict[str, Any]
) -> None:
    """Whichever guesses: target and draft together."""
    number = getattr(types_pb2, f"ACCEPTANCE_RULE_{rule}")
    async with running_stack() as stack:
        ledger = Ledger(monkeypatch)
        await stack.generate(text=PROMPT, seed=1, rule=number, max_tokens=48, temperature=1.0, **fields)
        ledger.check(fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", LEARNED.values(), ids=LEARNED)
async def test_no_key_serves_two_requests_that_may_know_of_each_other(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Four with one seed, the last two at once."""

    async with running_stack() as stack:

        async def ask() -> None:
            rule = types_pb2.ACCEPTANCE_RULE_BLOCK
            answer = await stack.generate(text=PROMPT, seed=1, rule=rule, max_tokens=32, temperature=1.0, **fields)
            assert answer.completion.seed == 1

        ledger = Ledger(monkeypatch)
        await ask()
        await ask()
        await asyncio.gather(ask(), ask())
        ledger.check(fields)


@pytest.mark.slow
async def test_a_request_that_fixes_its_guesses_repeats_itself() -> None:
    """Its seed's own noise serves, as it does under `match`; without a drafter's name it does not."""
    fields: dict[str, Any] = {"text": PROMPT, "seed": 1, "max_tokens": 24, "temperature": 1.0, "draft_count": 2}
    fields["rule"] = types_pb2.ACCEPTANCE_RULE_RATIO
    async with running_stack(gateway=PATIENT) as stack:
        said = [(await stack.generate(**fields, drafter="model")).token_ids for _ in range(2)]
        other = [(await stack.generate(**fields)).token_ids for _ in range(2)]
    assert said[0] == said[1]
    assert other[0] != other[1]


def test_keys_are_made_where_the_list_says() -> None:
    """Code that makes keys elsewhere has to be written into the decision, and into the ledger above."""
    root = Path(noise.__file__).parents[2]
    makers = {
        str(path.relative_to(root))
        for folder in ("outrider", "gateway", "draft_service", "target_service")
        for path in (root / folder).rglob("*.py")
        if re.search(r"\b(round_key|noise_key|token_keys)\(", path.read_text())
    }
    assert makers == {
        "outrider/engine/noise.py",
        "outrider/engine/sampling/draw.py",
        "outrider/drafters/model_drafter.py",
        "target_service/acceptance.py",
        "target_service/trees.py",
    }
