"""A request as its client wrote it, and checked once, before anything is spent on it; a broken limit is named."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from gateway.sessions.link import ModelInfo
from gateway.text.tokenizer import Tokenizer
from outrider.beams import BeamSearch, cache_tokens
from outrider.errors import Field, InvalidRequest, PromptTooLong, check_count
from outrider.parameters import (
    MAX_BANNED_LEN,
    MAX_LOGPROB_COUNT,
    MAX_SALT_BYTES,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    Acceptance,
    Rule,
    SamplingParameters,
    SessionSpec,
)
from outrider.rpc.channels import MAX_MESSAGE_BYTES

MAX_STOPS = 8
MAX_STRING_LEN = 256
MAX_BANNED_WORDS = 64
# Bytes of a token of an echoed prompt in a message, text and number, and of each alternative beside it; at most.
ECHO_TOKEN_BYTES, ECHO_LOGPROB_BYTES = 192, 13
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class GenerationRequest:
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
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafter: str = ""
    logprob_count: int | None = None
    sample_count: int | None = None
    banned_words: tuple[str, ...] = ()
    echo: bool = False
    return_rounds: bool = False
    cache_salt: str = ""
    beam_search: BeamSearch | None = None
    add_special_tokens: bool = True
    """Whether text gets the tokenizer's special tokens; a rendered chat template has them already."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request. draft_count None lets the gateway choose, and 0 never speculates. An empty drafter lets the
    draft service choose.
    """

    spec: SessionSpec
    stops: tuple[str, ...]
    draft_count: int | None
    drafter: str = ""
    sample_count: int = 1
    sample_index: int = 0
    beam_search: BeamSearch | None = None
    """Makes all samples."""

    @property
    def num_runs(self) -> int:
        """How often it is decoded: once for each sample, or for all beams."""
        return 1 if self.beam_search else self.sample_count

    def sample(self, index: int) -> Self:
        """One of its samples, with a seed of its own. Only the first reads the prompt's log-probabilities."""
        prompt_logprobs = self.spec.prompt_logprobs and index == 0
        spec = replace(self.spec, seed=sample_seed(self.spec.seed, index), prompt_logprobs=prompt_logprobs)
        return replace(self, spec=spec, sample_index=index)


