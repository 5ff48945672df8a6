"""The sessions of a target: one that verifies proposals, and a beam search.

A session's class is chosen when it is opened. Everything here runs on the device thread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from outrider.beams import LiveBeam, split
from outrider.drafters.drafter import NO_GUESSES, GuessLimits, HostedSession
from outrider.engine.beams import Beams
from outrider.engine.session import Session
from outrider.errors import InvalidRequest, OutriderError
from outrider.estimates.timing import ComputeTimes, Meter
from outrider.model_service.outbox import SessionAnswer
from outrider.model_service.session_state import SessionState
from outrider.parameters import FinishReason, Rule, SessionSpec
from outrider.token_tree import EMPTY, Branch, TokenTree
from target_service.acceptance import TargetVerdict
from target_service.beam_tasks import BeamTask
from target_service.verifier import TargetTask, VerifyTask

UNACKNOWLEDGED_WINDOW = 256
# Of one open at most; see TargetOpen.tells_reading.
MAX_READINGS = 64

OnVerdict = Callable[[TargetVerdict, ComputeTimes], None]
OnFailure = Callable[[OutriderError], None]
OnReading = Callable[[], None]
Record = Callable[[SessionSpec, Session], None]


class OpenSearch(NamedTuple):
    """The beam search of a session that is opened: how many beams at most, and those that are live, none at first."""

    width: int
    live: tuple[LiveBeam, ...]


class PromptRead(NamedTuple):
    """How many tokens of a session are read, while there are more."""

    read_len: int


class Step(NamedTuple):
    """Content of a step's message. `arrived_ns` is when its message came, on time.perf_counter_ns."""

    tree: TokenTree
    plain_budget: int
    arrived_ns: int
    guess_limits: GuessLimits = NO_GUESSES
    """Guesses that the session's drafter in this process is to make."""
    is_of_branch: bool = False
    """Whether the tree came before it was known what it would follow."""


class PushedBranches(NamedTuple):
    """Branches for what comes of a verification, and whether an outcome without one is followed by a plain token."""

    branches: Sequence[Branch]
    plain_on_miss: bool
    arrived_ns: int

    def step_after(self, verdict: TargetVerdict) -> TokenTree | None:
        """What is to be verified next; None where that is not for this side to say."""
        outcome = len(verdict.accepted_rows), verdict.next_token_id
        for branch in self.branches:
            if outcome == (branch.accepted_count, branch.next_token_id):
                return TokenTree.chain(branch.token_ids, branch.distributions, branch.logprobs)
        return EMPTY if self.plain_on_miss else None


