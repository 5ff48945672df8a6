"""The words of the round loop: proposal, verdict, round, and the log of committed tokens. Knows no gRPC and no text.

The log is the truth of a request: every cache elsewhere can be rebuilt from it, and it only ever grows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.errors import ProtocolViolation
from outrider.parameters import DraftDistribution, FinishReason, TokenLogprob


class TokenOrigin(Enum):
    """Who said a token first; see generation_service.proto."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


class FallbackReason(Enum):
    """Why a round that was to be speculative had no proposal; see generation_service.proto."""

    DRAFT_ABSENT = "draft_absent"
    DRAFT_LOST = "draft_lost"
    DRAFT_LATE = "draft_late"
    DRAFT_CONTEXT = "draft_context"
    DRAFT_REFUSED = "draft_refused"


@dataclass(frozen=True, slots=True)
class HopCost:
    """What an answer cost beside computing: time in the service's queue, time of waiting here, and bytes both ways."""

    queue_us: int = 0
    wait_us: int = 0
    num_bytes: int = 0


NO_HOP_COST = HopCost()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens as a tree behind the last committed token; row r is counted from 1 and 0 is the root."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    fallback_reason: FallbackReason | None = None
    compute_us: int = 0
    caught_up_count: int = 0  # committed tokens that the draft had to read before it could guess
    hop: HopCost = NO_HOP_COST
    drift_repairs: int = 0
    distributions: tuple[DraftDistribution, ...] = ()  # what each row was drawn from, for the rules that ask
    logprobs: tuple[float, ...] = ()  # the draft's own, of each row's token, for requests that ask

    def parent(self, row: int) -> int:
        """Row that the given row hangs on; an empty list of parents means a chain."""
        return self.parents[row - 1] if self.parents else row - 1

    @property
    def depth(self) -> int:
        """Length of the longest path from the root, which is how many draft tokens may be accepted at once."""
        depths = [0]
        for row in range(1, len(self.token_ids) + 1):
            depths.append(depths[self.parent(row)] + 1)
        return max(depths)

    def has_children(self, row: int) -> bool:
        """Whether the proposal goes on behind a row."""
        return any(self.parent(child) == row for child in range(row + 1, len(self.token_ids) + 1))


NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided on top of base_len; see target_service.proto."""

    base_len: int
    accepted_rows: tuple[int, ...]
    next_token_id: int | None
    finish_reason: FinishReason | None
    evaluated_count: int
    compute_us: int = 0
    numerics_id: str = ""
    hop: HopCost = NO_HOP_COST
    reopens: int = 0  # times that the session had to be opened again for this verdict
    drift_repairs: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of the committed tokens, when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of all tokens of the prompt but the first
    prefix_len: int = 0  # tokens that the target found in its prefix cache when it opened the session


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens that one verdict committed, and how they came about. Times are microseconds."""

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    base_len: int
    draft_count: int
    accepted_count: int
    evaluated_count: int
    fallback_reason: FallbackReason | None
    finish_reason: FinishReason | None
    draft_compute_us: int
    verify_compute_us: int
    round_us: int
    numerics_id: str
    caught_up_count: int = 0
    draft_hop: HopCost = NO_HOP_COST
    verify_hop: HopCost = NO_HOP_COST
    target_reopens: int = 0
    drift_repairs: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prefix_len: int = 0
    proposal: Proposal = NOTHING
    accepted_rows: tuple[int, ...] = ()
    is_first: bool = False  # the prompt's own pass
    gap_us: int = 0  # since the commit before it, what the client took included

    @property
    def rejected_rows(self) -> tuple[int, ...]:
        """Rows of the proposal that were not kept, in order."""
        kept = set(self.accepted_rows)
        return tuple(row for row in range(1, len(self.proposal.token_ids) + 1) if row not in kept)


