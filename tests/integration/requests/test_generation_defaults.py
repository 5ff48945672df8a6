"""What a model recommends counts at every door where a client says nothing, and only there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.models.tiny_models import write_recommending
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, rest_stack, said
from support.stack import TARGET

from bench.surfaces import are_same, continued, conversed
from outrider.client import BeamSearch
from outrider.parameters import GenerationDefaults

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The fox said to the wolf,"
SAMPLED = {"temperature": 0.4, "top_k": 30, "top_p": 0.85, "min_p": 0.02, "repetition_penalty": 1.1}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
RECOMMENDED = {**SAMPLED, "max_new_tokens": 20}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded target, which recommends something of everything."""
    return str(write_recommending(tmp_path_factory.mktemp("recommending") / "model", **RECOMMENDED))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: str) -> AsyncIterator[RestStack]:
    """A stack of that target with a gateway."""
    async with rest_stack(target=model, draft=None) as running:
        yield running


async def text(stack: RestStack, **fields: Any) -> str:
    """How the prompt goes on over REST."""
    reply = await stack.ask(COMPLETIONS, prompt=PROMPT, seed=3, **fields)
    return str(reply["choices"][0]["text"])


async def test_every_door_says_what_the_model_recommends(stack: RestStack) -> None:
    """The same tokens by all of them, which are those of a request that says all of it, and not those of one at 1."""
    address = str(stack.stack.address)
    going_on = await asyncio.to_thread(continued, stack.address, address, PROMPT, 3, 24)
    talking = await asyncio.to_thread(conversed, stack.address, address, "Who is the wolf?", 3, 24)
    assert are_same(going_on), going_on
    assert are_same(talking), talking
    explicit = await stack.stack.generate(text=PROMPT, seed=3, max_tokens=24, **SAMPLED)
    neutral = await stack.stack.generate(text=PROMPT, seed=3, max_tokens=24, **NEUTRAL)
    assert {each.token_ids for each in going_on.values()} == {explicit.token_ids} != {neutral.token_ids}


async def test_replies_and_models_tell_it(stack: RestStack) -> None:
    """All of /v1, gRPC, the client and the page; /v1/models for all requests."""
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    defaults = {**SAMPLED, "max_tokens": 20}
    listed = (await stack.http.get("/v1/models")).json()["data"][0]
    assert listed["generation_defaults"] == defaults
    assert (await stack.http.get("/page/status")).json()["gateway"]["generation_defaults"] == defaults
    reply = await stack.ask(COMPLETIONS, prompt=PROMPT)
    assert reply["outrider"]["sampling"] == {**SAMPLED, **penalties}
    assert reply["usage"]["completion_tokens"] <= 20
    responded = await stack.ask("/v1/responses", input="Who?", top_p=0.5)
    assert (responded["temperature"], responded["top_p"]) == (0.4, 0.5)
    assert responded["outrider"]["sampling"] == {**SAMPLED, **penalties, "top_p": 0.5}
    messaged = await stack.ask("/v1/messages", max_tokens=4, **said("Who?"))
    assert messaged["outrider"]["sampling"] == {**SAMPLED, **penalties}
    last = (await stack.stream(CHAT, max_tokens=4, temperature=0, **said("Who?"))).chunks[-1]
    assert last["outrider"]["sampling"] == {**SAMPLED, **penalties, "temperature": 0.0}
    result = (await stack.stack.client.generate(PROMPT, max_tokens=4, frequency_penalty=0.5).result()).result
    assert result.sampling.model_dump(include=set(SAMPLED)) == SAMPLED
    assert result.sampling.frequency_penalty == 0.5


@pytest.mark.slow
async def test_null_is_nothing_and_a_neutral_value_is_something(stack: RestStack) -> None:
    """Each value for itself: a temperature alone keeps the model's cuts, over REST and over gRPC."""
    assert await text(stack, **dict.fromkeys([*SAMPLED, "max_tokens"])) == await text(stack)
    assert await text(stack, temperature=1.0) == await text(stack, **{**SAMPLED, "temperature": 1.0})
    assert await text(stack, **NEUTRAL, max_tokens=20) != await text(stack)
    assert await text(stack, top_k=-1) == await text(stack, **{**SAMPLED, "top_k": 0})
    for fields in ({"temperature": 1.0}, {"top_p": 1.0}, {"top_k": 0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}):
        alone = await stack.stack.generate(text=PROMPT, seed=3, max_tokens=12, **fields)
        whole = await stack.stack.generate(text=PROMPT, seed=3, max_tokens=12, **{**SAMPLED, **fields})
        assert alone.token_ids == whole.token_ids
        assert alone.completion.sampling == whole.completion.sampling


async def test_samples_have_it_and_beams_do_not(stack: RestStack) -> None:
    """A search is about the model's own probabilities, and is no error where the model recommends cuts."""
    client = stack.stack.client
    samples = (await client.generate(PROMPT, seed=3, max_tokens=8, sample_count=3).result()).samples
    assert [each.result.sampling.temperature for each in samples] == [0.4] * 3
    beams = (await client.generate(PROMPT, max_tokens=8, beam_search=BeamSearch(2)).result()).samples
    assert [each.result.sampling.model_dump(include=set(NEUTRAL)) for each in beams] == [NEUTRAL] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("none", GenerationDefaults()),
        ("temperature=0,max_tokens=5", GenerationDefaults(**{**SAMPLED, "temperature": 0.0, "max_tokens": 5})),
        ("none,top_p=0.3", GenerationDefaults(top_p=0.3)),
    ],
)
async def test_an_operator_overrides_or_ignores_it(model: str, option: str, expected: GenerationDefaults) -> None:
    """For all doors of the gateway, with what the others said still in place."""
    async with rest_stack(target=model, draft=None, gateway={"generation_defaults": option}) as stack:
        listed = (await stack.http.get("/v1/models")).json()["data"][0]
        assert listed["generation_defaults"] == expected.model_dump()
        result = (await stack.stack.client.generate(PROMPT, seed=3).result()).result
        assert result.sampling.model_dump(include=set(SAMPLED)) == expected.model_dump(include=set(SAMPLED))
        assert result.completion_tokens <= expected.max_tokens


async def test_what_no_request_could_have_is_a_warning_and_nobodys_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target says it when it loads, and serves with the neutral value."""
    bad = {"temperature": -1, "top_p": "x", "top_k": 2.5, "repetition_penalty": float("nan"), "min_p": 0.1}
    folder = write_recommending(tmp_path / "bad", **bad)
    async with rest_stack(target=str(folder), draft=None) as stack:
        warned = capsys.readouterr().out
        for key in ("temperature is -1", "top_p is 'x'", "top_k is 2.5", "repetition_penalty is nan"):
            assert f"{folder / 'generation_config.json'}: {key}, which is left out, for it must be" in warned
        reply = await stack.ask(COMPLETIONS, prompt=PROMPT, max_tokens=4)
        assert reply["outrider"]["sampling"]["temperature"] == 1.0
        assert reply["outrider"]["sampling"]["min_p"] == 0.1


async def test_a_model_that_recommends_nothing_has_the_neutral_values() -> None:
    """The embedded target's files say nothing of sampling."""
    async with rest_stack(target=TARGET, draft=None) as stack:
        listed = (await stack.http.get("/v1/models")).json()["data"][0]
        assert listed["generation_defaults"] == {**NEUTRAL, "max_tokens": 128}
