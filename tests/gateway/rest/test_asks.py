"""A body becomes what the gateway is asked for, and the gateway's errors come back in the body's names."""

from typing import Any

import pytest

from gateway.generation.request import GenerationRequest
from gateway.rest.asks import CHAT_NAMES, TEXT_NAMES, ask_of, renamed
from gateway.rest.completion_request import CompletionRequest
from gateway.rest.fields import Speculation
from outrider.errors import InvalidRequest, Overloaded, PromptTooLong
from outrider.parameters import MAX_SAMPLES, Acceptance, Rule, SamplingParameters


def ask(**fields: Any) -> GenerationRequest:
    """What a body asks for."""
    return ask_of(CompletionRequest.model_validate({"prompt": "fox", **fields}))


def test_nothing_given_asks_for_the_gateways_defaults() -> None:
    """REST has no defaults of its own, so that an empty request says the same on every surface."""
    assert ask() == GenerationRequest()
    assert ask(temperature=None, stop=None, speculation=None, n=None) == GenerationRequest()
    assert ask(speculation=dict.fromkeys(Speculation.model_fields)) == GenerationRequest()


def test_every_field_arrives() -> None:
    """Under the gateway's names and types."""
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    sampling |= {"presence_penalty": 1, "frequency_penalty": -1, "min_tokens": 2, "ignore_eos": True}
    speculation = {"draft_count": 3, "rule": "lenient", "lenience": 0.25, "drafter": "model", "return_rounds": True}
    assert ask(
        **sampling,
        logit_bias={"7": -3.5},
        max_tokens=9,
        seed=-4,
        stop="sea",
        stop_token_ids=[1],
        banned_words=["gold"],
        cache_salt="mine",
        n=2,
        speculation=speculation,
    ) == GenerationRequest(
        max_tokens=9,
        sampling=SamplingParameters(**sampling, logit_bias={7: -3.5}),
        seed=-4,
        stops=("sea",),
        stop_token_ids=(1,),
        draft_count=3,
        acceptance=Acceptance(rule=Rule.LENIENT, lenience=0.25),
        drafter="model",
        sample_count=2,
        banned_words=("gold",),
        return_rounds=True,
        cache_salt="mine",
    )
    assert ask(stop=["sea", "king"]).stops == ("sea", "king")
    assert ask(speculation={"draft_count": "auto", "enabled": False}) == GenerationRequest(speculation_enabled=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stream_options": {}}, "stream_options is 'given', but must be absent unless stream is true"),
        ({"speculation": {"lenience": 0.5}}, "speculation.lenience is 0.5, but must be absent under the rule match"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias key is 4294967296, but must be less than 2147483648"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], sentence: str) -> None:
    """What no model of a single field can see."""
    with pytest.raises(InvalidRequest) as raised:
        ask(**fields)
    assert raised.value.message == sentence


@pytest.mark.parametrize(
    ("error", "names", "field", "sentence"),
    [
        (InvalidRequest("sample_count", 9, f"at most {MAX_SAMPLES}"), TEXT_NAMES, "n", "n is 9, but must be at most 8"),
        (InvalidRequest("sampling.min_tokens", 9, "low"), TEXT_NAMES, "min_tokens", "min_tokens is 9, but must be low"),
        (InvalidRequest("token_ids.3", 99, "an id"), TEXT_NAMES, "prompt.3", "prompt.3 is 99, but must be an id"),
        (
            InvalidRequest("stop_token_ids.0", 99, "x"),
            TEXT_NAMES,
            "stop_token_ids.0",
            "stop_token_ids.0 is 99, but mus",
        ),
        (InvalidRequest("logprob_count", 21, "x"), CHAT_NAMES, "top_logprobs", "top_logprobs is 21, but must be x"),
        (InvalidRequest("prompt", "", "one token"), CHAT_NAMES, "messages", "messages is '', but must be one token"),
        (
            InvalidRequest("stop.0", "sample_count", "false without logprob_count 3"),
            TEXT_NAMES,
            "stop.0",
            "stop.0 is 'sample_count', but must be false without logprobs 3",
        ),
        (
            InvalidRequest.too_many("token_ids", 9, 3),
            TEXT_NAMES,
            "prompt",
            "prompt has 9 entries, but must have at most 3",
        ),
    ],
)
def test_errors_have_the_routes_names(error: InvalidRequest, names: dict[str, str], field: str, sentence: str) -> None:
    """In the field and in the limit, and never in the value."""
    told = renamed(error, names)
    assert (told.metadata["field"], told.message[: len(sentence)]) == (field, sentence)


def test_other_errors_stay_as_they_are() -> None:
    """A prompt that is too long gets a field; what is not about a field does not."""
    assert renamed(PromptTooLong("long", prompt_tokens=9), CHAT_NAMES).metadata["field"] == "messages"
    overloaded = Overloaded("full", retry_after_s=3)
    assert renamed(overloaded, CHAT_NAMES) is overloaded
