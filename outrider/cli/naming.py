"""What an error says about a field, in the words of the command line: by the option that was typed. Knows no gateway.

The table comes from the groups of options themselves, so that an option's name stands in one place.
"""

import re
from collections.abc import Mapping
from dataclasses import fields

import typer
from typer.main import get_command

from outrider.cli.asking import Answer, Report, Sampling, Speculation
from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.parameters import SETTINGS, SamplingParameters
from outrider.process.options import grouped

SPECULATION = frozenset(field.name for field in fields(Speculation))
ACCEPTANCE = frozenset(name for names in SETTINGS.values() for name in names)
# Where the protocol has another name than the command line.
PROTOCOL_NAMES = {
    "samples": "sample_count",
    "logprobs": "logprob_count",
    "no_speculation": "enabled",
    "show_rejected": "return_rounds",
}
# Behind the name of a field: which entry of it is at fault, or that the key of one is.
ENTRY = re.compile(r"(\.-?\d+| key)$")


def _ask(*, answer: Answer, sampling: Sampling, speculation: Speculation, report: Report) -> None:
    """A command with everything that a request can ask for, to see how its options are called."""


def _flags() -> dict[str, str]:
    """Options by the names of the groups' fields; only typer itself knows how it makes the ones from the others."""
    app = typer.Typer(add_completion=False)
    app.command()(grouped(_ask))
    return {option.name or "": option.opts[0] for option in get_command(app).params}


def _paths(name: str) -> tuple[str, ...]:
    """A field as the gateway names it, and as the client does, whose settings have fewer levels."""
    field = PROTOCOL_NAMES.get(name, name)
    if field in SamplingParameters.model_fields:
        return f"sampling.{field}", field
    if field in ACCEPTANCE:
        return f"speculation.acceptance.{field}", f"speculation.{field}"
    return (f"speculation.{field}" if name in SPECULATION else field,)


OPTIONS: Mapping[str, str] = {
    "address": "--address",
    **{path: option for name, option in _flags().items() for path in _paths(name)},
}
# What every command that asks calls the same: max_tokens is --tokens in the measurements.
SHARED_OPTIONS: Mapping[str, str] = {path: option for path, option in OPTIONS.items() if path != "max_tokens"}


def in_options(error: OutriderError, options: Mapping[str, str]) -> str:
    """The error's sentence with options for fields, in what it is about and in the limit, and never in the value."""
    if isinstance(error, PromptTooLong):
        return _translated(error.message, options)
    field, limit = (error.metadata.get(key, "") for key in ("field", "limit"))
    option = options.get(ENTRY.sub("", field))
    if option is None or not isinstance(error, InvalidRequest) or not error.message.startswith(field):
        return error.message
    value = error.message.removeprefix(field).removesuffix(limit)
    ending = error.message.removeprefix(field + value)
    return option + value + _translated(ending, options)


def _translated(text: str, options: Mapping[str, str]) -> str:
    """The text with options for names of fields. A name without an underscore may as well be an English word."""
    return re.sub(r"\b[a-z]+_[a-z_]+\b", lambda found: options.get(found[0], found[0]), text)