async def check_request(
    request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo, drafters: Mapping[str, frozenset[Rule]]
) -> CheckedRequest:
    """Encodes and completes a request by what the services can do; raises InvalidRequest or PromptTooLong.

    `drafters` are the draft's, each with the rules that it can serve; none at all means that nobody knows them.
    """
    _check_drafter(request, drafters)
    if request.beam_search is not None:
        _check_beams(request, target)
    _check_strings("stop", request.stops, MAX_STOPS)
    check_count("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    _check_token_ids("stop_token_ids", request.stop_token_ids, target)
    _check_strings("banned_words", request.banned_words, MAX_BANNED_WORDS)
    _check_range("sample_count", request.sample_count, 1, MAX_SAMPLES)
    _check_range("logprob_count", request.logprob_count, 0, MAX_LOGPROB_COUNT)
    if request.echo and request.logprob_count is None:
        raise InvalidRequest("echo", True, "false without logprob_count")
    _check_range("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _check_range("speculation.draft_count", request.draft_count, 0, target.max_draft_count)
    _check_range("seed", request.seed, -(2**63), 2**63 - 1)
    for token_id in request.sampling.logit_bias:
        _check_token_id("sampling.logit_bias key", token_id, target)
    prompt = await _prompt(request, tokenizer, target)
    _check_echo(request, len(prompt))
    max_tokens = _max_tokens(request, len(prompt), target)
    sampling, beams = request.sampling, request.beam_search
    if beams is not None:
        _check_beam_room(len(prompt), max_tokens, beams.width, target)
        # What a search adds up are log-probabilities as they are.
        sampling = sampling.model_copy(update={"temperature": 1.0})
    _check_range("sampling.min_tokens", request.sampling.min_tokens, 0, max_tokens)
    banned = await _banned(request.banned_words, tokenizer)
    cache_salt = request.cache_salt.encode()
    if len(cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", request.cache_salt, f"of at most {MAX_SALT_BYTES} bytes in UTF-8")
    spec = SessionSpec(
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=sampling,
        # In 53 bits, so that a client in JavaScript, where numbers are floats, can send back what it was told.
        seed=secrets.randbits(53) if request.seed is None else request.seed,
        max_len=len(prompt) + max_tokens,
        eos_token_ids=frozenset() if request.sampling.ignore_eos else target.eos_token_ids,
        stop_token_ids=frozenset(request.stop_token_ids),
        acceptance=request.acceptance,
        banned=banned,
        logprob_count=request.logprob_count,
        prompt_logprobs=request.echo,
        draft_logprobs=request.return_rounds,
        cache_salt=cache_salt,
    )
    draft_count = request.draft_count if request.speculation_enabled else 0
    sample_count = (request.sample_count or 1) if beams is None else beams.width
    return CheckedRequest(spec, request.stops, draft_count, request.drafter, sample_count, beam_search=beams)


def _check_beams(request: GenerationRequest, target: ModelInfo) -> None:
    """Raises InvalidRequest about what a search cannot be combined with."""
    sampling, neutral = request.sampling, SamplingParameters()
    if "temperature" in sampling.model_fields_set and sampling.temperature:
        raise InvalidRequest("sampling.temperature", sampling.temperature, ("0 or absent with ", Field("beam_search")))
    wanted: dict[str, object] = {
        f"sampling.{name}": getattr(sampling, name)
        for name in ("top_k", "top_p", "min_p")
        if getattr(sampling, name) != getattr(neutral, name)
    }
    wanted |= {
        "stop": request.stops,
        "sample_count": request.sample_count,
        "logprob_count": request.logprob_count,
        "speculation.return_rounds": request.return_rounds,
        "speculation.drafter": request.drafter if request.drafter in target.drafters else "",
    }
    for name, value in wanted.items():
        if value is not None and value not in ((), "", False):
            raise InvalidRequest(name, value, ("absent with ", Field("beam_search")))
    if request.acceptance.rule is not Rule.MATCH:
        raise InvalidRequest("speculation.rule", request.acceptance.rule, ("match with ", Field("beam_search")))


def _check_beam_room(prompt_len: int, max_tokens: int, width: int, target: ModelInfo) -> None:
    needed = cache_tokens(prompt_len, prompt_len + max_tokens, width)
    if needed > target.kv_tokens:
        message = (
            f"{width} beams of ",
            Field("max_tokens"),
            f" {max_tokens} behind a prompt of {prompt_len} tokens may need {needed} tokens of the key-value cache, "
            f"which has {target.kv_tokens}",
        )
        raise PromptTooLong(message, max_tokens=max_tokens, prompt_tokens=prompt_len, kv_tokens=target.kv_tokens)


def _check_drafter(request: GenerationRequest, drafters: Mapping[str, frozenset[Rule]]) -> None:
    if not request.drafter or not drafters:
        return
    if request.drafter not in drafters:
        raise InvalidRequest("speculation.drafter", request.drafter, f"one of {', '.join(drafters)}, or empty")
    rule = request.acceptance.rule
    if rule not in drafters[request.drafter]:
        fitting = ", ".join(name for name, rules in drafters.items() if rule in rules)
        raise InvalidRequest("speculation.drafter", request.drafter, f"one that serves the rule {rule}: {fitting}")


def _check_echo(request: GenerationRequest, prompt_len: int) -> None:
    """The prompt's tokens come in one message, which clients take up to a size only."""
    token_bytes = ECHO_TOKEN_BYTES + ECHO_LOGPROB_BYTES * (request.logprob_count or 0)
    if request.echo and prompt_len * token_bytes > MAX_MESSAGE_BYTES:
        limit = (
            f"false for a prompt of {prompt_len} tokens with ",
            Field("logprob_count"),
            f" {request.logprob_count}: at most {MAX_MESSAGE_BYTES // token_bytes}",
        )
        raise InvalidRequest("echo", True, limit)


def _check_strings(name: str, strings: Sequence[str], maximum: int) -> None:
    check_count(name, len(strings), maximum, "strings")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STRING_LEN:
            raise InvalidRequest(f"{name}.{index}", string, f"of 1 to {MAX_STRING_LEN} characters")


async def _banned(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The usual token sequences of words that must not occur: as they begin a text, and as they go on in one."""
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word, f" {word}"):
            sequence = await tokenizer.encode(text, special=False)
            if len(sequence) > MAX_BANNED_LEN:
                raise InvalidRequest(f"banned_words.{index}", word, f"of at most {MAX_BANNED_LEN} tokens")
            if sequence:
                sequences[sequence] = None
    return tuple(sequences)


async def _prompt(request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo) -> tuple[int, ...]:
    if (request.text is None) == (request.token_ids is None):
        given = "absent" if request.text is None else "both"
        raise InvalidRequest("prompt", given, "exactly one of text and token_ids")
    if request.token_ids is not None:
        # First, because to look at each of a million ids would be felt by other requests.
        _max_tokens(request, len(request.token_ids), target)
        _check_token_ids("token_ids", request.token_ids, target)
    prompt = request.token_ids
    if request.text is not None:
        prompt = await tokenizer.encode(request.text, special=request.add_special_tokens)
    if not prompt:
        raise InvalidRequest("prompt", request.text if request.text is not None else [], "at least one token long")
    return prompt


def _max_tokens(request: GenerationRequest, prompt_len: int, target: ModelInfo) -> int:
    """The output's limit; prompt and output must fit together into the target's context and into its cache."""
    is_context = target.context_len <= target.kv_tokens
    size = target.context_len if is_context else target.kv_tokens
    place = f"the {'context' if is_context else 'key-value cache'} of {size} tokens"
    facts = {"prompt_tokens": prompt_len, "context_len" if is_context else "kv_tokens": size}
    room = size - prompt_len
    if request.max_tokens is None and room < 1:
        raise PromptTooLong(f"the prompt has {prompt_len} tokens, but must leave room for one more in {place}", **facts)
    wanted = min(DEFAULT_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens
    if wanted > room:
        message = (f"a prompt of {prompt_len} tokens and ", Field("max_tokens"), f" {wanted} do not fit into {place}")
        raise PromptTooLong(message, max_tokens=wanted, **facts)
    return wanted


def _check_range(name: str, value: int | None, minimum: int, maximum: int) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise InvalidRequest(name, value, f"between {minimum} and {maximum}")


def _check_token_ids(name: str, token_ids: Iterable[int], target: ModelInfo) -> None:
    for index, token_id in enumerate(token_ids):
        _check_token_id(f"{name}.{index}", token_id, target)


def _check_token_id(name: str, token_id: int, target: ModelInfo) -> None:
    if not 0 <= token_id < target.vocabulary_size:
        raise InvalidRequest(name, token_id, f"a token id between 0 and {target.vocabulary_size - 1}")


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample; the first has the request's own, the others one of 53 bits, which JavaScript can repeat.

    Far apart for neighbouring seeds and indices, so that no sample of one request is a sample of another.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 11
