"""Tests of outrider.rpc.messages: what is sent is what arrives, and what is out of range is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.basics import spec_of

from outrider.errors import InvalidRequest
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import Acceptance, FinishReason, Rule, SamplingParameters
from outrider.rpc.messages.round import finish_reason, finish_reason_message, times_message
from outrider.rpc.messages.session import open_message, sampling_from, spec_from
from outrider.v1 import types_pb2 as pb

SAMPLING = spec_of(
    (1, 2, 3), 40, seed=-5, eos=(), stops=(4,), temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
    repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5, logit_bias={2: -3.5}, min_tokens=2,
    ignore_eos=True,
)  # fmt: skip
SPEC = replace(
    SAMPLING,
    acceptance=Acceptance(rule=Rule.LENIENT, lenience=0.25),
    banned=((7,), (1, 2, 9)),
    logprob_count=3,
    prompt_logprobs=True,
    trace_context=(("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
)
WITH_EOS = spec_of((1, 2, 3), 40, eos=(0, 9))


def test_a_session_arrives_as_it_was_sent() -> None:
    """Every field of the spec survives; the tokens are those of the log, not of the prompt."""
    message = pb.OpenSession.FromString(open_message(SPEC, (1, 2, 3, 8)).SerializeToString())
    assert spec_from(message, base_len=4, vocabulary_size=10) == replace(SPEC, token_ids=(1, 2, 3, 8))


def test_tokens_that_came_before_an_open_are_the_first_of_it() -> None:
    """The spec is that of an open with all tokens, and what is wrong with one is named by its place among all."""
    whole, later = (open_message(SPEC, token_ids) for token_ids in ((1, 2, 3, 8), (3, 8)))
    for message, earlier in ((whole, ()), (later, [1, 2])):
        assert spec_from(message, 4, 10, earlier) == replace(SPEC, token_ids=(1, 2, 3, 8))
    with pytest.raises(InvalidRequest, match=r"^session\.token_ids is '3 tokens', but must be base_len 4 tokens$"):
        spec_from(later, 4, 10, [1])
    with pytest.raises(InvalidRequest, match=r"^session\.token_ids\.1 is 10"):
        spec_from(later, 4, 10, [1, 10])


def test_what_an_answer_cost_arrives_as_it_was_measured() -> None:
    """Each number under its own name."""
    times = times_message(ComputeTimes(queue_us=1, compute_us=2, forward_count=3, row_count=4))
    assert times == pb.ComputeTimes(queue_us=1, compute_us=2, forward_count=3, row_count=4)


def test_eos_ids_arrive_as_they_were_sent() -> None:
    """Where EOS is not ignored."""
    arrived = spec_from(open_message(WITH_EOS, (1, 2, 3)), base_len=3, vocabulary_size=10)
    assert arrived.eos_token_ids == {0, 9}
    assert not arrived.sampling.ignore_eos


def test_absent_parameters_are_neutral() -> None:
    """An empty message is the defaults, and an explicit 0 is a 0."""
    assert sampling_from(pb.SamplingParameters()) == SamplingParameters()
    assert sampling_from(pb.SamplingParameters(temperature=0.0)).temperature == 0.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.token_ids.append(1), "session.token_ids"),
        (lambda m: m.token_ids.__setitem__(1, 10), "session.token_ids.1"),
        (lambda m: m.token_ids.__setitem__(2, -1), "session.token_ids.2"),
        (lambda m: setattr(m, "prompt_len", 0), "session.prompt_len"),
        (lambda m: setattr(m, "prompt_len", 4), "session.prompt_len"),
        (lambda m: setattr(m, "max_len", 3), "session.max_len"),
        (lambda m: m.eos_token_ids.append(9), "session.eos_token_ids"),
        (lambda m: setattr(m.sampling, "min_tokens", 38), "session.sampling.min_tokens"),
        (lambda m: setattr(m.sampling, "min_tokens", 2**31 - 1), "session.sampling.min_tokens"),
        (lambda m: m.stop_token_ids.extend([1] * 128), "session.stop_token_ids"),
        (lambda m: setattr(m.sampling, "temperature", float("nan")), "session.sampling.temperature"),
        (lambda m: setattr(m.sampling, "top_p", 0.0), "session.sampling.top_p"),
        (lambda m: m.sampling.logit_bias.update({10: 1.0}), "session.sampling.logit_bias key"),
        (lambda m: m.sampling.logit_bias.update({3: 101.0}), "session.sampling.logit_bias"),
        (lambda m: m.trace_context.update({"tracestate": "x" * 8192}), "session.trace_context"),
    ],
)
def test_fields_out_of_range_are_named(change: Callable[[pb.OpenSession], None], field: str) -> None:
    """The error carries field, value and limit."""
    message = open_message(SPEC, SPEC.token_ids)
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        spec_from(message, base_len=3, vocabulary_size=10)
    assert caught.value.metadata["field"].startswith(field)
    assert caught.value.metadata["value"]
    assert caught.value.metadata["limit"]


def test_eos_ids_outside_the_vocabulary_are_named() -> None:
    """An EOS id of a larger vocabulary than the model's."""
    message = open_message(WITH_EOS, WITH_EOS.token_ids)
    message.eos_token_ids.append(10)
    with pytest.raises(InvalidRequest, match=r"session\.eos_token_ids\.2 is 10"):
        spec_from(message, base_len=3, vocabulary_size=10)


