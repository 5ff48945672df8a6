"""The words of the round loop: proposal, verdict, round, and the log of committed tokens.

The log is the truth of a request: every cache elsewhere can be rebuilt from it, and it only ever grows. What is made
once a round is never changed either, but not frozen, because that makes making it three times as slow.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import NamedTuple

from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason, TokenLogprob
from outrider.token_tree import EMPTY, TokenTree, TreeShape


class Place(StrEnum):
    """Place where a drafter guesses."""

    REMOTE = "remote"  # a draft service
    HOSTED = "hosted"  # the target's process
    LOOKUP = "lookup"  # the gateway itself, without a model


class Makes(StrEnum):
    """Kind of proposals, which cost and bring different things."""

    CHAIN = "chain"
    TREE = "tree"
    AHEAD = "ahead"  # chains, with branches for what comes after them


class DrafterId(NamedTuple):
    """Identity of a drafter, or of several that guess together; without a name the draft service's own choice."""

    name: str = ""
    place: Place = Place.REMOTE
    makes: Makes = Makes.CHAIN


ANY_DRAFT, LOOKUP = DrafterId(), DrafterId("lookup", Place.LOOKUP)


@dataclass(frozen=True, slots=True)
class GuessRequest:
    """Request for guesses of one drafter: how many, and in which shape, None for a chain.

    For `branch_count` outcomes of their verification it is to guess on meanwhile; after another one the target goes on
    with a plain token if plain_on_miss says so. Where it went on by itself, these guesses are under verification
    already, and only branches are wanted.
    """

    drafter: DrafterId = ANY_DRAFT
    count: int = 0
    shape: TreeShape | None = None
    branch_count: int = 0
    plain_on_miss: bool = False
    went_on: bool = False


NO_REQUEST = GuessRequest()


class TokenOrigin(StrEnum):
    """Model or step that said a token first; see generation_service.proto."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


class FallbackReason(Enum):
    """Reason why a round that was to be speculative had no proposal; see generation_service.proto."""

    DRAFT_ABSENT = "draft_absent"
    DRAFT_LOST = "draft_lost"
    DRAFT_LATE = "draft_late"
    DRAFT_CONTEXT = "draft_context"
    DRAFT_REFUSED = "draft_refused"


class BranchOutcome(Enum):
    """What came of branches that were asked for during the round before."""

    HIT = "hit"  # the target began the round with one of them
    MISS = "miss"  # they were there, for other outcomes
    LATE = "late"  # they were not there when it was known what came


class AheadRound(NamedTuple):
    """How a round began before which so many branches were asked for: of which drafter, of so many guesses each."""

    drafter: DrafterId
    draft_count: int
    branch_count: int
    outcome: BranchOutcome


class HopCost(NamedTuple):
    """Cost of an answer beside computing: time in the service's queue, time of waiting here, and bytes both ways."""

    queue_us: int = 0
    wait_us: int = 0
    num_bytes: int = 0


NO_COST = HopCost()


@dataclass(slots=True)
class Proposal:
    """Guesses of the draft after the last committed token, or the reason why there are none."""

    tree: TokenTree = EMPTY
    fallback_reason: FallbackReason | None = None
    compute_us: int = 0
    forward_count: int = 0  # forwards that this came from
    row_count: int = 0  # of them, those of all sessions
    caught_up_count: int = 0  # committed tokens that the draft had to read before it could guess
    hop: HopCost = NO_COST
    drift_repairs: int = 0
    drafter: DrafterId = ANY_DRAFT  # that made it
    sources: tuple[str, ...] = ()  # who made each row, where several drafters did
    parts: tuple["Proposal", ...] = ()  # of several drafters, of which it was or will be made
    is_ahead: bool = False  # branches were asked for with it, or it is that of one

    def source(self, row: int) -> str:
        """Name of what made a row, counted from 1."""
        return self.sources[row - 1] if self.sources else self.drafter.name

    @property
    def learner(self) -> DrafterId:
        """Drafter that is to learn from it: of trees, which have values, another one than of chains."""
        chain = Makes.AHEAD if self.is_ahead else Makes.CHAIN
        makes = Makes.TREE if self.tree.values else chain
        return self.drafter if self.drafter.makes is makes else self.drafter._replace(makes=makes)


NOTHING = Proposal()


