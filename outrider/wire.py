"""Between messages and plain values. Checks every range that types.proto states; knows no model and no session."""

from collections.abc import Iterable
from typing import Protocol

from outrider.compute_times import ComputeTimes
from outrider.errors import InvalidRequest, Unsupported
from outrider.fencing import Fence, check_fence
from outrider.parameters import MAX_STOP_TOKEN_IDS, FinishReason, SamplingParameters, SessionSpec
from outrider.v1 import types_pb2 as pb

SESSION = "session."

FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
RULES = {pb.ACCEPTANCE_RULE_UNSPECIFIED: "match", pb.ACCEPTANCE_RULE_MATCH: "match"}
RULE_NAMES = {pb.ACCEPTANCE_RULE_RATIO: "ratio", pb.ACCEPTANCE_RULE_BLOCK: "block"}


class Tree(Protocol):
    """A proposal, whatever class it has where it was made; parents may be empty for a chain."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Draft token of each row."""
        ...

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of each row, 0 for the root."""
        ...


def fence_from(message: pb.Fence, context_len: int) -> Fence:
    """The fence of a request; raises InvalidRequest."""
    if message.instance_id:
        raise InvalidRequest("fence.instance_id", message.instance_id, "0 in a request")
    return check_fence(Fence(message.session_id, message.epoch, message.base_len), context_len)


def fence_message(fence: Fence, instance_id: int = 0) -> pb.Fence:
    """A fence to send; the instance id is a server's, and 0 in requests."""
    return pb.Fence(session_id=fence.session_id, epoch=fence.epoch, base_len=fence.base_len, instance_id=instance_id)


def sampling_from(message: pb.SamplingParameters, prefix: str = "sampling.") -> SamplingParameters:
    """The parameters, with defaults for absent fields. Raises InvalidRequest naming the field behind the prefix."""
    values = {field.name: value for field, value in message.ListFields() if field.name != "logit_bias"}
    return SamplingParameters.checked({**values, "logit_bias": dict(message.logit_bias)}, prefix)


def sampling_message(sampling: SamplingParameters) -> pb.SamplingParameters:
    """The message with every field set."""
    return pb.SamplingParameters(**sampling.model_dump())


def rule_from(rule: pb.AcceptanceRule.ValueType, field: str) -> str:
    """Name of an acceptance rule; raises Unsupported unless it is `match`."""
    if rule not in RULES:
        name = RULE_NAMES.get(rule, str(rule))
        raise Unsupported(f"{field} {name} is not served yet; only match is", field=field, value=name)
    return RULES[rule]


def open_message(spec: SessionSpec, token_ids: Iterable[int]) -> pb.OpenSession:
    """What opens a session whose committed tokens are `token_ids`; those of the spec are only the prompt."""
    return pb.OpenSession(
        token_ids=token_ids,
        prompt_len=spec.prompt_len,
        sampling=sampling_message(spec.sampling),
        seed=spec.seed,
        rule=pb.ACCEPTANCE_RULE_MATCH,
        max_len=spec.max_len,
        eos_token_ids=sorted(spec.eos_token_ids),
        stop_token_ids=sorted(spec.stop_token_ids),
    )


def spec_from(message: pb.OpenSession, base_len: int, vocabulary_size: int) -> SessionSpec:
    """The session that a message opens. Raises InvalidRequest and Unsupported.

    Whether max_len fits into a context is left to the service: a draft may have a shorter one than the request.
    """
    rule_from(message.rule, SESSION + "rule")
    if message.HasField("logprob_count"):
        raise Unsupported(
            f"{SESSION}logprob_count is not served yet and must be absent", field=SESSION + "logprob_count"
        )
    if len(message.token_ids) != base_len:
        raise InvalidRequest(SESSION + "token_ids", f"{len(message.token_ids)} tokens", f"base_len {base_len} tokens")
    check_range(SESSION + "prompt_len", message.prompt_len, 1, base_len)
    check_range(SESSION + "max_len", message.max_len, base_len + 1, 2**31 - 1)
    # Before anything is made of them: a list may fill a message.
    for name, most in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("eos_token_ids", vocabulary_size)):
        if len(getattr(message, name)) > most:
            raise InvalidRequest.too_many(SESSION + name, len(getattr(message, name)), most, "ids")
    sampling = _session_sampling(message, vocabulary_size)
    return SessionSpec(
        token_ids=check_token_ids(SESSION + "token_ids", message.token_ids, vocabulary_size),
        prompt_len=message.prompt_len,
        sampling=sampling,
        seed=message.seed,
        max_len=message.max_len,
        eos_token_ids=frozenset(check_token_ids(SESSION + "eos_token_ids", message.eos_token_ids, vocabulary_size)),
        stop_token_ids=frozenset(check_token_ids(SESSION + "stop_token_ids", message.stop_token_ids, vocabulary_size)),
    )


