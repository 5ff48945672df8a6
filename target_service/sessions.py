"""The sessions of a target: which message is taken, which verdicts are repeated, and how far it goes on unasked.

Everything here runs on the device thread, between two forwards, so that no session changes under one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from outrider.beams import LiveBeam, split
from outrider.engine.beams import Beams
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import Field, InvalidRequest, ProtocolViolation
from outrider.grammar import Grammar
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.model_service.session_state import SessionState
from outrider.model_service.sessions import SessionStore
from outrider.parameters import FinishReason, SessionSpec
from outrider.rpc.fencing import Fence, MessageStatus, classify
from outrider.timing import ComputeTimes, Meter
from outrider.token_tree import EMPTY, TokenTree, TreeShape
from target_service.acceptance import TargetVerdict
from target_service.beam_tasks import BeamTask
from target_service.own_drafts import NOT_ASKED, Asked, Hosting, OwnSession
from target_service.verifier import TargetTask, VerifyTask

UNACKNOWLEDGED_WINDOW = 256


class OpenSearch(NamedTuple):
    """The beam search of a session that is opened: how many beams at most, and those that are live, none at first."""

    width: int
    live: tuple[LiveBeam, ...]


class Step(NamedTuple):
    """Content of a step's message. `arrived_ns` is when its message came, on time.perf_counter_ns."""

    tree: TokenTree
    plain_budget: int
    arrived_ns: int
    own_draft_count: int = 0
    own_shape: TreeShape | None = None


@dataclass(slots=True, eq=False)
class TargetState(SessionState[TargetTask]):
    """A session as the target keeps it. Its committed length is that of its tokens, or of its beams."""

    acknowledged_len: int = field(init=False)
    asked_len: int = 0
    """base_len of the last step of this epoch, 0 before the first."""
    limit: int = 0
    """Committed length up to which the target goes on unasked."""
    finish_reason: FinishReason | None = None
    verdicts: list[SessionAnswer[TargetVerdict]] = field(default_factory=list)
    """Unacknowledged verdicts, in order."""
    own: OwnSession | None = None
    """Session of its drafter in this process, where it has one."""
    own_asked: Asked = NOT_ASKED
    """Guesses that the drafter is asked for, however far the request and the budget reach."""
    beams: Beams | None = None
    """Beams on its tokens, the prompt, where it is a search."""
    width: int = 0
    """Most beams that it may have."""

    def __post_init__(self) -> None:
        self.acknowledged_len = len(self.session)

    @property
    def answerable(self) -> Collection[int]:
        return [answer.fence.base_len for answer in self.verdicts]

    @property
    def committed_len(self) -> int:
        return len(self.session) if self.beams is None else self.beams.length

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (self.session,) if self.beams is None else self.beams.all_sessions

    @property
    def cached_len(self) -> int:
        """Cached tokens; the last committed one does not count, because the next forward computes it again."""
        cached_len = self.session.cached_len if self.beams is None else self.beams.cached_len
        return min(cached_len, self.committed_len - 1)

    @property
    def may_go_on(self) -> bool:
        """Whether the next token may be committed unasked."""
        return self.beams is None and self.finish_reason is None and len(self.session) < self._unasked_end

    @property
    def _unasked_end(self) -> int:
        return min(self.limit, self.acknowledged_len + UNACKNOWLEDGED_WINDOW)

    @property
    def next_own(self) -> Asked:
        """Guesses that its own drafter is to make for the next verdict; none while the prompt is read.

        Numbers depend on lengths and never on tokens: rules that test with uniforms would otherwise be biased.
        """
        length = len(self.session)
        if self.own is None or length == self.spec.prompt_len:
            return NOT_ASKED
        # An unasked verdict commits no more than its budget.
        end = self.spec.max_len if length == self.asked_len else min(self._unasked_end, self.spec.max_len)
        count, shape, room = self.own_asked.draft_count, self.own_asked.shape, max(0, end - length - 1)
        return Asked(count if shape is not None and room else min(count, room), shape, room)

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
            if self.beams is not None:
                # Beams of an earlier length are not known any more.
                self.beams.free_beams()
            self.session.truncate(min(length, len(self.session)))
        self.epoch, self.acknowledged_len, self.limit = epoch, self.committed_len, 0
        self.asked_len, self.verdicts = 0, []
        if self.own is not None:
            self.own.draft.truncate(len(self.session))
        return was_stopped

    def free(self) -> None:
        SessionState.free(self)  # super() does not know a class with slots that dataclass has made anew
        if self.beams is not None:
            self.beams.free_beams()
        if self.own is not None:
            self.own.draft.free()


