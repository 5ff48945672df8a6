"""A drafter of one file and one line, served by a draft service or by the target: every token is plain decoding's."""

from collections.abc import Callable
from typing import Any

import pytest
from support.basics import eventually
from support.drafting.last_token import LastToken
from support.models.tiny_models import TARGET, TRAINED
from support.stack import PATIENT, running_stack

from gateway.rounds.round import Place
from outrider.drafters.drafter import Drafter
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb
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
            assert said.completion.survival.drift_repairs == 0


@pytest.mark.slow
async def test_a_name_that_both_services_offer_is_two_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft service's has a fixed K and stands in a list, and the target's is there while that service is away."""
    for service in ("draft_service", "target_service"):
        monkeypatch.setattr(f"{service}.server.registered", lambda runner: [last(runner)])
    async with running_stack(str(TARGET), str(TRAINED), gateway=PATIENT) as stack:
        plain = await stack.generate(**REQUEST, draft_count=0)
        fixed = await stack.generate(**REQUEST, draft_count=3, drafter="last")
        listed = await stack.generate(**REQUEST, draft_count=3, drafters=["last", "lookup"])
        chosen = await stack.generate(**REQUEST, draft_count=None, drafter="last")
        assert stack.gateway is not None
        learnt = {each.place for each in stack.gateway.backend.policies.latest.costs.drafters if each.name == "last"}
        assert learnt == {Place.REMOTE, Place.HOSTED}
        await stack.stop_draft()
        draft = stack.gateway.backend.draft
        await eventually(lambda: draft is not None and draft.info is None)
        away = await stack.generate(**REQUEST, draft_count=3, drafter="last")
    for said in (fixed, listed, chosen, away):
        assert said.token_ids == plain.token_ids
        assert said.completion.speculation.draft_tokens > 0 or said is chosen
    for said, is_remote in ((fixed, True), (listed, True), (away, False)):
        assert any(each.facts.draft_bytes > 0 for each in said.rounds) is is_remote


@pytest.mark.slow
async def test_a_draft_services_chains_are_chosen_as_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gateway chooses K, it asks for no tree of a drafter that makes none."""
    monkeypatch.setattr("draft_service.server.registered", lambda runner: [last(runner)])
    async with running_stack(str(TARGET), str(TRAINED), gateway=PATIENT) as stack:
        for seed in range(4):
            said = await stack.generate(**REQUEST | {"seed": seed, "max_tokens": 100}, drafter="last")
            assert pb.FALLBACK_REASON_DRAFT_REFUSED not in {each.facts.fallback_reason for each in said.rounds}


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
