"""Groups of options: a command takes dataclasses, and typer sees their fields. Knows no option."""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from typing import Any, ClassVar, Protocol, get_type_hints

Command = Callable[..., None]


class Group(Protocol):
    """An instance of any dataclass, whose fields are annotated as typer wants its parameters and have defaults."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def grouped(command: Command) -> Command:
    """The command with an option for each field of the groups that it takes; no two may have the same name."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Group]] = {
        each.name: each.annotation
        for each in signature.parameters.values()
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }

    @wraps(command)
    def flat(**values: object) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    # What typer reads. A function has no such attribute until somebody sets it, which mypy cannot know.
    flat.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter
            for each in signature.parameters.values()
            for parameter in (_options(groups[each.name]) if each.name in groups else [each])
        ]
    )
    return flat


def _options(group: type[Group]) -> list[inspect.Parameter]:
    """The fields of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(group)
    ]


def options_of(group: Group, *names: str) -> dict[str, object]:
    """Fields of a group by the names of their options, all or those named; None where an option was not given."""
    wanted = names or tuple(each.name for each in fields(group))
    return {"--" + name.replace("_", "-"): getattr(group, name) for name in wanted}
