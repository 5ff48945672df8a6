"""A body becomes what the gateway is asked for, errors come back in the body's names, and events are counted and put
together in any order.
"""

from dataclasses import replace
from typing import Any

import pytest
from openai.types import CompletionUsage
from support.basics import spec_of
from support.services.markov import round_of

from gateway.generation.frontend import ModelNames
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.sample import CompletionEvent, RoundEvent
from gateway.generation.transcript import GeneratedToken, PromptToken, SpeculationFigures
from gateway.rest.completions import CompletionFormatter
from gateway.rest.generate import CHAT_NAMES, TEXT_NAMES, ResponseFigures, generation_request, in_names_of
from gateway.rest.responses import ResponseHeader
from gateway.rest.schemas import CompletionRequest, SpeculationFields
from gateway.rounds.round import TokenOrigin
from gateway.text.tokenizer import Tokenizer
from outrider.errors import Field, InvalidRequest, Overloaded, PromptTooLong
from outrider.parameters import MAX_SAMPLES, Acceptance, FinishReason, Rule, SamplingParameters, TokenLogprob
from outrider.token_tree import TreeShape

HEADER = ResponseHeader("cmpl-1", 1, "markov", "fp")
PROMPT = (PromptToken(3, "fox", None), PromptToken(5, " sea", TokenLogprob(-1.0)))


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


def said(text: str, drafted: int = 0, accepted: int = 0, prompt: tuple[PromptToken, ...] = ()) -> RoundEvent:
    """A round with one token."""
    committed = round_of((1,), (TokenOrigin.PLAIN,), draft_count=drafted, accepted_count=accepted)
    return RoundEvent(
        (GeneratedToken(1, TokenOrigin.PLAIN, text, TokenLogprob(-2.0)),), committed, prompt_tokens=prompt
    )


def ended(**changes: Any) -> CompletionEvent:
    """The end of a choice of six tokens, the first after 30 ms of which it waited 10, the last after 130 ms."""
    fields: dict[str, Any] = dict.fromkeys(CompletionEvent.__dataclass_fields__, 0) | {"text_delta": "", "seed": 7}
    fields |= {"finish_reason": FinishReason.EOS, "figures": SpeculationFigures(), "model_hash": "hash"}
    fields |= {"numerics_ids": ("numerics",), "acceptance": Acceptance(), "prompt_tokens": 2, "completion_tokens": 6}
    return CompletionEvent(**{**fields, "first_token_us": 30_000, "total_us": 130_000, "queue_us": 10_000, **changes})


def counted(
    *steps: tuple[int, int], samples: int = 1, draft_count: int | None = None, ends: int = 1
) -> ResponseFigures:
    """What has been counted of some verdicts."""
    plan = CheckedRequest(spec_of([3, 5]), (), draft_count, sample_count=samples)
    figures = ResponseFigures([plan], 4, return_rounds=True)
    for step in steps:
        figures.add(0, said("x", *step))
    for index in range(ends):
        figures.add(index, ended(sample_index=index))
    return figures


def test_figures_are_counted_as_vllm_does() -> None:
    """By hand, over four verdicts of which one was on nothing."""
    told = counted((4, 4), (0, 0), (4, 1), (2, 1)).metrics()
    assert told.speculative_decoding is not None
    assert told.speculative_decoding.model_dump() == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.6,
        "acceptance_histogram": [0, 2, 0, 0, 1],
        "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "4": [0, 1, 0, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
        "per_step_accepted": [4, 1, 1],
        "per_step_drafted": [4, 4, 2],
    }
    times = (told.time_to_first_token_ms, told.generation_time_ms, told.queue_time_ms, told.mean_itl_ms)
    assert times == (30.0, 100.0, 10.0, 20.0)
    assert told.tokens_per_second == 6 / 0.12


def test_figures_are_of_one_choice_that_may_speculate() -> None:
    """With several choices, or with speculation switched off, there are none."""
    assert counted(samples=2, ends=2).metrics().speculative_decoding is None
    assert counted(draft_count=0).metrics().speculative_decoding is None
    assert counted(samples=2, ends=2).usage().model_dump() == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_guesses_of_a_prediction_are_told_as_openai_tells_them() -> None:
    """Its own package reads how many of a prediction's tokens were kept, over all choices, and ours by drafter."""
    figures = counted(samples=2, ends=2)
    for index in range(2):
        event = said("x", 3, 1)
        event.committed.proposal = replace(event.committed.proposal, sources=("prediction", "prediction", "lookup"))
        figures.add(index, event)
    details = CompletionUsage.model_validate(figures.usage().model_dump()).completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 2)
    assert [each.model_dump() for each in figures.facts().drafters] == [
        {"drafter": "prediction", "draft_tokens": 4, "accepted_tokens": 2},
        {"drafter": "lookup", "draft_tokens": 2, "accepted_tokens": 0},
    ]


def test_choices_wait_for_the_log_probabilities_of_their_prompt(words: str) -> None:
    """They come with the first choice of each prompt, which may be later than another choice."""
    formatter = CompletionFormatter(HEADER, Tokenizer(words), True, False, ["fox sea", "king"], 2)
    assert formatter.chunks(1, said("a")) == []
    assert formatter.chunks(1, ended()) == []
    told = [chunk.choices[0] for chunk in formatter.chunks(0, said("b", prompt=PROMPT))]
    assert [(choice.index, choice.text) for choice in told] == [
        (0, "fox sea"),
        (0, "b"),
        (1, "fox sea"),
        (1, "a"),
        (1, ""),
    ]
    assert [choice.logprobs.text_offset if choice.logprobs else None for choice in told] == [
        [0, 3],
        [7],
        [0, 3],
        [7],
        None,
    ]
    assert formatter.chunks(3, said("c")) == []
    assert [chunk.choices[0].index for chunk in formatter.chunks(2, said("d", prompt=PROMPT))] == [2, 2, 3, 3]
