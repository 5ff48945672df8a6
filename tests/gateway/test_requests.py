"""Validation of requests: what is refused, in which words, and what is filled in."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.requests import GenerationAsk, GenerationPlan, ServingLimits, check_request
from gateway.tokenizer import Tokenizer
from outrider.errors import InvalidRequest, PromptTooLong, Unsupported
from outrider.parameters import SamplingParameters

TOKENIZER = Tokenizer(str(Path(__file__).resolve().parents[2] / "models" / "target"))
LIMITS = ServingLimits(1024, 32_768, 4096, frozenset({0}), 8, ("model",))
ASK = GenerationAsk(text="Once upon a time")


async def check(ask: GenerationAsk) -> GenerationPlan:
    """The request with these limits."""
    return await check_request(ask, TOKENIZER, LIMITS)


async def test_defaults_are_filled_in() -> None:
    """A bare text gets 128 tokens, a seed, the model's EOS and the gateway's own choice of K."""
    plan = await check(ASK)
    assert plan.spec.token_ids == await TOKENIZER.encode("Once upon a time")
    assert plan.spec.max_len == plan.spec.prompt_len + 128
    assert plan.spec.eos_token_ids == {0}
    assert 0 <= plan.spec.seed < 2**63
    assert plan.draft_count is None


async def test_seeds_differ() -> None:
    """Two requests without a seed do not share one."""
    assert (await check(ASK)).spec.seed != (await check(ASK)).spec.seed


async def test_token_ids_are_taken_as_they_are() -> None:
    """A prompt of token ids is not touched."""
    assert (await check(GenerationAsk(token_ids=(7, 7, 4095)))).spec.token_ids == (7, 7, 4095)


async def test_the_default_length_shrinks_to_the_room() -> None:
    """Without max_tokens the output is what the context leaves."""
    plan = await check(GenerationAsk(token_ids=(5,) * 1000))
    assert plan.spec.max_len == 1024


async def test_too_long_names_all_three_numbers() -> None:
    """The error says how long prompt and output are, and what the context is."""
    with pytest.raises(PromptTooLong, match=r"prompt of 1000 tokens and max_tokens 25 .* context of 1024 tokens"):
        await check(GenerationAsk(token_ids=(5,) * 1000, max_tokens=25))


async def test_a_prompt_alone_too_long_is_told_of_nothing_that_nobody_wrote() -> None:
    """Without max_tokens the sentence speaks of the prompt and the context only."""
    for length in (1024, 2000):
        with pytest.raises(PromptTooLong, match=f"prompt has {length} tokens, .* context of 1024 tokens") as caught:
            await check(GenerationAsk(token_ids=(5,) * length))
        assert "max_tokens" not in caught.value.message
        assert caught.value.metadata == {"prompt_tokens": str(length), "context_len": "1024"}


async def test_the_cache_limits_a_request_where_it_is_smaller_than_the_context() -> None:
    """Both numbers and the cache's size are named, and the default length is what the cache leaves."""
    limits = replace(LIMITS, kv_tokens=640)
    ask = GenerationAsk(token_ids=(5,) * 600)
    with pytest.raises(PromptTooLong, match=r"600 tokens and max_tokens 41 .* the key-value cache of 640 tokens"):
        await check_request(replace(ask, max_tokens=41), TOKENIZER, limits)
    for fitting in (ask, replace(ask, max_tokens=40)):
        assert (await check_request(fitting, TOKENIZER, limits)).spec.max_len == 640
    with pytest.raises(PromptTooLong, match=r"prompt has 640 tokens, .* key-value cache of 640 tokens"):
        await check_request(GenerationAsk(token_ids=(5,) * 640), TOKENIZER, limits)


async def test_a_long_text_is_encoded_to_the_same_ids() -> None:
    """Encoding off the loop changes nothing."""
    text = "a king and a queen " * 400
    with pytest.raises(PromptTooLong, match=f"prompt has {len(await TOKENIZER.encode(text))} tokens"):
        await check(GenerationAsk(text=text))


async def test_without_speculation_k_is_zero() -> None:
    """Disabled speculation wins over a draft count."""
    assert (await check(replace(ASK, speculation_enabled=False, draft_count=5))).draft_count == 0
    assert (await check(replace(ASK, draft_count=5))).draft_count == 5


async def test_ignore_eos_leaves_no_eos() -> None:
    """Under ignore_eos nothing ends the request as end of sequence."""
    plan = await check(replace(ASK, sampling=SamplingParameters(ignore_eos=True)))
    assert plan.spec.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": None}, "prompt"),
        ({"token_ids": (1,)}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"text": None, "token_ids": ()}, "prompt"),
        ({"text": None, "token_ids": (1, 4096)}, "token_ids.1"),
        ({"text": None, "token_ids": (-1,)}, "token_ids.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stops": ("a",) * 9}, "stop"),
        ({"stops": ("fine", "")}, "stop.1"),
        ({"stops": ("x" * 257,)}, "stop.0"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
        ({"stop_token_ids": (4096,)}, "stop_token_ids.0"),
        ({"draft_count": 9}, "speculation.draft_count"),
        ({"draft_count": -1}, "speculation.draft_count"),
        ({"drafter": "oracle"}, "speculation.drafter"),
        ({"max_tokens": 4, "sampling": SamplingParameters(min_tokens=5)}, "sampling.min_tokens"),
        ({"sampling": SamplingParameters(logit_bias={4096: 1.0})}, "sampling.logit_bias key"),
    ],
)
async def test_bad_values_are_named(change: dict[str, object], field: str) -> None:
    """Every refusal names the field, the value and the limit."""
    with pytest.raises(InvalidRequest) as caught:
        await check(replace(ASK, **change))  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["limit"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"sampling": SamplingParameters(logit_bias={7: 1.0, 4096: 1.0})},
            "sampling.logit_bias key is 4096, but must be a token id between 0 and 4095",
        ),
        ({"stop_token_ids": (1, 4096)}, "stop_token_ids.1 is 4096, but must be a token id between 0 and 4095"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 ids, but must have at most 64"),
        ({"stops": ("a",) * 9}, "stop has 9 strings, but must have at most 8"),
    ],
)
async def test_refusals_are_sentences(change: dict[str, object], sentence: str) -> None:
    """Field, value and limit, in words that read well."""
    with pytest.raises(InvalidRequest) as caught:
        await check(replace(ASK, **change))  # type: ignore[arg-type]
    assert caught.value.message == sentence


@pytest.mark.parametrize("change", [{"rule": "ratio"}, {"logprob_count": 0}])
async def test_what_is_not_served_is_said(change: dict[str, object]) -> None:
    """Rules other than match and log-probabilities are refused as unsupported."""
    with pytest.raises(Unsupported, match="not served yet"):
        await check(replace(ASK, **change))  # type: ignore[arg-type]


async def test_a_drafter_is_not_checked_while_nobody_knows_the_names() -> None:
    """Without a draft service any name passes: the request will do without a draft, or the draft will refuse it."""
    plan = await check_request(replace(ASK, drafter="oracle"), TOKENIZER, replace(LIMITS, drafters=()))
    assert plan.drafter == "oracle"
    assert (await check(ASK)).drafter == ""
