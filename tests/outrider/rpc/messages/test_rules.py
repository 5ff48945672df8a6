"""Tests of outrider.rpc.messages.rules: rules with the settings that are theirs, and log-probabilities."""

import math

import pytest

from outrider.errors import InvalidRequest
from outrider.parameters import SETTINGS, Acceptance, Rule, TokenLogprob
from outrider.rpc.messages.round import logprob_message, logprob_size, logprobs_from
from outrider.rpc.messages.rules import RULES, acceptance_from, rule_from, settings_message
from outrider.v1 import types_pb2 as pb
from outrider.v1.target_service_pb2 import Verdict

NAMES = [name for names in SETTINGS.values() for name in names]


def arrive(acceptance: Acceptance) -> Acceptance:
    """A rule and its settings through messages."""
    settings = settings_message(acceptance) or pb.AcceptanceSettings()
    settings = pb.AcceptanceSettings.FromString(settings.SerializeToString())
    return acceptance_from(RULES[acceptance.rule], settings, "rule", "acceptance.")


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_arrives_with_its_defaults(rule: Rule) -> None:
    """Rules without settings send none."""
    assert arrive(Acceptance(rule=rule)) == Acceptance(rule=rule)
    assert (settings_message(Acceptance(rule=rule)) is None) == (rule not in SETTINGS)


def test_settings_arrive_as_they_were_sent() -> None:
    """Those of the rule, and no others."""
    typical = Acceptance(rule=Rule.TYPICAL, typical_epsilon=1.0, typical_delta=1e-300)
    lenient = Acceptance(rule=Rule.LENIENT, lenience=0.125)
    assert arrive(typical) == typical
    assert arrive(lenient) == lenient


def test_no_rule_is_match() -> None:
    """A message of the first version."""
    assert rule_from(pb.ACCEPTANCE_RULE_UNSPECIFIED, "rule") is Rule.MATCH


@pytest.mark.parametrize("number", [6, 77, -1])
def test_a_number_that_is_no_rule_is_named(number: int) -> None:
    """With all that there are."""
    with pytest.raises(InvalidRequest) as caught:
        rule_from(number, "session.rule")  # type: ignore[arg-type]
    assert str(caught.value) == (f"session.rule is {number}, but must be one of match, ratio, block, lenient, typical")


@pytest.mark.parametrize("value", [0.0, -0.5, 1.0000001, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    """Above 0, at most 1, and a number."""
    [rule] = [rule for rule, names in SETTINGS.items() if name in names]
    with pytest.raises(InvalidRequest) as caught:
        acceptance_from(RULES[rule], pb.AcceptanceSettings(**{name: value}), "rule", "acceptance.")
    assert caught.value.metadata["field"] == f"acceptance.{name}"
    assert caught.value.metadata["value"] == repr(value)
    assert caught.value.metadata["limit"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", Rule)
def test_settings_of_another_rule_are_refused(rule: Rule, name: str) -> None:
    """Even the default: a client that sets it expects an effect."""
    if name in SETTINGS.get(rule, ()):
        return
    settings = pb.AcceptanceSettings(**{name: getattr(Acceptance(), name)})
    with pytest.raises(InvalidRequest, match=rf"^acceptance\.{name} is .* must be absent under the rule {rule}$"):
        acceptance_from(RULES[rule], settings, "rule", "acceptance.")


def test_log_probabilities_arrive_to_the_last_bit() -> None:
    """Numbers are doubles, and an entry without alternatives has none."""
    entries = (TokenLogprob(-1 / 3, (5, 0, 4095), (-0.1, -1 / 3, -1e30)), TokenLogprob(0.0))
    messages = [pb.TokenLogprob.FromString(logprob_message(entry).SerializeToString()) for entry in entries]
    assert logprobs_from(messages) == entries


@pytest.mark.parametrize("count", [0, 1, 15, 16, 20])
@pytest.mark.parametrize("vocabulary_size", [1, 2, 128, 129, 16384, 16385, 128256, 2**31])
def test_no_entry_is_larger_than_is_said(count: int, vocabulary_size: int) -> None:
    """Nor much smaller, at its largest."""
    entry = logprob_message(TokenLogprob(-1e30, (vocabulary_size - 1,) * count, (-1e30,) * count))
    one_size = Verdict(prompt_logprobs=[entry] * 10).ByteSize() / 10
    assert one_size <= logprob_size(count, vocabulary_size) <= one_size + 10
