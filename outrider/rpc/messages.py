"""Between protobuf messages and plain values, with every range that types.proto states.

Sessions and sampling come first, then rules with their settings and log-probabilities, then proposals. Whether a
proposal fits the session's rule is the session's to say: a message comes before its session is looked up.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from outrider.beams import MAX_WIDTH, MIN_WIDTH, BeamStep, Candidate, LiveBeam
from outrider.errors import InvalidRequest, check_count, check_range, check_token_id, check_token_ids
from outrider.grammar import MAX_GRAMMAR_BYTES, Grammar
from outrider.parameters import (
    MAX_BANNED_LEN,
    MAX_BANNED_SEQUENCES,
    MAX_LOGPROB_COUNT,
    MAX_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TRACE_LEN,
    SETTINGS,
    Acceptance,
    DraftDistribution,
    FinishReason,
    GenerationDefaults,
    Rule,
    SamplingParameters,
    SessionSpec,
    TokenLogprob,
)
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.token_tree import MAX_CHILDREN, MAX_DEPTH, MAX_LEVEL_ROWS, TokenTree, TreeShape
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb

RULES = {
    Rule.MATCH: pb.ACCEPTANCE_RULE_MATCH,
    Rule.RATIO: pb.ACCEPTANCE_RULE_RATIO,
    Rule.BLOCK: pb.ACCEPTANCE_RULE_BLOCK,
    Rule.LENIENT: pb.ACCEPTANCE_RULE_LENIENT,
    Rule.TYPICAL: pb.ACCEPTANCE_RULE_TYPICAL,
}
RULES_BY_NUMBER = {number: rule for rule, number in RULES.items()} | {pb.ACCEPTANCE_RULE_UNSPECIFIED: Rule.MATCH}
FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
FINISH_REASONS_BY_NUMBER = {number: reason for reason, number in FINISH_REASONS.items()}
SESSION = "session."
MAX_SUPPORT = 256
MAX_WEIGHT = 65535


def fence_from(message: pb.Fence) -> Fence:
    """The fence of a request, whatever it says."""
    return Fence(message.session_id, message.epoch, message.base_len)


def write_fence(message: pb.Fence, fence: Fence) -> None:
    message.session_id, message.epoch, message.base_len = fence.session_id, fence.epoch, fence.base_len


def fence_message(fence: Fence) -> pb.Fence:
    return pb.Fence(session_id=fence.session_id, epoch=fence.epoch, base_len=fence.base_len)


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
        grammar=spec.grammar.text if spec.grammar is not None else "",
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


def steps_from(steps: Iterable[target_pb.BeamStep]) -> tuple[BeamStep, ...]:
    """The steps of a search, whatever they say."""

    def candidates(entries: Iterable[target_pb.BeamCandidate]) -> tuple[Candidate, ...]:
        return tuple(Candidate(each.parent, each.token_id, each.score) for each in entries)

    return tuple(BeamStep(candidates(step.live), candidates(step.ended)) for step in steps)


def step_message(step: BeamStep) -> target_pb.BeamStep:
    def entries(candidates: Iterable[Candidate]) -> list[target_pb.BeamCandidate]:
        return [target_pb.BeamCandidate(**each._asdict()) for each in candidates]

    return target_pb.BeamStep(live=entries(step.live), ended=entries(step.ended))


def spec_from(
    message: pb.OpenSession,
    base_len: int,
    vocabulary_size: int,
    earlier: Sequence[int] = (),
    grammar: Grammar | None = None,
) -> SessionSpec:
    """The session that a message opens, after the tokens of its OpenParts; with the grammar that it names, compiled.

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
        grammar=_grammar(message, grammar),
    )


def _grammar(message: pb.OpenSession, grammar: Grammar | None) -> Grammar | None:
    """The grammar that a session names; where nothing compiles any, none may be named."""
    if not message.grammar:
        return None
    field = SESSION + "grammar"
    check_count(field, len(message.grammar.encode()), MAX_GRAMMAR_BYTES, "bytes")
    if grammar is None:
        raise InvalidRequest(field, message.grammar, "empty for a service without a grammar engine")
    if not message.eos_token_ids and not message.stop_token_ids:
        raise InvalidRequest(field, message.grammar, "empty without a token that ends the request")
    return grammar


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


def write_times(message: pb.ComputeTimes, times: ComputeTimes) -> None:
    message.queue_us, message.compute_us = times.queue_us, times.compute_us
    message.forward_count, message.row_count = times.forward_count, times.row_count