def test_min_tokens_may_be_all_of_the_output() -> None:
    """The limit is the room between the prompt and max_len, whatever has been said already."""
    message = open_message(WITH_EOS, (1, 2, 3, 8))
    message.sampling.min_tokens = 37
    assert spec_from(message, base_len=4, vocabulary_size=10).sampling.min_tokens == 37


@pytest.mark.parametrize("count", [-1, 21, 2**31 - 1])
def test_a_number_of_alternatives_out_of_range_is_named(count: int) -> None:
    """Twenty are the most."""
    message = open_message(SPEC, SPEC.token_ids)
    message.logprob_count = count
    with pytest.raises(InvalidRequest, match=rf"^session\.logprob_count is {count}, but must be in \[0, 20\]$"):
        spec_from(message, base_len=3, vocabulary_size=10)


@pytest.mark.parametrize("count", [None, 0, 20])
def test_no_alternatives_are_not_no_log_probabilities(count: int | None) -> None:
    """An explicit 0 asks for the token's own number."""
    message = open_message(replace(SPEC, logprob_count=count, prompt_logprobs=False), SPEC.token_ids)
    assert spec_from(message, base_len=3, vocabulary_size=10).logprob_count == count


def test_a_prompt_alone_has_no_log_probabilities() -> None:
    """They come with those of the output, or not at all."""
    message = open_message(SPEC, SPEC.token_ids)
    message.ClearField("logprob_count")
    message.prompt_logprobs = True
    with pytest.raises(InvalidRequest, match=r"session\.prompt_logprobs is True, .* without logprob_count"):
        spec_from(message, base_len=3, vocabulary_size=10)


@pytest.mark.parametrize(
    ("banned", "field"),
    [
        ([[1]] * 257, "session.banned_sequences"),
        ([[1], []], "session.banned_sequences.1"),
        ([[1], [2] * 65], "session.banned_sequences.1"),
        ([[1, 10]], "session.banned_sequences.0.1"),
        ([[3], [4, -1, 5]], "session.banned_sequences.1.1"),
    ],
)
def test_banned_sequences_out_of_range_are_named(banned: list[list[int]], field: str) -> None:
    """Too many, empty, too long, or with ids that the model does not know."""
    message = open_message(replace(SPEC, banned=()), SPEC.token_ids)
    message.banned_sequences.extend(pb.TokenIds(token_ids=sequence) for sequence in banned)
    with pytest.raises(InvalidRequest) as caught:
        spec_from(message, base_len=3, vocabulary_size=10)
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["limit"]


def test_the_most_that_may_be_banned_arrives() -> None:
    """256 sequences of 64 ids."""
    spec = replace(SPEC, banned=tuple((number % 10,) * 64 for number in range(256)))
    assert spec_from(open_message(spec, SPEC.token_ids), 3, 10).banned == spec.banned


def test_a_grammar_arrives_as_its_text() -> None:
    """Where it has been compiled for the session, and where a token can end that; else its open is refused."""
    spec = replace(WITH_EOS, grammar="start: /a+/")
    message = open_message(spec, (1, 2, 3))
    assert spec_from(message, 3, 10, is_compiled=True) == spec != WITH_EOS
    with pytest.raises(InvalidRequest, match=r"^session\.grammar is .* empty for a service without a grammar engine$"):
        spec_from(message, 3, 10)
    endless = open_message(replace(spec, eos_token_ids=frozenset()), (1, 2, 3))
    with pytest.raises(InvalidRequest, match=r"^session\.grammar is .* empty without a token that ends the request$"):
        spec_from(endless, 3, 10, is_compiled=True)


def test_a_rule_that_is_none_is_named() -> None:
    """A number of a newer protocol."""
    message = open_message(SPEC, SPEC.token_ids)
    message.rule = 77  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"^session\.rule is 77, but must be one of match, ratio"):
        spec_from(message, base_len=3, vocabulary_size=10)


def test_settings_are_named_with_their_place() -> None:
    """The session's field is part of the name."""
    message = open_message(SPEC, SPEC.token_ids)
    message.acceptance.lenience = 2.0
    with pytest.raises(InvalidRequest, match=r"^session\.acceptance\.lenience is 2\.0"):
        spec_from(message, base_len=3, vocabulary_size=10)


def test_finish_reasons_arrive_as_they_were_sent() -> None:
    """All of them, and none."""
    for reason in (None, *FinishReason):
        assert finish_reason(finish_reason_message(reason)) is reason
