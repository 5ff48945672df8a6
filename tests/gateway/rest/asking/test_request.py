"""A body becomes what the gateway is asked for, and errors come back in the body's names."""

from typing import Any

import pytest

from gateway.generation.frontend import ModelNames
from gateway.generation.request import GenerationRequest
from gateway.rest.asking.fields import SpeculationFields
from gateway.rest.asking.request import CHAT_NAMES, TEXT_NAMES, generation_request, in_names_of
from gateway.rest.openai.completions import CompletionRequest
from outrider.errors import Field, InvalidRequest, Overloaded, PromptTooLong
from outrider.parameters import MAX_SAMPLES, Acceptance, Rule, SamplingParameters
from outrider.token_tree import TreeShape


def asked(**fields: Any) -> GenerationRequest:
    """What a body asks for."""
    return generation_request(CompletionRequest.model_validate({"prompt": "fox", **fields}), ModelNames("markov"))


def test_nothing_given_asks_for_the_gateways_defaults() -> None:
    """REST has no defaults of its own, so that an empty request says the same on every surface."""
    assert asked() == GenerationRequest()
    assert asked(temperature=None, stop=None, speculation=None, n=None) == GenerationRequest()
    assert asked(speculation=dict.fromkeys(SpeculationFields.model_fields)) == GenerationRequest()


def test_every_field_arrives() -> None:
    """Under the gateway's names and types."""
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    sampling |= {"presence_penalty": 1, "frequency_penalty": -1, "min_tokens": 2, "ignore_eos": True}
    speculation = {"draft_count": 3, "rule": "lenient", "lenience": 0.25, "drafter": "model", "return_rounds": True}
    speculation |= {"shape": {"max_depth": 3, "expansions": [2, 1]}}
    assert asked(
        **sampling,
        logit_bias={"7": -3.5},
        max_tokens=9,
        seed=-4,
        stop="sea",
        stop_token_ids=[1],
        banned_words=["gold"],
        cache_salt="mine",
        n=2,
        prediction={
            "type": "content",
            "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": " more"}],
        },
        speculation=speculation,
    ) == GenerationRequest(
        max_tokens=9,
        sampling=SamplingParameters(**sampling, logit_bias={7: -3.5}),
        seed=-4,
        stops=("sea",),
        stop_token_ids=(1,),
        draft_count=3,
        acceptance=Acceptance(rule=Rule.LENIENT, lenience=0.25),
        drafters=("model",),
        shape=TreeShape(3, 0, (2, 1)),
        prediction="Once more",
        sample_count=2,
        banned_words=("gold",),
        return_rounds=True,
        cache_salt="mine",
    )
    for name in ("drafter", "drafters"):
        assert asked(speculation={name: ["lookup", "model"]}).drafters == ("lookup", "model")
    with pytest.raises(InvalidRequest, match=r"speculation.drafters is \['model'\], but must be absent beside"):
        asked(speculation={"drafter": "lookup", "drafters": ["model"]})
    assert asked(prediction={"type": "content", "content": "Once"}).prediction == "Once"
    shaped = asked(speculation={"shape": {"max_width": 64, "is_static": True}})
    assert shaped.shape == TreeShape(max_width=64, is_static=True)
    assert asked(stop=["sea", "king"]).stops == ("sea", "king")
    assert asked(speculation={"draft_count": "auto", "enabled": False}) == GenerationRequest(speculation_enabled=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stream_options": {}}, "stream_options is 'given', but must be absent unless stream is true"),
        ({"speculation": {"lenience": 0.5}}, "speculation.lenience is 0.5, but must be absent under the rule match"),
        (
            {"speculation": {"shape": {"expansions": [2], "is_static": True}}},
            "speculation.shape.expansions is [2], but must be empty together with speculation.shape.is_static",
        ),
        (
            {"speculation": {"shape": {"expansions": [2, 1], "max_width": 1}}},
            "speculation.shape.expansions is [2, 1], but must be empty together with speculation.shape.max_width",
        ),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias key is 4294967296, but must be less than 2147483648"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], sentence: str) -> None:
    """What no model of a single field can see."""
    with pytest.raises(InvalidRequest) as raised:
        asked(**fields)
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
            InvalidRequest("stop.0", "sample_count", ("false without ", Field("logprob_count"), " 3")),
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
    told = in_names_of(names, error)
    assert (told.metadata["field"], told.message[: len(sentence)]) == (field, sentence)


def test_other_errors_stay_as_they_are() -> None:
    """A prompt that is too long gets a field; what is not about a field does not."""
    assert in_names_of(CHAT_NAMES, PromptTooLong("long", prompt_tokens=9)).metadata["field"] == "messages"
    overloaded = Overloaded("full", retry_after_s=3)
    assert in_names_of(CHAT_NAMES, overloaded) is overloaded
