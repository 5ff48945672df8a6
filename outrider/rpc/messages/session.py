"""Sessions between protobuf messages and plain values: what opens one, with its sampling, and the beams of a search."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from outrider.beams import MAX_WIDTH, MIN_WIDTH, LiveBeam
from outrider.constraint import MAX_GRAMMAR_BYTES
from outrider.errors import InvalidRequest, check_count, check_range, check_token_id, check_token_ids
from outrider.parameters import (
    MAX_BANNED_LEN,
    MAX_BANNED_SEQUENCES,
    MAX_LOGPROB_COUNT,
    MAX_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TRACE_LEN,
    GenerationDefaults,
    Rule,
    SamplingParameters,
    SessionSpec,
)
from outrider.rpc.messages.rules import RULES, acceptance_from, settings_message
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2 as pb

SESSION = "session."


def sampling_from(message: pb.SamplingParameters, prefix: str = "sampling.") -> SamplingParameters:
    """The parameters, with defaults for absent fields. Raises InvalidRequest naming the field after the prefix."""
    values = {field.name: value for field, value in message.ListFields() if field.name != "logit_bias"}
    return SamplingParameters.checked({**values, "logit_bias": dict(message.logit_bias)}, prefix)


def sampling_message(sampling: SamplingParameters) -> pb.SamplingParameters:
    """Message of sampling parameters, with every field set."""
    return pb.SamplingParameters(**sampling.model_dump())


def defaults_from(message: model_pb.GenerationDefaults) -> GenerationDefaults:
    """Defaults that a model recommends; raises InvalidRequest."""
    values = {field.name: value for field, value in message.ListFields()}
    return GenerationDefaults.checked(values, "generation_defaults.")


def open_message(spec: SessionSpec, token_ids: Sequence[int]) -> pb.OpenSession:
    """Message that opens a session whose committed tokens are `token_ids`; those of the spec are only the prompt."""
    return pb.OpenSession(
        token_ids=token_ids,
        prompt_len=spec.prompt_len,
        sampling=sampling_message(spec.sampling),
        seed=spec.seed,
        rule=RULES[spec.acceptance.rule],
        max_len=spec.max_len,
        eos_token_ids=sorted(spec.eos_token_ids),
        stop_token_ids=sorted(spec.stop_token_ids),
        logprob_count=spec.logprob_count,
        prompt_logprobs=spec.prompt_logprobs,
        banned_sequences=[pb.TokenIds(token_ids=sequence) for sequence in spec.banned],
        acceptance=settings_message(spec.acceptance),
        draft_logprobs=spec.draft_logprobs,
        cache_salt=spec.cache_salt,
        trace_context=dict(spec.trace_context),
        grammar=spec.grammar,
        unrecorded=spec.unrecorded,
    )


def live_beams_message(width: int, live: Iterable[LiveBeam]) -> pb.LiveBeams:
    """Message of the live beams of a search."""
    beams = [pb.LiveBeam(token_ids=beam.token_ids, score=beam.score) for beam in live]
    return pb.LiveBeams(width=width, beams=beams)


def live_beams_from(message: pb.LiveBeams, field: str, vocabulary_size: int) -> tuple[LiveBeam, ...]:
    """The live beams of a search, all of one length; raises InvalidRequest."""
    check_range(f"{field}.width", message.width, MIN_WIDTH, MAX_WIDTH)
    check_count(f"{field}.beams", len(message.beams), message.width, "beams")
    lengths = {len(beam.token_ids) for beam in message.beams}
    if len(lengths) > 1 or 0 in lengths:
        raise InvalidRequest(f"{field}.beams", f"of {sorted(lengths)} tokens", "all of one length, at least 1")
    for place, beam in enumerate(message.beams):
        if not math.isfinite(beam.score):
            raise InvalidRequest(f"{field}.beams.{place}.score", beam.score, "finite")
    return tuple(
        LiveBeam(check_token_ids(f"{field}.beams.{place}", beam.token_ids, vocabulary_size), beam.score)
        for place, beam in enumerate(message.beams)
    )


def search_spec_from(
    message: pb.OpenSession, live: Sequence[LiveBeam], base_len: int, vocabulary_size: int, earlier: Sequence[int]
) -> SessionSpec:
    """The session of a beam search, whose tokens are the prompt; base_len counts those of its beams too.

    Raises InvalidRequest as `spec_from` does, and about what a search cannot be combined with.
    """
    output_len = len(live[0].token_ids) if live else 0
    spec = spec_from(message, base_len - output_len, vocabulary_size, earlier)
    check_range(SESSION + "prompt_len", spec.prompt_len, len(spec.token_ids), len(spec.token_ids))
    check_range(SESSION + "max_len", spec.max_len, base_len + 1, 2**31 - 1)
    sampling = spec.sampling
    if spec.acceptance.rule is not Rule.MATCH:
        raise InvalidRequest(SESSION + "rule", spec.acceptance.rule, "match for a beam search")
    if sampling.temperature != 1 or sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        raise InvalidRequest(SESSION + "sampling", "a temperature or cuts", "without these for a beam search")
    if spec.logprob_count is not None:
        raise InvalidRequest(SESSION + "logprob_count", spec.logprob_count, "absent for a beam search")
    if message.grammar:
        raise InvalidRequest(SESSION + "grammar", message.grammar, "empty for a beam search")
    return spec


def spec_from(
    message: pb.OpenSession,
    base_len: int,
    vocabulary_size: int,
    earlier: Sequence[int] = (),
    *,
    is_compiled: bool = False,
) -> SessionSpec:
    """The session that a message opens, after the tokens of its OpenParts; a grammar that it names must be compiled.

    Raises InvalidRequest.
    Whether max_len fits into a context is left to the service: a draft may have a shorter one than the request.
    """
    token_ids = (*earlier, *message.token_ids)
    if len(token_ids) != base_len:
        raise InvalidRequest(SESSION + "token_ids", f"{len(token_ids)} tokens", f"base_len {base_len} tokens")
    check_range(SESSION + "prompt_len", message.prompt_len, 1, base_len)
    check_range(SESSION + "max_len", message.max_len, base_len + 1, 2**31 - 1)
    # Before anything is made of them: a list may fill a message.
    # Those of a request, and those that its stop strings name.
    num_stops = MAX_STOP_TOKEN_IDS + MAX_STOPS
    for name, maximum in (("stop_token_ids", num_stops), ("eos_token_ids", vocabulary_size)):
        check_count(SESSION + name, len(getattr(message, name)), maximum, "ids")
    check_count(SESSION + "cache_salt", len(message.cache_salt), MAX_SALT_BYTES, "bytes")
    trace_context = tuple(message.trace_context.items())
    check_count(SESSION + "trace_context", sum(map(len, chain(*trace_context))), MAX_TRACE_LEN, "characters")
    sampling = sampling_from(message.sampling, SESSION + "sampling.")
    for token_id in sampling.logit_bias:
        check_token_id(SESSION + "sampling.logit_bias key", token_id, vocabulary_size)
    check_range(SESSION + "sampling.min_tokens", sampling.min_tokens, 0, message.max_len - message.prompt_len)
    if sampling.ignore_eos and message.eos_token_ids:
        raise InvalidRequest(SESSION + "eos_token_ids", list(message.eos_token_ids), "empty under sampling.ignore_eos")
    logprob_count = None
    if message.HasField("logprob_count"):
        logprob_count = check_range(SESSION + "logprob_count", message.logprob_count, 0, MAX_LOGPROB_COUNT)
    elif message.prompt_logprobs:
        raise InvalidRequest(SESSION + "prompt_logprobs", True, "false without logprob_count")
    return SessionSpec(
        token_ids=check_token_ids(SESSION + "token_ids", token_ids, vocabulary_size),
        prompt_len=message.prompt_len,
        sampling=sampling,
        seed=message.seed,
        max_len=message.max_len,
        eos_token_ids=frozenset(check_token_ids(SESSION + "eos_token_ids", message.eos_token_ids, vocabulary_size)),
        stop_token_ids=frozenset(check_token_ids(SESSION + "stop_token_ids", message.stop_token_ids, vocabulary_size)),
        acceptance=acceptance_from(message.rule, message.acceptance, SESSION + "rule", SESSION + "acceptance."),
        banned=_banned(message, vocabulary_size),
        logprob_count=logprob_count,
        prompt_logprobs=message.prompt_logprobs,
        draft_logprobs=message.draft_logprobs,
        cache_salt=message.cache_salt,
        trace_context=trace_context,
        grammar=_grammar(message, is_compiled=is_compiled),
        unrecorded=message.unrecorded,
    )


def _grammar(message: pb.OpenSession, *, is_compiled: bool) -> str:
    """The grammar that a session names; where nothing compiles any, none may be named."""
    text, field = message.grammar, SESSION + "grammar"
    check_count(field, len(text.encode()), MAX_GRAMMAR_BYTES, "bytes")
    if text and not is_compiled:
        raise InvalidRequest(field, text, "empty for a service without a grammar engine")
    if text and not message.eos_token_ids and not message.stop_token_ids:
        raise InvalidRequest(field, text, "empty without a token that ends the request")
    return text


def _banned(message: pb.OpenSession, vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
    field = SESSION + "banned_sequences"
    check_count(field, len(message.banned_sequences), MAX_BANNED_SEQUENCES, "sequences")
    for index, sequence in enumerate(message.banned_sequences):
        if not 1 <= (count := len(sequence.token_ids)) <= MAX_BANNED_LEN:
            raise InvalidRequest(f"{field}.{index}", f"{count} ids", f"1 to {MAX_BANNED_LEN} ids long")
    return tuple(
        check_token_ids(f"{field}.{index}", sequence.token_ids, vocabulary_size)
        for index, sequence in enumerate(message.banned_sequences)
    )
