"""A template reaches nothing: each trick ends in an error instead of in Python."""

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from gateway.text.template_sandbox import SafeTemplate

MESSAGES = [{"role": "user", "content": "x" * 100}]


def render(source: str) -> str:
    """What a template makes of a message."""
    return SafeTemplate(source).render({"messages": MESSAGES, "tools": None})


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


def test_what_a_template_takes_from_outside_is_known() -> None:
    """Also where it gives a default to what is missing; a name that it makes itself is not among them."""
    source = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{% set own = 1 %}{{ own }}"
    assert SafeTemplate(source).variables == {"tools"}