@dataclass(slots=True)
class Verdict:
    """Decision of the target on top of base_len; see target_service.proto."""

    base_len: int
    accepted_rows: tuple[int, ...]
    next_token_id: int | None
    finish_reason: FinishReason | None
    evaluated_count: int
    compute_us: int = 0
    forward_count: int = 0  # forwards that this came from
    row_count: int = 0  # of them, those of all sessions
    session_count: int = 0  # sessions on the target
    numerics_id: str = ""
    hop: HopCost = NO_COST
    reopens: int = 0  # times that the session had to be opened again for this verdict
    drift_repairs: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of the committed tokens, when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of all tokens of the prompt but the first
    prefix_len: int = 0  # tokens that the target found in its prefix cache when it opened the session
    own: Proposal | None = None  # what the target had proposed to itself, which accepted_rows is about then
    refused_guesses: bool = False  # the target would not take what was guessed, and decided without it
    prompt_row_count: int = 0  # rows among row_count that read prompts
    is_of_branch: bool = False  # its own proposal is that of a branch
    had_branches: bool = False  # the target had some, or was sent some, for what it had to come to
    address: str = ""  # of the target

    def about(self, proposal: Proposal) -> Proposal:
        """Proposal that it is about: the one that was sent, unless the target had its own or would not take it."""
        if self.own is not None:
            return self.own
        return Proposal(fallback_reason=FallbackReason.DRAFT_REFUSED) if self.refused_guesses else proposal


@dataclass(slots=True)
class Round:
    """A proposal, the verdict on it, and the tokens that it committed. Times are microseconds."""

    proposal: Proposal
    verdict: Verdict
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    round_us: int = 0
    gap_us: int = 0  # since the commit before it, what the client took included
    is_first: bool = False  # the prompt's own pass
    ahead: AheadRound | None = None  # None where no branches were asked for
    draft_count: int = field(init=False)
    accepted_count: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked for ten times a round.
        self.draft_count, self.accepted_count = len(self.proposal.tree.token_ids), len(self.verdict.accepted_rows)

    @property
    def drift_repairs(self) -> int:
        """Caches of either service that had to be computed again."""
        return self.proposal.drift_repairs + self.verdict.drift_repairs

    @property
    def rejected_rows(self) -> tuple[int, ...]:
        """Rows of the proposal that were not kept, in order."""
        kept = set(self.verdict.accepted_rows)
        return tuple(row for row in range(1, self.draft_count + 1) if row not in kept)


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
        return tuple(self._token_ids[start:])

    def begin_round(self) -> None:
        """Starts the clock of the next round, so that what the client took between two rounds is in neither."""
        self._started_ns = self._clock_ns()

    def commit(self, proposal: Proposal, verdict: Verdict) -> Round:
        """Appends what a verdict commits; of two proposals the target's own is the one that it is about.

        One that came too late counts as none. Raises ProtocolViolation for a verdict that cannot be about it, or after
        which the request cannot go on.
        """
        hop, proposal = proposal.hop, verdict.about(proposal)
        if proposal is verdict.own and hop.num_bytes:
            # It came by way of the draft's hop, where it is that of a branch.
            proposal = replace(proposal, hop=HopCost(num_bytes=hop.num_bytes))
        if not verdict.evaluated_count and proposal.tree.token_ids:
            # The target had gone on unasked, and gave this verdict before it knew of any guess.
            proposal = NOTHING
        log_len = len(self._token_ids)
        if self.finish_reason is not None or verdict.base_len != log_len:
            raise ProtocolViolation(f"a verdict on length {verdict.base_len} came for a log of {log_len} tokens")
        tree, rows, next_token_id = proposal.tree, verdict.accepted_rows, verdict.next_token_id
        last_row = rows[-1] if rows else 0
        if last_row > len(tree.token_ids) or rows != tree.path(last_row):
            raise ProtocolViolation(f"accepted rows {list(rows)} are no path through the proposal")
        if next_token_id is None and (verdict.finish_reason is None or not rows):
            raise ProtocolViolation("a verdict neither ends the request nor names the next token")
        token_ids = tuple(tree.token_ids[row - 1] for row in rows)
        origins = (TokenOrigin.ACCEPTED,) * len(rows)
        if next_token_id is not None:
            origin = TokenOrigin.CORRECTION if tree.children(last_row) else TokenOrigin.BONUS
            token_ids, origins = (
                (*token_ids, next_token_id),
                (*origins, origin if tree.token_ids else TokenOrigin.PLAIN),
            )
        if len(verdict.logprobs) not in {0, len(token_ids)}:
            raise ProtocolViolation(f"{len(verdict.logprobs)} log-probabilities came for {len(token_ids)} tokens")
        is_first = log_len == self.prompt_len
        self._token_ids += token_ids
        self.finish_reason = verdict.finish_reason
        started_ns, self._started_ns = self._started_ns, self._clock_ns()
        before_ns, self._committed_ns = self._committed_ns, self._started_ns
        round_us, gap_us = (self._started_ns - started_ns) // 1000, (self._committed_ns - before_ns) // 1000
        return Round(proposal, verdict, token_ids, origins, round_us, gap_us, is_first)
