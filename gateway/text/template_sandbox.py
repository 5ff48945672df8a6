"""Runs a chat template in Jinja's immutable sandbox: it reaches nothing of Python and changes nothing that it is given.

How much it computes is not bounded: the operator chose the model that it came with. The environment is the one of
transformers' apply_chat_template, so that templates render to the same characters.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_dict: Callable[..., dict[object, object]] = dict


class TemplateRefusal(TemplateError):
    """The template itself says that it does not take these messages."""


class SafeTemplate:
    """A compiled template that can reach nothing but its variables."""

    def __init__(self, source: str) -> None:
        """Raises TemplateSyntaxError, and whatever else the compiler makes of nonsense."""
        environment = _Environment()
        self.variables = frozenset(find_undeclared_variables(environment.parse(source)))
        """Names that the template takes from outside."""
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, object]) -> str:
        """Raises TemplateRefusal, and whatever else a template can do wrong."""
        return self._template.render(variables)


class _Environment(ImmutableSandboxedEnvironment):
    """Raises SecurityError for what no template has to do with."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters |= {"tojson": _tojson}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }


class _Generation(Extension):
    """The tag that marks what an assistant said, for training. The text in it is text."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own form

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads the block. What is set in it stays in it, as in transformers, where it is a macro too."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models know it, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """Makes dictionaries, and is not their class."""

    def __call__(self, *args: object, **kwargs: object) -> dict[object, object]:
        return _dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        """A dictionary with one value for all keys, like dict.fromkeys."""
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """Variables that a loop may change, of which none can stand for one of Python's own names."""

    # Without a name for itself, because a template may set a variable of any.
    def __init__(*args: object, **kwargs: object) -> None:
        for name in _dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}")
