"""Fields that bodies of several routes have, their ranges, and the kinds of values that a field may be of.

What a range depends on, the target's vocabulary for one, is checked with the request itself.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from gateway.generation.request import MAX_DRAFTERS, MAX_STRING_LEN
from outrider.parameters import Parameters, Share
from outrider.token_tree import MAX_CHILDREN, MAX_DEPTH, MAX_LEVEL_ROWS

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_IDS = 1_000_000
MAX_MESSAGES = 4096
# Of one message. Lists end at their first fault: a finding for each of a million entries takes minutes and gigabytes.
MAX_PARTS, MAX_CALLS = 4096, 128
# The mark of what is named in the header x-outrider-ignored.
NO_EFFECT = "Accepted without effect, and named in the header x-outrider-ignored."
# The mark of what says that all is as usual; a gateway that tolerates unknown fields leaves out what says otherwise.
AS_USUAL = "Only this is served, and is so without it."

# What pydantic calls an object of a type that is none of a union's; the message is the types that there are.
UNION_KIND = "union_kind"

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STRING_LEN)]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]
# Which says nothing, and is left out before it is looked at.
NOTHING = WithJsonSchema(
    {
        "anyOf": [
            {"type": "null"},
            {"type": "string", "maxLength": 0},
            {"type": "array", "maxItems": 0},
            {"type": "object", "maxProperties": 0},
        ]
    }
)
Unserved = Annotated[None, Field(description="Known, but not served: null, empty or absent."), NOTHING]
Unusual = Annotated[None, Field(description=AS_USUAL), NOTHING]
# What clients repeat of answers, of others too, and what they say to others' servers.
Ignored = Annotated[Any, Field(description=NO_EFFECT)]


def type_of(value: object) -> object:
    """The field `type` of an object or of a model that was made of one."""
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def json_text(value: object) -> str:
    """A value as JSON, and a text as it is, because it is in JSON already; null is no text."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def by_type(
    types: Sequence[str], default: str | None = None, *, others: Callable[[str], bool] = lambda _: False
) -> Discriminator:
    """Distinguishes the models of a union by their field `type`; the tag of each is its type in angle brackets.

    Objects of the types that `others` knows have the tag <other>; they are taken as they are.
    """

    def tag(value: object) -> str | None:
        found = type_of(value)
        kind = default if found is None else found
        if not isinstance(kind, str):
            return None
        if kind in types:
            return f"<{kind}>"
        return "<other>" if others(kind) else None

    kinds = " or ".join([*filter(None, [", ".join(map(repr, types[:-1]))]), repr(types[-1])])
    return Discriminator(tag, custom_error_type=UNION_KIND, custom_error_message=kinds)


def by_any_type(types: Sequence[str]) -> Discriminator:
    """`by_type`, with the tag <other> for every type that is not among these."""
    return by_type(types, others=lambda _: True)


def text_or_list(kinds: str) -> Discriminator:
    """Distinguishes a string, with the tag <text>, from a list, with the tag <list>."""

    def tag(value: object) -> str | None:
        if isinstance(value, str):
            return "<text>"
        return "<list>" if isinstance(value, list) else None

    return Discriminator(tag, custom_error_type="content_kind", custom_error_message=f"Input should be {kinds}")


DrafterName = Annotated[str, Field(min_length=1, max_length=MAX_STRING_LEN)]
Several = Annotated[list[DrafterName], Field(min_length=1, max_length=MAX_DRAFTERS, fail_fast=True)]
Drafters = Annotated[
    Annotated[str, Field(max_length=MAX_STRING_LEN), Tag("<text>")] | Annotated[Several, Tag("<list>")],
    text_or_list("a name or a list of names"),
]
Children = Annotated[int, Field(ge=1, le=MAX_CHILDREN)]


class ShapeFields(Parameters):
    """The shape of a tree of guesses; what is absent is the drafter's own choice."""

    max_depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] = 0
    max_children: Annotated[int, Field(ge=0, le=MAX_CHILDREN)] = 0
    expansions: Annotated[list[Children], Field(default_factory=list, max_length=MAX_DEPTH, fail_fast=True)]
    max_width: Annotated[int, Field(ge=0, le=MAX_LEVEL_ROWS)] = 0
    is_static: bool = False


class SpeculationFields(Parameters):
    """Whether and how to speculate. Under `match` nothing here changes a token."""

    enabled: bool | None = None
    draft_count: Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["auto"] | None = None
    rule: Literal["match", "ratio", "block", "lenient", "typical"] | None = None
    lenience: Share | None = None
    typical_epsilon: Share | None = None
    typical_delta: Share | None = None
    drafter: Drafters | None = None
    drafters: Annotated[Several | None, Field(description="Another name for a list in `drafter`.")] = None
    shape: ShapeFields | None = None
    return_rounds: bool | None = None


def ignored_in(model: BaseModel, path: str = "") -> Iterator[str]:
    """Places where a body has values without effect, without the numbers of entries; a place may come repeatedly."""
    for name, place, has_effect in _fields(type(model)):
        if name not in model.model_fields_set or (value := getattr(model, name)) is None:
            continue
        if not has_effect:
            yield path + place
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, BaseModel):
                yield from ignored_in(each, f"{path}{place}.")
    yield from (path + name for name, value in (model.model_extra or {}).items() if value is not None)


@cache
def _fields(kind: type[BaseModel]) -> tuple[tuple[str, str, bool], ...]:
    """Fields of a model without effect or with models in them: name, name in a body, and whether it has an effect.

    The others are not looked at: a prompt may be a million token ids.
    """
    fields = ((name, info, info.description != NO_EFFECT) for name, info in kind.model_fields.items())
    return tuple(
        (name, info.alias or name, has_effect)
        for name, info, has_effect in fields
        if not has_effect or _holds_models(info.annotation)
    )


def _holds_models(annotation: object) -> bool:
    if inner := get_args(annotation):
        return any(map(_holds_models, inner))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
