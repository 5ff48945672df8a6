"""Acceptance rules and their settings between protobuf messages and plain values."""

from collections.abc import Iterable

from outrider.errors import InvalidRequest
from outrider.parameters import (
    SETTINGS,
    Acceptance,
    Rule,
)
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
