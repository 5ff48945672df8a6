"""A drafter of one file and one line, served by a draft service or by the target: every token is plain decoding's."""

from collections.abc import Callable
from typing import Any

import pytest
from support.drafting.last_token import LastToken
from support.models.tiny_models import TARGET, TRAINED
from support.stack import running_stack

from outrider.drafters.drafter import Drafter
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.v1 import types_pb2

REQUEST: dict[str, Any] = {"text": "Once", "seed": 3, "max_tokens": 40, "ignore_eos": True}


def last(_runner: ModelRunner) -> Drafter[Any]:
    """A line of the registry."""
    return LastToken()


@pytest.mark.slow
@pytest.mark.parametrize("service", ["draft_service", "target_service"])
async def test_it_guesses_where_it_is_asked_for(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `match` at both temperatures, with guesses that are right at times."""
    registered: Callable[[ModelRunner], list[Drafter[Any]]] = lambda runner: [last(runner)]  # noqa: E731
    monkeypatch.setattr(f"{service}.server.registered", registered)
    async with running_stack(str(TARGET), str(TRAINED) if service == "draft_service" else None) as stack:
        for temperature in (0.0, 1.0):
            plain = await stack.generate(**REQUEST, temperature=temperature, draft_count=0)
            said = await stack.generate(**REQUEST, temperature=temperature, draft_count=3, drafter="last")
            assert said.token_ids == plain.token_ids
            assert said.completion.speculation.draft_tokens >= 3


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
async def test_a_shape_is_refused_by_its_offer(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes chains, as its service says of it."""
    monkeypatch.setattr(f"{service}.server.registered", lambda runner: [last(runner)])
    async with running_stack(str(TARGET), str(TRAINED) if service == "draft_service" else None) as stack:
        with pytest.raises(InvalidRequest, match=r"speculation\.shape"):
            await stack.generate(**REQUEST, draft_count=3, drafter="last", shape=types_pb2.TreeShape(max_depth=2))


@pytest.mark.parametrize("rule", [types_pb2.ACCEPTANCE_RULE_RATIO, types_pb2.ACCEPTANCE_RULE_BLOCK])
async def test_rules_with_distributions_take_its_guesses(rule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that is certain of itself is accepted with the target's own probability."""
    monkeypatch.setattr("target_service.server.registered", lambda runner: [last(runner)])
    async with running_stack(str(TARGET), None) as stack:
        said = await stack.generate(**REQUEST, temperature=1.0, draft_count=3, drafter="last", rule=rule)
        assert len(said.token_ids) == REQUEST["max_tokens"]
        assert said.completion.speculation.draft_tokens >= 3
