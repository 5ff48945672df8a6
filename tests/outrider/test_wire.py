"""Tests of outrider.wire: what is sent is what arrives, and what is out of range is named."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers import spec_of

from outrider import wire
from outrider.errors import InvalidRequest, Unsupported
from outrider.parameters import FinishReason, SamplingParameters
from outrider.v1 import types_pb2 as pb

SPEC = spec_of(
    (1, 2, 3), 40, seed=-5, eos=(), stops=(4,), temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
    repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5, logit_bias={2: -3.5}, min_tokens=2,
    ignore_eos=True,
)  # fmt: skip
WITH_EOS = spec_of((1, 2, 3), 40, eos=(0, 9))


def test_a_session_arrives_as_it_was_sent() -> None:
    """Every field of the spec survives; the tokens are those of the log, not of the prompt."""
    message = pb.OpenSession.FromString(wire.open_message(SPEC, (1, 2, 3, 8)).SerializeToString())
    arrived = wire.spec_from(message, base_len=4, vocabulary_size=10)
    assert arrived.token_ids == (1, 2, 3, 8)
    assert (arrived.prompt_len, arrived.seed, arrived.max_len) == (3, -5, 40)
    assert arrived.sampling == SPEC.sampling
    assert (arrived.eos_token_ids, arrived.stop_token_ids) == (SPEC.eos_token_ids, SPEC.stop_token_ids)


def test_eos_ids_arrive_as_they_were_sent() -> None:
    """Where EOS is not ignored."""
    arrived = wire.spec_from(wire.open_message(WITH_EOS, (1, 2, 3)), base_len=3, vocabulary_size=10)
    assert arrived.eos_token_ids == {0, 9}
    assert not arrived.sampling.ignore_eos


def test_absent_parameters_are_neutral() -> None:
    """An empty message is the defaults, and an explicit 0 is a 0."""
    assert wire.sampling_from(pb.SamplingParameters()) == SamplingParameters()
    assert wire.sampling_from(pb.SamplingParameters(temperature=0.0)).temperature == 0.0


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
        (lambda m: m.stop_token_ids.extend([1] * 64), "session.stop_token_ids"),
        (lambda m: setattr(m.sampling, "temperature", float("nan")), "session.sampling.temperature"),
        (lambda m: setattr(m.sampling, "top_p", 0.0), "session.sampling.top_p"),
        (lambda m: m.sampling.logit_bias.update({10: 1.0}), "session.sampling.logit_bias key"),
        (lambda m: m.sampling.logit_bias.update({3: 101.0}), "session.sampling.logit_bias"),
    ],
)
def test_fields_out_of_range_are_named(change: Callable[[pb.OpenSession], None], field: str) -> None:
    """The error carries field, value and limit."""
    message = wire.open_message(SPEC, SPEC.token_ids)
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        wire.spec_from(message, base_len=3, vocabulary_size=10)
    assert caught.value.metadata["field"].startswith(field)
    assert caught.value.metadata["value"]
    assert caught.value.metadata["limit"]


def test_eos_ids_outside_the_vocabulary_are_named() -> None:
    """An EOS id of a larger vocabulary than the model's."""
    message = wire.open_message(WITH_EOS, WITH_EOS.token_ids)
    message.eos_token_ids.append(10)
    with pytest.raises(InvalidRequest, match=r"session\.eos_token_ids\.2 is 10"):
        wire.spec_from(message, base_len=3, vocabulary_size=10)


def test_min_tokens_may_be_all_of_the_output() -> None:
    """The limit is the room between the prompt and max_len, whatever has been said already."""
    message = wire.open_message(WITH_EOS, (1, 2, 3, 8))
    message.sampling.min_tokens = 37
    assert wire.spec_from(message, base_len=4, vocabulary_size=10).sampling.min_tokens == 37


@pytest.mark.parametrize("change", [{"rule": pb.ACCEPTANCE_RULE_RATIO}, {"rule": 77}, {"logprob_count": 0}])
def test_what_comes_later_is_refused(change: dict[str, int]) -> None:
    """Other rules and log-probabilities are not served yet, and not silently ignored."""
    message = wire.open_message(SPEC, SPEC.token_ids)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Unsupported):
        wire.spec_from(message, base_len=3, vocabulary_size=10)


@dataclass(frozen=True)
class Tree:
    """A proposal."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


@pytest.mark.parametrize("parents", [(0, 1, 2), (0, 0, 1), ()])
def test_trees_arrive_as_they_were_sent(parents: tuple[int, ...]) -> None:
    """A chain travels without parents and arrives with them."""
    message = wire.tree_message(Tree((4, 5, 6), parents))
    assert bool(message.parents) == (parents == (0, 0, 1))
    assert wire.tree_from(message, 10, 8) == ((4, 5, 6), parents or (0, 1, 2))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.TokenTree(token_ids=[1] * 9), "proposal.token_ids"),
        (pb.TokenTree(token_ids=[10]), "proposal.token_ids.0"),
        (pb.TokenTree(token_ids=[1, 2], parents=[0]), "proposal.parents"),
        (pb.TokenTree(token_ids=[1, 2], parents=[0, 2]), "proposal.parents.1"),
        (pb.TokenTree(token_ids=[1, 2], parents=[-1, 1]), "proposal.parents.0"),
        (pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution()]), "proposal.distributions"),
    ],
)
def test_malformed_proposals_are_refused(message: pb.TokenTree, field: str) -> None:
    """Too many rows, unknown tokens, children before parents, distributions under match."""
    with pytest.raises(InvalidRequest) as caught:
        wire.tree_from(message, vocabulary_size=10, max_rows=8)
    assert caught.value.metadata["field"] == field


def test_finish_reasons_arrive_as_they_were_sent() -> None:
    """All of them, and none."""
    for reason in (None, *FinishReason):
        assert wire.finish_reason(wire.finish_reason_message(reason)) is reason
