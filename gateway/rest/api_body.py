"""What the page asks for, as a strict model, and as a request of the gateway. Spends nothing.

The names are those of /v1/completions. A seed may be a string of digits, because 64 bits do not fit into a number of
JavaScript.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gateway.generation.request import GenerationRequest
from outrider.errors import InvalidRequest
from outrider.parameters import Acceptance, Parameters, Rule, SamplingParameters

SEED = re.compile(r"-?[0-9]{1,19}")
AUTO = "auto"


class SpeculationBody(Parameters):
    """Whether and how to speculate."""

    enabled: bool = True
    draft_count: int | str = AUTO
    rule: Annotated[Rule, Field(strict=False)] = Rule.MATCH
    drafter: str = ""
    return_rounds: bool = False


class GenerateBody(Parameters):
    """The body of /api/generate; ranges are checked with the request itself."""

    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | str | None = None
    stop: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    cache_salt: str = ""
    probabilities: bool = False
    speculation: SpeculationBody = Field(default_factory=SpeculationBody)


def ask_from(values: object) -> GenerationRequest:
    """A request from the JSON of a body. Raises InvalidRequest that names the field."""
    if not isinstance(values, Mapping):
        raise InvalidRequest("body", values, "a JSON object")
    body = GenerateBody.checked({str(name): value for name, value in values.items()})
    speculation = body.speculation
    return GenerationRequest(
        text=body.prompt,
        max_tokens=body.max_tokens,
        sampling=_sampling(body),
        seed=_seed(body.seed),
        stops=tuple(body.stop),
        speculation_enabled=speculation.enabled,
        draft_count=_draft_count(speculation.draft_count),
        acceptance=Acceptance(rule=speculation.rule),
        drafter=speculation.drafter,
        logprob_count=0 if body.probabilities else None,
        return_rounds=speculation.return_rounds,
        cache_salt=body.cache_salt,
    )


def _sampling(body: GenerateBody) -> SamplingParameters:
    given: dict[str, Any] = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return SamplingParameters.checked({name: value for name, value in given.items() if value is not None})


def _seed(seed: int | str | None) -> int | None:
    if not isinstance(seed, str):
        return seed
    if not SEED.fullmatch(seed):
        raise InvalidRequest("seed", seed, "a whole number of 64 bits")
    return int(seed)


def _draft_count(draft_count: int | str) -> int | None:
    if draft_count == AUTO:
        return None
    if isinstance(draft_count, str):
        raise InvalidRequest("speculation.draft_count", draft_count, f"a whole number or {AUTO!r}")
    return draft_count