def times_message(times: ComputeTimes) -> pb.ComputeTimes:
    message = pb.ComputeTimes()
    write_times(message, times)
    return message


def finish_reason(message: pb.FinishReason.ValueType) -> FinishReason | None:
    """Reason why a request ended, None while it goes on or for a reason of a newer protocol."""
    return FINISH_REASONS_BY_NUMBER.get(message)


def finish_reason_message(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """The reason to send; unspecified while the request goes on."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def rule_from(rule: pb.AcceptanceRule.ValueType, field: str) -> Rule:
    """The rule of a message, `match` when it names none; raises InvalidRequest about a number that is no rule."""
    if rule not in RULES_BY_NUMBER:
        raise InvalidRequest(field, rule, f"one of {', '.join(RULES)}")
    return RULES_BY_NUMBER[rule]


def rules_from(numbers: Iterable[pb.AcceptanceRule.ValueType]) -> frozenset[Rule]:
    """The rules of a list; those of a newer protocol are left out."""
    return frozenset(RULES_BY_NUMBER[number] for number in numbers if number in RULES_BY_NUMBER)


def acceptance_from(
    rule: pb.AcceptanceRule.ValueType, settings: pb.AcceptanceSettings, rule_field: str, prefix: str
) -> Acceptance:
    """A rule with its settings; raises InvalidRequest about a setting out of range or of another rule."""
    wanted = rule_from(rule, rule_field)
    values = {field.name: value for field, value in settings.ListFields()}
    for name, value in values.items():
        if name not in SETTINGS.get(wanted, ()):
            raise InvalidRequest(prefix + name, value, f"absent under the rule {wanted}")
    return Acceptance.checked({"rule": wanted, **values}, prefix)


def settings_message(acceptance: Acceptance) -> pb.AcceptanceSettings | None:
    """The settings that the rule reads; None for a rule that reads none."""
    return pb.AcceptanceSettings(**acceptance.settings) if acceptance.settings else None


def logprob_message(each: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(logprob=each.logprob, top_token_ids=each.top_token_ids, top_logprobs=each.top_logprobs)


def logprob_size(count: int, vocabulary_size: int) -> int:
    """Most bytes that an entry with `count` alternatives takes in a list of them."""
    id_bytes = -(-max(vocabulary_size - 1, 1).bit_length() // 7)
    # Nine for the number; two lists with tag and length, of which the longer may need two bytes; the entry's own.
    return 9 + (2 + count * id_bytes) + (3 + 8 * count) + 3


def logprobs_from(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs)) for message in messages
    )


def tree_from(message: pb.TokenTree, vocabulary_size: int, max_rows: int, *, with_logprobs: bool = False) -> TokenTree:
    """A proposal, the parents of a chain filled in; its log-probabilities are left out unless they are wanted.

    Raises InvalidRequest.
    """
    num_rows = len(message.token_ids)
    check_count("proposal.token_ids", num_rows, max_rows, "rows")
    # Most proposals are chains without distributions, and what is absent is not gone through.
    if message.parents:
        _check_rows("parents", len(message.parents), num_rows)
        for row, parent in enumerate(message.parents):
            check_range(f"proposal.parents.{row}", parent, 0, row)
    token_ids = check_token_ids("proposal.token_ids", message.token_ids, vocabulary_size)
    distributions: tuple[DraftDistribution, ...] = ()
    if message.distributions:
        _check_rows("distributions", len(message.distributions), num_rows)
        distributions = _distributions_from(message, token_ids, vocabulary_size)
    logprobs: tuple[float, ...] = ()
    if with_logprobs and message.logprobs:
        logprobs = tuple(message.logprobs)
        _check_rows("logprobs", len(logprobs), num_rows)
        for row, logprob in enumerate(logprobs):
            if not -math.inf < logprob <= 0:
                raise InvalidRequest(f"proposal.logprobs.{row}", logprob, "finite and at most 0")
    values: tuple[float, ...] = ()
    if message.values:
        values = tuple(message.values)
        _check_rows("values", len(values), num_rows)
        for row, value in enumerate(values):
            if not 0 < value <= 1:
                raise InvalidRequest(f"proposal.values.{row}", value, "in (0, 1]")
    return TokenTree(token_ids, tuple(message.parents[:]) or tuple(range(num_rows)), distributions, logprobs, values)


def shape_from(message: pb.TreeShape, field: str) -> TreeShape:
    """The shape of a tree that is asked for; raises InvalidRequest."""
    check_range(f"{field}.max_depth", message.max_depth, 0, MAX_DEPTH)
    check_range(f"{field}.max_children", message.max_children, 0, MAX_CHILDREN)
    check_count(f"{field}.expansions", len(message.expansions), MAX_DEPTH, "entries")
    for depth, count in enumerate(message.expansions):
        check_range(f"{field}.expansions.{depth}", count, 1, MAX_CHILDREN)
    check_range(f"{field}.max_width", message.max_width, 0, MAX_LEVEL_ROWS)
    expansions = tuple(message.expansions)
    return TreeShape(message.max_depth, message.max_children, expansions, message.max_width, message.is_static).checked(
        field
    )


def shape_message(shape: TreeShape) -> pb.TreeShape:
    return pb.TreeShape(
        max_depth=shape.max_depth,
        max_children=shape.max_children,
        expansions=shape.expansions,
        max_width=shape.max_width,
        is_static=shape.is_static,
    )


def _check_rows(name: str, num_entries: int, num_rows: int) -> None:
    if num_entries != num_rows:
        raise InvalidRequest(f"proposal.{name}", f"{num_entries} entries", f"empty or {num_rows} entries")


def _distributions_from(
    message: pb.TokenTree, token_ids: Sequence[int], vocabulary_size: int
) -> tuple[DraftDistribution, ...]:
    """Distributions that the rows' tokens were drawn from; those left out are made of the sibling's before."""
    distributions: list[DraftDistribution] = []
    siblings: dict[int, int] = {}
    for row, each in enumerate(message.distributions):
        parent = message.parents[row] if message.parents else row
        field, sibling = f"proposal.distributions.{row}", siblings.get(parent)
        if each.token_ids or each.weights:
            distribution = _distribution_from(each, field, vocabulary_size)
        elif sibling is None:
            raise InvalidRequest(f"{field}.token_ids", "empty", "filled for the first of siblings")
        else:
            distribution = distributions[sibling].without(token_ids[sibling])
        if token_ids[row] not in distribution.token_ids:
            support = f"a support of the row's token {token_ids[row]}"
            raise InvalidRequest(f"{field}.token_ids", list(distribution.token_ids), support)
        distributions.append(distribution)
        siblings[parent] = row
    return tuple(distributions)


def _distribution_from(message: pb.DraftDistribution, field: str, vocabulary_size: int) -> DraftDistribution:
    check_count(f"{field}.token_ids", len(message.token_ids), MAX_SUPPORT, "ids")
    if len(message.weights) != len(message.token_ids):
        raise InvalidRequest(f"{field}.weights", f"{len(message.weights)} entries", f"{len(message.token_ids)} entries")
    token_ids = check_token_ids(f"{field}.token_ids", message.token_ids, vocabulary_size)
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequest(f"{field}.token_ids", list(token_ids), "without repetition")
    weights = tuple(message.weights)
    # Looked at one by one only when one is at fault: a round carries hundreds.
    if weights and not 1 <= min(weights) <= max(weights) <= MAX_WEIGHT:
        for index, weight in enumerate(weights):
            check_range(f"{field}.weights.{index}", weight, 1, MAX_WEIGHT)
    return DraftDistribution(token_ids, weights)


def tree_message(tree: TokenTree, *, with_logprobs: bool = False) -> pb.TokenTree:
    """A proposal to send; a chain travels without its parents, and what a target does not read only if asked."""
    message = pb.TokenTree()
    write_tree(message, tree, with_logprobs=with_logprobs)
    return message


def write_tree(
    message: pb.TokenTree, tree: TokenTree, *, with_logprobs: bool = False, with_distributions: bool = True
) -> None:
    """Makes a new message that of `tree_message`, without distributions where no rule tests with them."""
    message.SetInParent()
    message.token_ids.extend(tree.token_ids)
    if not tree.is_chain:
        message.parents.extend(tree.parents)
    siblings: dict[int, int] = {}
    for row, each in enumerate(tree.distributions if with_distributions else ()):
        sibling = siblings.get(tree.parents[row])
        siblings[tree.parents[row]] = row
        if sibling is not None and each == tree.distributions[sibling].without(tree.token_ids[sibling]):
            message.distributions.add()
        else:
            message.distributions.add(token_ids=each.token_ids, weights=each.weights)
    if with_logprobs:
        message.logprobs.extend(tree.logprobs)
        message.values.extend(tree.values)