class TokenLog:
    """Prompt and output of one request. Append only: a committed token is never changed, lost or added twice."""

    def __init__(self, prompt: tuple[int, ...], clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._token_ids = list(prompt)
        self._clock_ns = clock_ns
        self._started_ns = self._committed_ns = clock_ns()
        self.prompt_len = len(prompt)
        self.finish_reason: FinishReason | None = None

    def __len__(self) -> int:
        return len(self._token_ids)

    def tokens(self, start: int = 0) -> tuple[int, ...]:
        """Committed tokens from a position on."""
        return tuple(self._token_ids[start:])

    def begin_round(self) -> None:
        """Starts the clock of the next round, so that what the client took between two rounds is in neither."""
        self._started_ns = self._clock_ns()

    def commit(self, proposal: Proposal, verdict: Verdict) -> Round:
        """Appends what a verdict commits. Raises ProtocolViolation for a verdict that cannot be about this proposal."""
        if self.finish_reason is not None or verdict.base_len != len(self):
            raise ProtocolViolation(f"a verdict on length {verdict.base_len} came for a log of {len(self)} tokens")
        token_ids, origins = _read(proposal, verdict)
        base_len = len(self)
        self._token_ids += token_ids
        started_ns, self._started_ns = self._started_ns, self._clock_ns()
        before_ns, self._committed_ns = self._committed_ns, self._started_ns
        self.finish_reason = verdict.finish_reason
        return Round(
            token_ids=token_ids,
            origins=origins,
            base_len=base_len,
            draft_count=len(proposal.token_ids),
            accepted_count=len(verdict.accepted_rows),
            evaluated_count=verdict.evaluated_count,
            fallback_reason=proposal.fallback_reason,
            finish_reason=verdict.finish_reason,
            draft_compute_us=proposal.compute_us,
            verify_compute_us=verdict.compute_us,
            round_us=(self._started_ns - started_ns) // 1000,
            numerics_id=verdict.numerics_id,
            caught_up_count=proposal.caught_up_count,
            draft_hop=proposal.hop,
            verify_hop=verdict.hop,
            target_reopens=verdict.reopens,
            drift_repairs=proposal.drift_repairs + verdict.drift_repairs,
            logprobs=verdict.logprobs,
            prompt_logprobs=verdict.prompt_logprobs,
            prefix_len=verdict.prefix_len,
            proposal=proposal,
            accepted_rows=verdict.accepted_rows,
            is_first=base_len == self.prompt_len,
            gap_us=(self._committed_ns - before_ns) // 1000,
        )


def _read(proposal: Proposal, verdict: Verdict) -> tuple[tuple[int, ...], tuple[TokenOrigin, ...]]:
    """Token ids and origins that a verdict commits, in order."""
    _check(proposal, verdict)
    token_ids = tuple(proposal.token_ids[row - 1] for row in verdict.accepted_rows)
    origins = (TokenOrigin.ACCEPTED,) * len(token_ids)
    if verdict.next_token_id is None:
        return token_ids, origins
    return (*token_ids, verdict.next_token_id), (*origins, _origin_of_next(proposal, verdict))


def _origin_of_next(proposal: Proposal, verdict: Verdict) -> TokenOrigin:
    if not proposal.token_ids:
        return TokenOrigin.PLAIN
    last_row = verdict.accepted_rows[-1] if verdict.accepted_rows else 0
    return TokenOrigin.CORRECTION if proposal.has_children(last_row) else TokenOrigin.BONUS


def _check(proposal: Proposal, verdict: Verdict) -> None:
    """Raises ProtocolViolation unless the accepted rows are a path from the root and the request can go on."""
    previous = 0
    for row in verdict.accepted_rows:
        if not previous < row <= len(proposal.token_ids) or proposal.parent(row) != previous:
            raise ProtocolViolation(f"accepted rows {list(verdict.accepted_rows)} are no path through the proposal")
        previous = row
    if verdict.next_token_id is None and (verdict.finish_reason is None or not verdict.accepted_rows):
        raise ProtocolViolation("a verdict neither ends the request nor names the next token")
    num_tokens = len(verdict.accepted_rows) + (verdict.next_token_id is not None)
    if len(verdict.logprobs) not in {0, num_tokens}:
        raise ProtocolViolation(f"{len(verdict.logprobs)} log-probabilities came for {num_tokens} tokens")
