"""Checks a request once, before anything is spent on it. Knows no protobuf; every limit that it breaks is named."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.tokenizer import Tokenizer
from outrider.errors import InvalidRequest, PromptTooLong, Unsupported
from outrider.parameters import MAX_STOP_TOKEN_IDS, SamplingParameters, SessionSpec

MAX_STOPS = 8
MAX_STOP_LEN = 256
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class GenerationAsk:
    """What a client wrote; None where it wrote nothing."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    speculation_enabled: bool = True
    draft_count: int | None = None
    rule: str = "match"
    drafter: str = ""
    logprob_count: int | None = None


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What the services behind the gateway can do. kv_tokens is what the target's key-value cache holds when no other
    request is in it. An empty tuple of drafters means that nobody knows them.
    """

    context_len: int
    kv_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    max_draft_count: int
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked request. draft_count None lets the gateway choose, and 0 never speculates. An empty drafter lets the
    draft service choose.
    """

    spec: SessionSpec
    stops: tuple[str, ...]
    draft_count: int | None
    drafter: str = ""


async def check_request(ask: GenerationAsk, tokenizer: Tokenizer, limits: ServingLimits) -> GenerationPlan:
    """Encodes and completes a request; raises InvalidRequest, PromptTooLong or Unsupported."""
    _check_supported(ask, limits)
    _check_stops(ask, limits)
    _check_range("max_tokens", ask.max_tokens, 1, 2**31 - 1)
    _check_range("speculation.draft_count", ask.draft_count, 0, limits.max_draft_count)
    _check_range("seed", ask.seed, -(2**63), 2**63 - 1)
    for token_id in ask.sampling.logit_bias:
        _check_token_id("sampling.logit_bias key", token_id, limits)
    prompt = await _prompt(ask, tokenizer, limits)
    max_tokens = _max_tokens(ask, len(prompt), limits)
    _check_range("sampling.min_tokens", ask.sampling.min_tokens, 0, max_tokens)
    spec = SessionSpec(
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=ask.sampling,
        seed=secrets.randbits(63) if ask.seed is None else ask.seed,
        max_len=len(prompt) + max_tokens,
        eos_token_ids=frozenset() if ask.sampling.ignore_eos else limits.eos_token_ids,
        stop_token_ids=frozenset(ask.stop_token_ids),
    )
    return GenerationPlan(spec, ask.stops, ask.draft_count if ask.speculation_enabled else 0, ask.drafter)


def _check_supported(ask: GenerationAsk, limits: ServingLimits) -> None:
    if ask.rule != "match":
        raise Unsupported(f"speculation.rule {ask.rule} is not served yet; only match is", field="speculation.rule")
    if ask.logprob_count is not None:
        raise Unsupported("logprob_count is not served yet and must be absent", field="logprob_count")
    if ask.drafter and limits.drafters and ask.drafter not in limits.drafters:
        raise InvalidRequest("speculation.drafter", ask.drafter, f"one of {', '.join(limits.drafters)}, or empty")


def _check_stops(ask: GenerationAsk, limits: ServingLimits) -> None:
    if len(ask.stops) > MAX_STOPS:
        raise InvalidRequest.too_many("stop", len(ask.stops), MAX_STOPS, "strings")
    for index, stop in enumerate(ask.stops):
        if not 1 <= len(stop) <= MAX_STOP_LEN:
            raise InvalidRequest(f"stop.{index}", stop, f"of 1 to {MAX_STOP_LEN} characters")
    if len(ask.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest.too_many("stop_token_ids", len(ask.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    _check_token_ids("stop_token_ids", ask.stop_token_ids, limits)


async def _prompt(ask: GenerationAsk, tokenizer: Tokenizer, limits: ServingLimits) -> tuple[int, ...]:
    if (ask.text is None) == (ask.token_ids is None):
        raise InvalidRequest("prompt", "absent" if ask.text is None else "both", "exactly one of text and token_ids")
    if ask.token_ids is not None:
        _check_token_ids("token_ids", ask.token_ids, limits)
    prompt = await tokenizer.encode(ask.text) if ask.text is not None else ask.token_ids
    if not prompt:
        raise InvalidRequest("prompt", ask.text if ask.text is not None else [], "at least one token long")
    return prompt


def _max_tokens(ask: GenerationAsk, prompt_len: int, limits: ServingLimits) -> int:
    """The output's limit; prompt and output must fit together into the target's context and into its cache."""
    is_context = limits.context_len <= limits.kv_tokens
    size = limits.context_len if is_context else limits.kv_tokens
    place = f"the {'context' if is_context else 'key-value cache'} of {size} tokens"
    facts = {"prompt_tokens": prompt_len, "context_len" if is_context else "kv_tokens": size}
    room = size - prompt_len
    if ask.max_tokens is None and room < 1:
        raise PromptTooLong(f"the prompt has {prompt_len} tokens, but must leave room for one more in {place}", **facts)
    wanted = min(DEFAULT_MAX_TOKENS, room) if ask.max_tokens is None else ask.max_tokens
    if wanted > room:
        message = f"a prompt of {prompt_len} tokens and max_tokens {wanted} do not fit into {place}"
        raise PromptTooLong(message, max_tokens=wanted, **facts)
    return wanted


def _check_range(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidRequest(name, value, f"between {least} and {most}")


def _check_token_ids(name: str, token_ids: Iterable[int], limits: ServingLimits) -> None:
    for index, token_id in enumerate(token_ids):
        _check_token_id(f"{name}.{index}", token_id, limits)


def _check_token_id(name: str, token_id: int, limits: ServingLimits) -> None:
    if not 0 <= token_id < limits.vocabulary_size:
        raise InvalidRequest(name, token_id, f"a token id between 0 and {limits.vocabulary_size - 1}")