class TargetSessions(SessionStore[TargetState]):
    """Sessions of a target service."""

    def __init__(
        self,
        runner: ModelRunner,
        table: LeaseTable[TargetState],
        submit: Callable[[TargetTask], None],
        *,
        prefix_cache: bool = True,
        hostings: Sequence[Hosting[Any]] = (),
    ) -> None:
        """`submit` hands a task to the device worker that advances it; prefix_cache as in SessionStore.

        `hostings` are the drafters that sessions may have in this process.
        """
        super().__init__(runner, table, TargetState, prefix_cache=prefix_cache)
        self._submit = submit
        self._hostings = {hosting.name: hosting for hosting in hostings}

    def open(
        self,
        fence: Fence,
        spec: SessionSpec,
        step: Step,
        owner: Outbox,
        drafter: str = "",
        search: OpenSearch | None = None,
    ) -> None:
        """Opens a session, or opens it again with a newer epoch, and takes its first step.

        `drafter` is one of the hostings, or empty. With a search, the spec's tokens are the prompt.
        """
        status, held = self._classify_open(fence, owner)
        if status is MessageStatus.CURRENT:
            if spec.grammar is not None:
                _check_output(spec.grammar, spec.token_ids[spec.prompt_len :])
            if search is None:
                _check_proposal(step.tree, spec, fence.base_len)
            _check_own(self._hostings.get(drafter), step.own_draft_count, step.own_shape, "step")
            if held is not None and held.beams is not None:
                held.beams.free_beams()
                held.beams = None
            held = self._open(fence, spec, owner)
            held.finish_reason = None
            if search is not None:
                held.beams, held.width = Beams(held.session), search.width
                held.beams.become(search.live)
            held.acknowledged_len = held.committed_len
            self._host(held, drafter)
            self._accept(held, fence, step)
        elif status is MessageStatus.REPEAT and held is not None:
            self._attach(fence, held, owner)
            self._repeat(held, fence, step)

    def step(self, fence: Fence, step: Step, owner: Outbox) -> None:
        """Verifies a proposal, answers a step again, or asks for tokens."""
        held = self.table.get(fence.session_id)
        is_owner = held is not None and held.owner is owner
        status = classify(fence, held.view if held else None, is_owner=is_owner)
        if held is None or status is MessageStatus.FUTURE:
            self.want_tokens(fence, held, owner)
        elif status is MessageStatus.REPEAT:
            held.acknowledge(fence.base_len)
            self._repeat(held, fence, step)
        elif status is MessageStatus.REWIND and held.beams is not None and fence.base_len < held.committed_len:
            # What the beams were at that length is not known any more.
            self.want_tokens(fence, held, owner)
        elif status is not MessageStatus.STALE:
            if held.beams is None:
                _check_proposal(step.tree, held.spec, fence.base_len)
            _check_own(held.own and held.own.hosting, step.own_draft_count, step.own_shape, "step")
            if status is MessageStatus.REWIND:
                self._rewind(held, fence.epoch, fence.base_len)
            held.acknowledge(fence.base_len)
            self._accept(held, fence, step)

    def acknowledge(
        self,
        fence: Fence,
        plain_budget: int,
        arrived_ns: int,
        owner: Outbox,
        own_draft_count: int = 0,
        own_shape: TreeShape | None = None,
    ) -> None:
        """Forgets verdicts, and lets the target go on unasked; never answered."""
        held = self.table.get(fence.session_id)
        if held is None or held.owner is not owner:
            return
        if fence.epoch < held.epoch or fence.base_len > held.committed_len or held.beams is not None:
            return
        if fence.epoch > held.epoch:
            self._rewind(held, fence.epoch, fence.base_len)
        if fence.base_len < held.acknowledged_len:
            return
        _check_own(held.own and held.own.hosting, own_draft_count, own_shape, "acknowledge")
        held.acknowledge(fence.base_len)
        held.allow(fence.base_len, plain_budget)
        held.own_asked = Asked(own_draft_count, own_shape)
        if not held.may_go_on and len(held.session) > held.asked_len:
            # The stretch ends here: a step is about to come, and what has begun unasked would only delay it.
            held.stop_job()
            if held.own is not None:
                held.own.draft.truncate(len(held.session))
        self._go_on(fence.session_id, held, arrived_ns)

    def _host(self, held: TargetState, drafter: str) -> None:
        """Gives a session its drafter, which finds what it has read of the tokens in its own prefix cache."""
        if held.own is not None:
            held.own.draft.free()
        hosting = self._hostings.get(drafter)
        salt = held.spec.cache_salt if self._prefix_cache else None
        held.own = None if hosting is None else OwnSession.of(hosting, held.spec, salt)

    def _repeat(self, held: TargetState, fence: Fence, step: Step) -> None:
        """Sends the verdicts from a length on once more, and goes on as far as the repetition allows.

        A verdict that is under way comes anyway; one whose job was stopped with its stream is begun anew.
        """
        if fence.base_len < held.committed_len:
            for answer in held.verdicts:
                if answer.fence.base_len >= fence.base_len:
                    held.owner.put(answer)
            held.allow(fence.base_len, step.plain_budget, is_repeat=True)
            self._go_on(fence.session_id, held, step.arrived_ns)
        elif held.task is None:
            if held.beams is None:
                _check_proposal(step.tree, held.spec, fence.base_len)
            self._accept(held, fence, step)

    def _go_on(self, session_id: bytes, held: TargetState, arrived_ns: int) -> None:
        if held.task is None and held.may_go_on:
            self._start(session_id, held, Step(EMPTY, 0, arrived_ns))

    def _accept(self, held: TargetState, fence: Fence, step: Step) -> None:
        if held.finish_reason is not None:
            raise ProtocolViolation(
                f"the request has ended at {fence.base_len} tokens and takes no more steps", base_len=fence.base_len
            )
        is_repeat = fence.base_len == held.asked_len
        held.allow(fence.base_len, step.plain_budget, is_repeat=is_repeat)
        held.asked_len, held.own_asked = fence.base_len, Asked(step.own_draft_count, step.own_shape)
        if held.beams is not None:
            self._search(fence.session_id, held, held.beams, step)
        elif held.task is None:
            self._start(fence.session_id, held, step)
        elif isinstance(held.task, VerifyTask) and not is_repeat and (step.tree or held.task.own_proposal is None):
            # A verdict on just this length is under way, because the budget allowed it: it becomes the step's own. Only
            # guesses that have been made for it stay.
            held.task.next_verdict(step.tree, Meter(step.arrived_ns), held.next_own)

    def _start(self, session_id: bytes, held: TargetState, step: Step) -> None:
        held.task = VerifyTask(
            session=held.session,
            spec=held.spec,
            tree=step.tree,
            meter=Meter(step.arrived_ns),
            on_verdict=partial(self._on_verdict, session_id, held),
            on_failure=partial(self.fail, session_id, held),
            own=held.own,
            own_asked=held.next_own,
        )
        if held.own is not None and held.own_asked.draft_count and len(held.session) == held.spec.prompt_len:
            # The drafter reads the prompt while the target does.
            held.own.hosting.begin(held.own.draft, held.session, NOT_ASKED)
        self._submit(held.task)

    def _search(self, session_id: bytes, held: TargetState, beams: Beams, step: Step) -> None:
        """Starts a pass of a search; of one that is under way the verdict comes anyway."""
        if step.plain_budget or step.own_draft_count:
            raise InvalidRequest("step.plain_budget", step.plain_budget, "0 for a beam search, as own_draft_count")
        if held.task is not None:
            return
        trees = split(step.tree, beams.last_token_ids)
        room = held.spec.max_len - held.committed_len
        depth = max(max(each.tree.depths) for each in trees)
        if depth > room:
            raise InvalidRequest("proposal", f"{depth} tokens deep", f"at most {room} deep here, up to max_len")
        on_verdict = partial(self._on_verdict, session_id, held)
        on_failure = partial(self.fail, session_id, held)
        held.task = BeamTask(beams, held.spec, held.width, trees, Meter(step.arrived_ns), on_verdict, on_failure)
        self._submit(held.task)

    def _on_verdict(self, session_id: bytes, held: TargetState, verdict: TargetVerdict, times: ComputeTimes) -> None:
        fence = Fence(session_id, held.epoch, verdict.base_len)
        if held.prefix_len:
            verdict, held.prefix_len = verdict._replace(prefix_len=held.prefix_len), 0
        answer = SessionAnswer(fence, verdict, verdict.base_len, held.cached_len, times)
        held.verdicts.append(answer)
        held.finish_reason = verdict.finish_reason
        task = held.task
        if isinstance(task, BeamTask):
            held.task, task.done = None, True
        elif task is not None:
            # Prepared before the reply, so that a caller who has the answer finds the session at rest.
            task.next_verdict(EMPTY, Meter(), held.next_own)
            task.done = not held.may_go_on
            held.task = None if task.done else task
        held.answer(answer)


