"""Rules, their settings and log-probabilities, between messages and plain values. Knows no session and no model."""

from collections.abc import Iterable

from outrider.errors import InvalidRequest
from outrider.parameters import SETTINGS, Acceptance, Rule, TokenLogprob
from outrider.v1 import types_pb2 as pb

RULES = {
    Rule.MATCH: pb.ACCEPTANCE_RULE_MATCH,
    Rule.RATIO: pb.ACCEPTANCE_RULE_RATIO,
    Rule.BLOCK: pb.ACCEPTANCE_RULE_BLOCK,
    Rule.LENIENT: pb.ACCEPTANCE_RULE_LENIENT,
    Rule.TYPICAL: pb.ACCEPTANCE_RULE_TYPICAL,
}
RULES_BY_NUMBER = {number: rule for rule, number in RULES.items()} | {pb.ACCEPTANCE_RULE_UNSPECIFIED: Rule.MATCH}


def rule_from(rule: pb.AcceptanceRule.ValueType, field: str) -> Rule:
    """The rule of a message, `match` when it names none; raises InvalidRequest about a number that is no rule."""
    if rule not in RULES_BY_NUMBER:
        raise InvalidRequest(field, rule, f"one of {', '.join(RULES)}")
    return RULES_BY_NUMBER[rule]


def rules_from(numbers: Iterable[pb.AcceptanceRule.ValueType]) -> frozenset[Rule]:
    """The rules of a list; those of a newer protocol are left out."""
    return frozenset(RULES_BY_NUMBER[number] for number in numbers if number in RULES_BY_NUMBER)


def acceptance_from(
    rule: pb.AcceptanceRule.ValueType, settings: pb.AcceptanceSettings, rule_field: str, prefix: str
) -> Acceptance:
    """A rule with its settings; raises InvalidRequest about a setting out of range or of another rule."""
    wanted = rule_from(rule, rule_field)
    values = {field.name: value for field, value in settings.ListFields()}
    for name, value in values.items():
        if name not in SETTINGS.get(wanted, ()):
            raise InvalidRequest(prefix + name, value, f"absent under the rule {wanted}")
    return Acceptance.checked({"rule": wanted, **values}, prefix)


def settings_message(acceptance: Acceptance) -> pb.AcceptanceSettings | None:
    """The settings that the rule reads; None for a rule that reads none."""
    return pb.AcceptanceSettings(**acceptance.settings) if acceptance.settings else None


def logprob_message(logprob: TokenLogprob) -> pb.TokenLogprob:
    """Log-probabilities to send."""
    return pb.TokenLogprob(
        logprob=logprob.logprob, top_token_ids=logprob.top_token_ids, top_logprobs=logprob.top_logprobs
    )


def logprob_size(count: int, vocabulary_size: int) -> int:
    """Most bytes that an entry with `count` alternatives takes in a list of them."""
    id_bytes = -(-max(vocabulary_size - 1, 1).bit_length() // 7)
    # Nine for the number; two lists with tag and length, of which the longer may need two bytes; the entry's own.
    return 9 + (2 + count * id_bytes) + (3 + 8 * count) + 3


def logprobs_from(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities that came."""
    return tuple(
        TokenLogprob(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs)) for message in messages
    )
