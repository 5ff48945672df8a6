"""A template reaches nothing, and has a budget: each trick ends in an error instead of in Python or out of memory."""

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from gateway.template_budget import MAX_STEPS, MAX_TEXT_LEN, Budget, BudgetSpent
from gateway.text.template_sandbox import SafeTemplate

MESSAGES = [{"role": "user", "content": "x" * 100}]
DOUBLING = "{{% set ns = namespace(a='x' * 100) %}}{{% for i in range(60) %}}{}{{% endfor %}}"


def render(source: str, budget: Budget | None = None) -> str:
    """What a template makes of a message."""
    return SafeTemplate(source).render({"messages": MESSAGES, "tools": None}, budget)


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ (1).__class__.__mro__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ '{role.__class__.x}'.format_map(messages[0]) }}",
        "{{ messages | map(attribute='__class__.__base__') | list }}",
        "{{ dict.__class__.x }}",
        "{{ range.__globals__.x }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = dict %}",
        "{{ namespace(_private=1) }}",
        "{{ namespace([('_private', 1)]) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ (messages | map(attribute='update') | first)(role='system') }}",
    ],
)
def test_no_attribute_leads_to_python(source: str) -> None:
    """Neither by a dot nor by a filter, a format string or a namespace; and messages stay as they are."""
    with pytest.raises(SecurityError):
        render(source)
    assert MESSAGES == [{"role": "user", "content": "x" * 100}]


@pytest.mark.parametrize("source", ["{{ '{0.__class__}'.format(messages) }}", "{{ messages | attr('__class__') }}"])
def test_what_is_shown_of_python_is_nothing(source: str) -> None:
    """Where an attribute is only written, and not used, it is empty."""
    assert not render(source)


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{% import 'x' as x %}", "{% extends 'x' %}"])
def test_there_are_no_other_templates(source: str) -> None:
    """Nothing is looked up anywhere."""
    with pytest.raises((TypeError, TemplateError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ range(1000000000) | list }}",
        "{% for i in range(1000) %}{% set _ = range(90000) | sum %}{% endfor %}",
        "{% macro again(n) %}{% for i in range(n) %}{{ again(n) }}{% endfor %}{% endmacro %}{{ again(9) }}",
        DOUBLING.format("{% set ns.a = ns.a ~ ns.a %}"),
        DOUBLING.format("{% set ns.a = ns.a + ns.a %}"),
        DOUBLING.format("{% set ns.a = 2 * ns.a %}"),
        DOUBLING.format("{% set ns.a = [ns.a, ns.a] | join %}{{ ns.a }}"),
        DOUBLING.format("{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
        DOUBLING.format("{% set ns.a %}{% filter upper %}{{ ns.a }}{{ ns.a }}{% endfilter %}{% endset %}"),
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
    ],
)
def test_work_and_text_are_bounded(source: str) -> None:
    """Of loops, ranges, operators and blocks, one in another."""
    with pytest.raises((BudgetSpent, RecursionError)):
        render(source)


def test_a_budget_is_spent_to_its_last_step_and_character() -> None:
    """One more is too many; two renderings of one template share nothing."""
    template = SafeTemplate("{% for m in messages * 5 %}ab{{ m.role ~ '!' }}{% endfor %}")
    variables = {"messages": MESSAGES, "tools": None}
    # What an operator makes is paid for when it is made, and what is written when it is written.
    text_len = 5 + 5 * (2 + 5 + 5)
    for _ in range(2):
        assert len(template.render(variables, Budget(5, text_len))) == 5 * 7
    with pytest.raises(BudgetSpent, match="too many steps"):
        template.render(variables, Budget(4, text_len))
    with pytest.raises(BudgetSpent, match="too long"):
        template.render(variables, Budget(5, text_len - 1))


def test_usual_budgets_are_far_from_usual_templates() -> None:
    """A thousand messages of a kilobyte take a fraction."""
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</>' }}{% endfor %}"
    messages = MESSAGES[0] | {"content": "x" * 1000}
    rendered = SafeTemplate(source).render({"messages": [messages] * 1024}, Budget(MAX_STEPS // 100, MAX_TEXT_LEN // 2))
    assert len(rendered) == 1024 * 1009


def test_what_a_template_takes_from_outside_is_known() -> None:
    """Also where it gives a default to what is missing; a name that it makes itself is not among them."""
    source = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{% set own = 1 %}{{ own }}"
    assert SafeTemplate(source).variables == {"tools"}