def _check_output(grammar: Grammar, output: Sequence[int]) -> None:
    """Raises InvalidRequest about an output that does not follow the grammar, which no target would have committed."""
    if grammar.follower is not None and not grammar.follower.follows(output):
        what = f"an output of {len(output)} tokens, of which {max(grammar.follower.reach(output), 0)} are allowed"
        raise InvalidRequest("session.token_ids", what, ("one that follows ", Field("session.grammar")))


def _check_own(hosting: Hosting[Any] | None, draft_count: int, shape: TreeShape | None, message: str) -> None:
    """Raises InvalidRequest unless a session's drafter, if it has one, makes what a message asks for."""
    if hosting is None and draft_count:
        limit = "0 for a session that was opened without a drafter"
        raise InvalidRequest(f"{message}.own_draft_count", draft_count, limit)
    if shape is not None and (hosting is None or not hosting.makes_trees):
        who = "a session without a drafter" if hosting is None else f"the drafter {hosting.name}, which makes chains"
        raise InvalidRequest(f"{message}.own_shape", "present", f"absent for {who}")


def _check_proposal(tree: TokenTree, spec: SessionSpec, base_len: int) -> None:
    """Raises InvalidRequest unless a proposal fits the request: no row past its end, and what its rule needs."""
    room, depth = spec.max_len - base_len, max(tree.depths)
    if depth > room:
        raise InvalidRequest("proposal", f"{depth} tokens deep", f"at most {room} deep here, up to max_len")
    rule, num_distributions = spec.acceptance.rule, len(tree.distributions)
    if num_distributions and not rule.needs_distributions:
        raise InvalidRequest("proposal.distributions", f"{num_distributions} entries", f"empty under the rule {rule}")
    if rule.needs_distributions and len(tree) > num_distributions:
        raise InvalidRequest("proposal.distributions", "empty", f"one entry for each row under the rule {rule}")