def _session_sampling(message: pb.OpenSession, vocabulary_size: int) -> SamplingParameters:
    """The sampling parameters, which must fit the vocabulary, the request's length and its EOS ids."""
    sampling = sampling_from(message.sampling, SESSION + "sampling.")
    for token_id in sampling.logit_bias:
        check_token_id(SESSION + "sampling.logit_bias key", token_id, vocabulary_size)
    check_range(SESSION + "sampling.min_tokens", sampling.min_tokens, 0, message.max_len - message.prompt_len)
    if sampling.ignore_eos and message.eos_token_ids:
        raise InvalidRequest(SESSION + "eos_token_ids", list(message.eos_token_ids), "empty under sampling.ignore_eos")
    return sampling


def tree_from(message: pb.TokenTree, vocabulary_size: int, max_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids and parents of a proposal, the parents of a chain filled in. Raises InvalidRequest."""
    num_rows = len(message.token_ids)
    if num_rows > max_rows:
        raise InvalidRequest.too_many("proposal.token_ids", num_rows, max_rows, "rows")
    if message.distributions:
        raise InvalidRequest("proposal.distributions", f"{len(message.distributions)} entries", "empty under match")
    if len(message.parents) not in {0, num_rows}:
        raise InvalidRequest("proposal.parents", f"{len(message.parents)} entries", f"empty or {num_rows} entries")
    for row, parent in enumerate(message.parents):
        check_range(f"proposal.parents.{row}", parent, 0, row)
    token_ids = check_token_ids("proposal.token_ids", message.token_ids, vocabulary_size)
    return token_ids, tuple(message.parents) or tuple(range(num_rows))


def tree_message(tree: Tree) -> pb.TokenTree:
    """A proposal to send; a chain travels without its parents."""
    is_chain = tuple(tree.parents) == tuple(range(len(tree.token_ids)))
    return pb.TokenTree(token_ids=tree.token_ids, parents=() if is_chain else tree.parents)


def times_message(times: ComputeTimes) -> pb.ComputeTimes:
    """The cost of an answer."""
    return pb.ComputeTimes(queue_us=times.queue_us, compute_us=times.compute_us, forward_count=times.forward_count)


def finish_reason(message: pb.FinishReason.ValueType) -> FinishReason | None:
    """Why a request ended, None while it goes on or for a reason of a newer protocol."""
    return next((reason for reason, value in FINISH_REASONS.items() if value == message), None)


def finish_reason_message(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """The reason to send; unspecified while the request goes on."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def check_range(field: str, value: int, least: int, most: int) -> int:
    """Returns the value; raises InvalidRequest outside [least, most]."""
    if not least <= value <= most:
        raise InvalidRequest(field, value, f"in [{least}, {most}]")
    return value


def check_token_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> tuple[int, ...]:
    """Returns the ids; raises InvalidRequest about the first outside the vocabulary."""
    checked = tuple(token_ids)
    # Names of single tokens are made only when one is at fault: a prompt has thousands.
    if checked and not 0 <= min(checked) <= max(checked) < vocabulary_size:
        for index, token_id in enumerate(checked):
            check_token_id(f"{field}.{index}", token_id, vocabulary_size)
    return checked


def check_token_id(field: str, token_id: int, vocabulary_size: int) -> int:
    """Returns the id; raises InvalidRequest outside the vocabulary."""
    if not 0 <= token_id < vocabulary_size:
        raise InvalidRequest(field, token_id, f"a token id in [0, {vocabulary_size})")
    return token_id