@dataclass(slots=True, eq=False)
class TargetState(SessionState[TargetTask]):
    """A session as the target keeps it."""

    acknowledged_len: int = field(init=False)
    asked_len: int = 0
    """base_len of the last step of this epoch, 0 before the first."""
    limit: int = 0
    """Committed length up to which the target goes on unasked."""
    finish_reason: FinishReason | None = None
    is_new: bool = True
    """Whether there was no verdict yet."""
    tells_reading: bool = field(default=False, kw_only=True)
    told_len: int = 0
    """Tokens of which it was said that they are read, where that is said."""
    verdicts: list[SessionAnswer[TargetVerdict]] = field(default_factory=list)
    """Unacknowledged verdicts, in order."""
    hosted: HostedSession | None = field(default=None, kw_only=True)
    """Session of its drafter in this process, where it has one."""
    record: Record | None = field(default=None, kw_only=True)
    """Takes what was said, where that may be kept."""
    guess_limits: GuessLimits = NO_GUESSES
    """Guesses that the drafter is asked for, however far the request and the budget reach."""
    ahead: PushedBranches | None = None
    """What may follow the verdict on the committed length, where the draft has said that."""

    def __post_init__(self) -> None:
        self.acknowledged_len = self.committed_len

    @property
    def answerable(self) -> Collection[int]:
        return [answer.fence.base_len for answer in self.verdicts]

    @property
    def committed_len(self) -> int:
        return len(self.session)

    @property
    def cached_len(self) -> int:
        """Cached tokens; the last committed one does not count, because the next forward computes it again."""
        return min(self.session.cached_len, self.committed_len - 1)

    @property
    def may_go_on(self) -> bool:
        """Whether the next token may be committed unasked."""
        return self.finish_reason is None and len(self.session) < self._unasked_end

    @property
    def _unasked_end(self) -> int:
        return min(self.limit, self.acknowledged_len + UNACKNOWLEDGED_WINDOW)

    def next_reading(self) -> PromptRead | None:
        """What is to be said of how much is read; None where that is nothing new, or too little for a message."""
        read_len = self.session.cached_len
        if not self.tells_reading or read_len < self.told_len + ceil(len(self.session) / MAX_READINGS):
            return None
        self.told_len = read_len
        return PromptRead(read_len)

    @property
    def next_limits(self) -> GuessLimits:
        """Guesses that its own drafter is to make for the next verdict; none while the prompt is read.

        Numbers depend on lengths and never on tokens: rules that test with uniforms would otherwise be biased.
        """
        length = len(self.session)
        if self.hosted is None or length == self.spec.prompt_len:
            return NO_GUESSES
        # An unasked verdict commits no more than its budget.
        end = self.spec.max_len if length == self.asked_len else min(self._unasked_end, self.spec.max_len)
        return self.guess_limits.within(end - length - 1)

    def acknowledge(self, base_len: int) -> None:
        """Forgets the verdicts below base_len."""
        self.acknowledged_len = max(self.acknowledged_len, base_len)
        self.verdicts = [answer for answer in self.verdicts if answer.fence.base_len >= base_len]

    def allow(self, base_len: int, plain_budget: int, *, is_repeat: bool = False) -> None:
        """Sets how far the target may go on unasked, from a message's base_len; a repetition takes nothing back."""
        limit = base_len + 1 + plain_budget if plain_budget else base_len
        self.limit = max(limit, self.limit) if is_repeat else limit

    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; returns whether a job was stopped."""
        was_stopped = self.stop_job()
        if length < self.committed_len:
            self.finish_reason = None
            self.truncate(length)
        self.epoch, self.acknowledged_len, self.limit = epoch, self.committed_len, 0
        self.asked_len, self.verdicts, self.ahead = 0, [], None
        if self.hosted is not None:
            self.hosted.part.truncate(len(self.session))
        return was_stopped

    def opened(self) -> None:
        """Finishes the opening, once it is known what is cached of its tokens."""
        self.acknowledged_len = self.committed_len

    def truncate(self, length: int) -> None:
        """Drops what is committed from a length on."""
        self.session.truncate(min(length, len(self.session)))

    def can_return(self, length: int) -> bool:
        """Whether what was committed at a length is known."""
        return True

    def check(self, step: Step, base_len: int) -> None:
        """Raises InvalidRequest about a proposal that does not fit the request."""
        check_proposal(step.tree, self.spec, base_len)

    def begin(self, step: Step, on_verdict: OnVerdict, on_failure: OnFailure, on_reading: OnReading) -> TargetTask:
        """The job of a step after the session's tokens."""
        task = VerifyTask(
            session=self.session,
            spec=self.spec,
            tree=step.tree,
            meter=Meter(step.arrived_ns),
            on_verdict=on_verdict,
            on_failure=on_failure,
            on_reading=on_reading,
            hosted=self.hosted,
            guess_limits=self.next_limits,
            is_of_branch=step.is_of_branch,
        )
        if self.hosted is not None and self.guess_limits.draft_count and len(self.session) == self.spec.prompt_len:
            # The drafter reads the prompt while the target does.
            self.hosted.propose(self.session, NO_GUESSES)
        return task

    def go_on(self, verdict: TargetVerdict) -> None:
        """Prepares the job for the next verdict, or ends it. Called before the reply to this one.

        So a caller who has the answer finds the session at rest.
        """
        ahead, self.ahead = self.ahead, None
        if isinstance(self.task, VerifyTask):
            tree = self.branch_after(verdict, ahead)
            self.task.next_verdict(tree or EMPTY, Meter(), self.next_limits)
            self.task.is_of_branch = bool(tree)
            self.task.done = tree is None and not self.may_go_on
            self.task = None if self.task.done else self.task

    def branch_after(self, verdict: TargetVerdict, ahead: PushedBranches | None) -> TokenTree | None:
        """What was prepared for the outcome of a verdict, empty for a plain token; None where nothing was."""
        within = len(self.session) < self.acknowledged_len + UNACKNOWLEDGED_WINDOW
        return ahead.step_after(verdict) if ahead is not None and self.finish_reason is None and within else None

    def closed(self) -> None:
        if self.record is not None:
            self.record(self.spec, self.session)

    def free_parts(self) -> None:
        if self.hosted is not None:
            self.hosted.part.free()


