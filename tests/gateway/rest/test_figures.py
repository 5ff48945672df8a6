"""Events of a request are counted and put together in any order, and told in the shapes of vLLM and OpenAI."""

from dataclasses import asdict, replace
from typing import Any

from openai.types import CompletionUsage
from support.basics import spec_of
from support.services.markov import round_of

from gateway.generation.events import CompletionEvent, OutputToken, RoundEvent
from gateway.generation.request import CheckedRequest
from gateway.rest.answering import ResponseHeader
from gateway.rest.figures import ResponseFigures
from gateway.rest.openai.completions import CompletionFormatter
from gateway.rounds.round import TokenOrigin
from gateway.text.tokenizer import Tokenizer
from outrider.answer import PromptToken, SpeculationFigures
from outrider.parameters import Acceptance, FinishReason, SamplingParameters, TokenLogprob

HEADER = ResponseHeader("cmpl-1", 1, "markov", "fp")
PROMPT = (PromptToken(3, "fox", None), PromptToken(5, " sea", TokenLogprob(-1.0)))


def said(text: str, drafted: int = 0, accepted: int = 0, prompt: tuple[PromptToken, ...] = ()) -> RoundEvent:
    """A round with one token."""
    committed = round_of((1,), (TokenOrigin.PLAIN,), draft_count=drafted, accepted_count=accepted)
    return RoundEvent((OutputToken(1, TokenOrigin.PLAIN, text, TokenLogprob(-2.0)),), committed, prompt_tokens=prompt)


def ended(**changes: Any) -> CompletionEvent:
    """The end of a choice of six tokens, the first after 30 ms of which it waited 10, the last after 130 ms."""
    fields: dict[str, Any] = dict.fromkeys(CompletionEvent.__dataclass_fields__, 0) | {"text_delta": "", "seed": 7}
    fields |= {"finish_reason": FinishReason.EOS, "speculation": SpeculationFigures(), "model_hash": "hash"}
    fields |= {"numerics_ids": ("numerics",), "acceptance": Acceptance(), "prompt_tokens": 2, "completion_tokens": 6}
    fields |= {"sampling": SamplingParameters()}
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
    assert [asdict(each) for each in figures.facts().drafters] == [
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
