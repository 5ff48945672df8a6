"""The way from a checked body to a request, and errors in the names that its route has for fields."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.generation.frontend import ModelNames
from gateway.generation.request import GenerationRequest
from gateway.rest.asking.chat_body import GenerationFields
from gateway.rest.asking.fields import ShapeFields, SpeculationFields
from gateway.rest.asking.structured import constraint_of
from gateway.rest.errors import UnknownModel
from outrider.beams import MAX_WIDTH, MIN_WIDTH, BeamSearch, EarlyStopping
from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.parameters import SETTINGS, Acceptance, Rule, SamplingParameters
from outrider.token_tree import TreeShape

SAMPLING = set(SamplingParameters.model_fields)
SETTING_NAMES = {name for names in SETTINGS.values() for name in names}
# What the gateway calls otherwise than the body of a route; every other field has one name.
COMMON_NAMES = {"sample_count": "n", "beam_search": "use_beam_search"}
TEXT_NAMES = {**COMMON_NAMES, "logprob_count": "logprobs", "token_ids": "prompt"}
CHAT_NAMES = {**COMMON_NAMES, "logprob_count": "top_logprobs", "prompt": "messages"}


def generation_request(fields: GenerationFields, names: ModelNames) -> GenerationRequest:
    """Request that a body makes of the gateway, all but the prompt and the log-probabilities.

    Raises UnknownModel about another model than the served one, and InvalidRequest about fields that do not go
    together.
    """
    check_model(fields.model, names)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "given", "absent unless stream is true")
    sampling: dict[str, Any] = fields.model_dump(include=SAMPLING, exclude_none=True)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    sampling_parameters = SamplingParameters.checked(sampling)
    speculation = fields.speculation or SpeculationFields()
    rule = Rule(speculation.rule or Rule.MATCH)
    settings = speculation.model_dump(include=SETTING_NAMES, exclude_none=True)
    for name, value in settings.items():
        if name not in SETTINGS.get(rule, ()):
            raise InvalidRequest(f"speculation.{name}", value, f"absent under the rule {rule}")
    return GenerationRequest(
        max_tokens=fields.max_tokens,
        sampling=sampling_parameters,
        seed=fields.seed,
        stops=tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        speculation_enabled=speculation.enabled is not False,
        draft_count=speculation.draft_count if isinstance(speculation.draft_count, int) else None,
        acceptance=Acceptance.checked({"rule": rule, **settings}, "speculation."),
        drafters=_drafters(speculation),
        shape=None if speculation.shape is None else _shape(speculation.shape),
        prediction=None if fields.prediction is None else fields.prediction.text,
        sample_count=None if fields.use_beam_search else fields.n,
        beam_search=_beam_search(fields),
        banned_words=tuple(fields.banned_words or ()),
        return_rounds=bool(speculation.return_rounds),
        cache_salt=fields.cache_salt or "",
        constraint=constraint_of(fields.structured_outputs, fields.response_format),
    )


def _shape(fields: ShapeFields) -> TreeShape:
    shape = TreeShape(
        fields.max_depth, fields.max_children, tuple(fields.expansions), fields.max_width, fields.is_static
    )
    return shape.checked("speculation.shape")


def _drafters(speculation: SpeculationFields) -> tuple[str, ...]:
    """The names in either field; raises InvalidRequest about both."""
    named = speculation.drafter
    if speculation.drafters is not None:
        if named:
            raise InvalidRequest("speculation.drafters", speculation.drafters, "absent beside speculation.drafter")
        named = speculation.drafters
    if isinstance(named, list):
        return tuple(named)
    return (named,) if named else ()


def _beam_search(fields: GenerationFields) -> BeamSearch | None:
    """The search that a body asks for, with n beams; raises InvalidRequest about fields that do not go together."""
    if not fields.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if (value := getattr(fields, name)) is not None:
                raise InvalidRequest(name, value, "absent unless use_beam_search is true")
        return None
    if (fields.n or 1) < MIN_WIDTH:
        raise InvalidRequest("n", fields.n or 1, f"between {MIN_WIDTH} and {MAX_WIDTH} with use_beam_search")
    length_penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    early_stopping: EarlyStopping = "first" if fields.early_stopping is True else "heuristic"
    return BeamSearch(fields.n or 1, length_penalty, "never" if fields.early_stopping == "never" else early_stopping)


def check_model(name: str | None, names: ModelNames) -> None:
    """Raises UnknownModel about another model than the served one; an empty name is none."""
    if name and name not in names:
        raise UnknownModel(name, names.main)


def check_prompt_len(field: str, text: str, max_chars: int) -> None:
    """Raises InvalidRequest about a text that is too long to be encoded."""
    if len(text) > max_chars:
        raise InvalidRequest.too_many(field, len(text), max_chars, "characters")


def in_names_of(route: Mapping[str, str], error: OutriderError) -> OutriderError:
    """The error with the route's names of fields, the longest known beginning of each being replaced; of several
    prompts, the one at fault is numbered.
    """
    number = error.metadata.get("request")
    names = {**route, **(dict.fromkeys(("prompt", "token_ids"), f"prompt.{number}") if number else {})}

    if isinstance(error, PromptTooLong):
        error.metadata.setdefault("field", "prompt")
    return error.rename_fields(partial(renamed, names))


def renamed(names: Mapping[str, str], field: str) -> str:
    """A field's name with its longest known beginning replaced."""
    parts = field.removeprefix("sampling.").split(".")
    for count in range(len(parts), 0, -1):
        known = names.get(".".join(parts[:count]))
        if known is not None:
            return ".".join([known, *parts[count:]])
    return ".".join(parts)