@dataclass(slots=True, eq=False)
class BeamState(TargetState):
    """A session that is a beam search: its tokens are the prompt, and its committed length is that of its beams."""

    search: OpenSearch = field(kw_only=True)
    beams: Beams = field(init=False)

    def __post_init__(self) -> None:
        self.beams = Beams(self.session)
        TargetState.__post_init__(self)

    @property
    def committed_len(self) -> int:
        return self.beams.length

    @property
    def sessions(self) -> tuple[Session, ...]:
        return self.beams.all_sessions

    @property
    def cached_len(self) -> int:
        return min(self.beams.cached_len, self.committed_len - 1)

    @property
    def may_go_on(self) -> bool:
        return False

    def opened(self) -> None:
        self.beams.become(self.search.live)
        TargetState.opened(self)

    def truncate(self, length: int) -> None:
        # Beams of an earlier length are not known any more.
        self.beams.free_beams()
        TargetState.truncate(self, length)

    def can_return(self, length: int) -> bool:
        return length >= self.committed_len

    def check(self, step: Step, base_len: int) -> None:
        """Does nothing: how deep guesses may be is known when the job begins."""

    def begin(self, step: Step, on_verdict: OnVerdict, on_failure: OnFailure, on_reading: OnReading) -> TargetTask:
        if step.plain_budget or step.guess_limits.draft_count:
            raise InvalidRequest("step.plain_budget", step.plain_budget, "0 for a beam search, as own_draft_count")
        trees = split(step.tree, self.beams.last_token_ids)
        room = self.spec.max_len - self.committed_len
        depth = max(max(each.tree.depths) for each in trees)
        if depth > room:
            raise InvalidRequest("proposal", f"{depth} tokens deep", f"at most {room} deep here, up to max_len")
        meter = Meter(step.arrived_ns)
        return BeamTask(self.beams, self.spec, self.search.width, trees, meter, on_verdict, on_failure, on_reading)

    def go_on(self, verdict: TargetVerdict) -> None:
        if self.task is not None:
            self.task.done, self.task = True, None

    def free_parts(self) -> None:
        TargetState.free_parts(self)
        self.beams.free_beams()


def check_proposal(tree: TokenTree, spec: SessionSpec, base_len: int) -> None:
    """Raises InvalidRequest unless a proposal fits the request: no row past its end, and what its rule needs."""
    room, depth = spec.max_len - base_len, max(tree.depths)
    if depth > room:
        raise InvalidRequest("proposal", f"{depth} tokens deep", f"at most {room} deep here, up to max_len")
    _check_distributions("proposal", len(tree), len(tree.distributions), spec.acceptance.rule)


def check_branches(branches: Sequence[Branch], spec: SessionSpec, base_len: int) -> None:
    """Raises InvalidRequest unless branches fit the request: what its rule needs, and no guess past its end."""
    rule, room = spec.acceptance.rule, spec.max_len - base_len
    if branches and not rule.runs_ahead:
        raise InvalidRequest("branches.branches", f"{len(branches)} branches", f"absent under the rule {rule}")
    for number, branch in enumerate(branches):
        field = f"branches.branches.{number}"
        depth = branch.accepted_count + 1 + len(branch.token_ids)
        if depth > room:
            raise InvalidRequest(field, f"{depth} tokens deep", f"at most {room} deep here, up to max_len")
        _check_distributions(field, len(branch.token_ids), len(branch.distributions), rule)


def _check_distributions(field: str, num_rows: int, num_distributions: int, rule: Rule) -> None:
    """Raises InvalidRequest unless rows come with the distributions that a rule needs, or without."""
    field = f"{field}.distributions"
    if num_distributions and not rule.needs_distributions:
        raise InvalidRequest(field, f"{num_distributions} entries", f"empty under the rule {rule}")
    if rule.needs_distributions and num_rows > num_distributions:
        raise InvalidRequest(field, "empty", f"one entry for each row under the rule {rule}")
