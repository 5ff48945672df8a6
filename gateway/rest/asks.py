"""From a checked body to what the gateway is asked for, and the gateway's errors back in the body's own names.

Knows no HTTP and no generation.
"""

import re
from collections.abc import Mapping
from typing import Any

from gateway.generation.request import GenerationRequest
from gateway.rest.errors import UnknownModel
from gateway.rest.fields import GenerationFields, Speculation
from gateway.rest.findings import shown
from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.parameters import SETTINGS, Acceptance, Rule, SamplingParameters

SAMPLING = set(SamplingParameters.model_fields)
SETTING_NAMES = {name for names in SETTINGS.values() for name in names}
# The gateway's names of fields, and those of each route.
COMMON_NAMES = {"sample_count": "n", "sampling.": ""}
TEXT_NAMES = {**COMMON_NAMES, "logprob_count": "logprobs", "token_ids": "prompt"}
CHAT_NAMES = {**COMMON_NAMES, "logprob_count": "top_logprobs", "prompt": "messages"}


def ask_of(fields: GenerationFields) -> GenerationRequest:
    """All but the prompt and the log-probabilities; raises InvalidRequest about fields that do not go together."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "given", "absent unless stream is true")
    speculation = fields.speculation or Speculation()
    return GenerationRequest(
        max_tokens=fields.max_tokens,
        sampling=_sampling(fields),
        seed=fields.seed,
        stops=tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        speculation_enabled=speculation.enabled is not False,
        draft_count=speculation.draft_count if isinstance(speculation.draft_count, int) else None,
        acceptance=_acceptance(speculation),
        drafter=speculation.drafter or "",
        sample_count=fields.n,
        banned_words=tuple(fields.banned_words or ()),
        return_rounds=bool(speculation.return_rounds),
        cache_salt=fields.cache_salt or "",
    )


def check_model(fields: GenerationFields, served: str) -> None:
    """Raises UnknownModel when the body names another model than the served one."""
    if fields.model is not None and fields.model != served:
        raise unknown_model(fields.model, served)


def unknown_model(name: str, served: str) -> UnknownModel:
    """The error about a model that is not the served one."""
    return UnknownModel(f"The model {shown(name)} is not served here, only {served!r} is", field="model", value=name)


def check_prompt_len(field: str, text: str, most: int) -> None:
    """Raises InvalidRequest about a text that is too long to be encoded."""
    if len(text) > most:
        raise InvalidRequest.too_many(field, len(text), most, "characters")


def renamed(error: OutriderError, names: Mapping[str, str]) -> OutriderError:
    """The error with the route's names of fields, in the field and in the limit, and not in the value.

    Of several prompts, one that is at fault is named with its number.
    """
    if "request" in error.metadata:
        names = {**names, **dict.fromkeys(("prompt", "token_ids"), f"prompt.{error.metadata['request']}")}
    if isinstance(error, PromptTooLong):
        return PromptTooLong(error.message, **{"field": names.get("prompt", "prompt"), **error.metadata})
    if not isinstance(error, InvalidRequest):
        return error
    field, limit = error.metadata["field"], error.metadata["limit"]
    told = {"field": _translated(field, names), "limit": _translated(limit, names)}
    between = error.message.removeprefix(field).removesuffix(limit)
    ending = told["limit"] if error.message.endswith(limit) else ""
    changed = InvalidRequest.__new__(InvalidRequest)
    OutriderError.__init__(changed, told["field"] + between + ending, **{**error.metadata, **told})
    return changed


def _translated(text: str, names: Mapping[str, str]) -> str:
    pattern = "|".join(rf"\b{re.escape(name)}" for name in names)
    return re.sub(pattern, lambda found: names[found[0]], text)


def _sampling(fields: GenerationFields) -> SamplingParameters:
    given: dict[str, Any] = fields.model_dump(include=SAMPLING, exclude_none=True)
    if "logit_bias" in given:
        given["logit_bias"] = {int(key): bias for key, bias in given["logit_bias"].items()}
    return SamplingParameters.checked(given)


def _acceptance(speculation: Speculation) -> Acceptance:
    rule = Rule(speculation.rule or Rule.MATCH)
    given = speculation.model_dump(include=SETTING_NAMES, exclude_none=True)
    for name, value in given.items():
        if name not in SETTINGS.get(rule, ()):
            raise InvalidRequest(f"speculation.{name}", value, f"absent under the rule {rule}")
    return Acceptance.checked({"rule": rule, **given}, "speculation.")
