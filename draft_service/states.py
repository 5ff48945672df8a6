"""The sessions of a draft service by what guesses for them: its model, a beam search, or another drafter.

A session's class is chosen when it is opened. Everything here runs on the device thread.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from draft_service.tasks import HostedTask, Task
from outrider.beams import LiveBeam
from outrider.drafters.beam_drafter import BeamDraftTask
from outrider.drafters.drafter import Drafter, GuessLimits, HostedSession
from outrider.drafters.masked import as_wanted
from outrider.drafters.model_drafter import MODEL, DraftTask, Inner, Learn, noise_of
from outrider.drafters.run_ahead import BranchingTask, DrawnBranchingTask, Left, settle
from outrider.drafters.scales import Experience
from outrider.engine.beams import Beams
from outrider.engine.branching import Branching
from outrider.engine.models.config import Masks
from outrider.engine.noise import Purpose
from outrider.errors import InvalidRequest, OutriderError
from outrider.estimates.timing import Meter
from outrider.model_service.outbox import SessionAnswer
from outrider.model_service.session_state import SessionState
from outrider.token_tree import Branch, TokenTree, TreeShape

WHERE_BEAMS = "present where the session was opened with beams, and only there"


class Ends(NamedTuple):
    """Functions that a job calls when it has ended, with what it finds before, where that is several things, and with
    the error of its end.
    """

    on_done: Callable[[Task], None]
    on_found: Callable[[BranchingTask, TokenTree | list[Branch]], None]
    on_failure: Callable[[OutriderError], None]


class Search(NamedTuple):
    """A beam search that a message asks for: how wide it is, and its live beams, none at the prompt."""

    width: int
    beams: tuple[LiveBeam, ...]

    @property
    def output_len(self) -> int:
        """Number of tokens of each beam after the prompt."""
        return len(self.beams[0].token_ids) if self.beams else 0


class Wanted(NamedTuple):
    """Number of guesses that a message asks for. `arrived_ns` is when it came, on time.perf_counter_ns.

    With a shape they are rows of a tree, without one a chain.
    """

    draft_count: int
    arrived_ns: int
    shape: TreeShape | None = None
    search: Search | None = None
    branch_count: int = 0
    """Number of branches that are to follow the chain."""
    went_on: bool = False
    """Whether the target has gone on by itself: with what a branch had for these tokens, or plainly."""


@dataclass(slots=True, eq=False)
class DraftState(SessionState[Task]):
    """A session as the draft keeps it."""

    committed_len: int = field(init=False)
    asked_len: int = 0
    """base_len of the last request of this epoch, 0 before the first."""
    reply: SessionAnswer[TokenTree] | None = None
    """The answer to the last request of this epoch, None while it is under way."""

    def __post_init__(self) -> None:
        self.committed_len = len(self.session)

    @property
    def answerable(self) -> Collection[int]:
        return (self.asked_len,)

    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; returns whether a job was stopped."""
        was_stopped = self.stop_job()
        self.session.truncate(min(length, len(self.session)))
        self.epoch, self.committed_len, self.asked_len, self.reply = epoch, length, 0, None
        return was_stopped

    def check(self, wanted: Wanted, base_len: int) -> None:
        """Raises InvalidRequest about a message that asks for what the session's drafter does not make."""
        if wanted.search is not None:
            raise InvalidRequest("advance.beams", "present", WHERE_BEAMS)
        self.check_branches(wanted)

    def check_branches(self, wanted: Wanted) -> None:
        """Raises InvalidRequest about branches that the session's drafter does not make."""
        for name, value, none in (("branch_count", wanted.branch_count, "0"), ("went_on", wanted.went_on, "false")):
            if value and not self.makes_branches:
                raise InvalidRequest(f"advance.{name}", value, f"{none} but for chains of a model, not under typical")

    @property
    def makes_branches(self) -> bool:
        """Whether branches may be asked for."""
        return False

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Makes token_ids the tokens from position base_len on; what they begin with in common stays cached."""
        self.session.replace_tail(base_len, token_ids)

    def back_to(self, length: int) -> None:
        """Drops the guesses of a job that was stopped, before it begins anew."""
        self.session.truncate(length)

    @abstractmethod
    def new_task(self, wanted: Wanted, room: int, ends: Ends) -> Task:
        """The job of a request, whose tokens the session holds, with room for so many more."""


@dataclass(slots=True, eq=False)
class ModelState(DraftState):
    """A session whose guesses are the model's. After the committed tokens it may hold guesses, as a cache."""

    drafter: str = field(default=MODEL, kw_only=True)
    lane: int = field(default=0, kw_only=True)
    """Number of the draft among those of the request."""
    known: Experience = field(kw_only=True)
    """What sessions of the model have learned about its trees."""
    inner: Inner | None = None
    """Session of the cheaper draft that guesses for this one; None where none does."""
    learn: Learn | None = None
    """Function of the last job that learns from the tokens which follow its proposal."""
    masks: Masks | None = field(default=None, kw_only=True)
    """Masks after which the session's drafter guesses several tokens at once; None where it makes steps."""
    branching: BranchingTask | None = None
    """The last job, where it made branches."""
    left: Left | None = None
    """What the job has computed after the tokens that were committed last."""

    @property
    def makes_branches(self) -> bool:
        return self.spec.acceptance.rule.runs_ahead and self.masks is None

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        made = self.reply and self.reply.content
        if made is not None and self.learn is not None and self.asked_len == base_len:
            self.learn(made, token_ids)
        last, self.branching = self.branching, None
        if last is not None and base_len == last.base_len == len(self.session):
            if last.learn is not None:
                last.learn(last.growth.tree(), token_ids)
            self.left = settle(last, token_ids)
        else:
            DraftState.commit(self, base_len, token_ids)

    def rewind(self, epoch: int, length: int) -> bool:
        self.branching = None
        return DraftState.rewind(self, epoch, length)

    def new_task(self, wanted: Wanted, room: int, ends: Ends) -> Task:
        left, self.left = self.left, None
        if wanted.branch_count and room > 0:
            return self._branching_task(wanted, room, left, ends)
        task = DraftTask(
            session=self.session,
            spec=self.spec,
            noise=noise_of(self.drafter, self.spec.acceptance.rule),
            draft_count=max(0, min(wanted.draft_count, room)),
            meter=Meter(wanted.arrived_ns),
            on_done=ends.on_done,
            on_failure=ends.on_failure,
            lane=self.lane,
            inner=self.inner,
        )
        task = as_wanted(task, self.masks, wanted.shape, wanted.draft_count, room, self.known)
        self.learn = task.learn
        return task

    def _branching_task(self, wanted: Wanted, room: int, left: Left | None, ends: Ends) -> BranchingTask:
        count = trunk_len = min(wanted.draft_count, room)
        if wanted.went_on:
            # What the target verifies is a branch, as it was handed on, or nothing but its own token.
            trunk_len = left.guess_count if left is not None else 0
        limits = trunk_len, count, wanted.branch_count, room
        growth, rows = left.growth_for(*limits) if left is not None else (Branching(*limits), {})
        noise, known = noise_of(self.drafter, self.spec.acceptance.rule), self.known
        common: dict[str, Any] = {
            "session": self.session,
            "spec": self.spec,
            "noise": noise,
            "draft_count": count,
            "meter": Meter(wanted.arrived_ns),
            "lane": self.lane,
            "growth": growth,
            "computed": rows,
            **ends._asdict(),
        }
        if noise is Purpose.TOKEN:
            learn = partial(known.scales.learn, self.spec)
            self.branching = BranchingTask(**common, learn=learn, scale=known.scales.of(self.spec))
        else:
            learn = partial(known.ranks.learn, self.spec, noise)
            self.branching = DrawnBranchingTask(**common, learn=learn, rate=known.ranks.of(self.spec, noise)[0])
        self.learn = None
        return self.branching

    def free_parts(self) -> None:
        if self.inner is not None:
            self.inner.free()


@dataclass(slots=True, eq=False)
class BeamDraftState(DraftState):
    """A session that is a beam search: its tokens are the prompt, and the live beams come with each request."""

    beams: Beams = field(init=False)
    """Beams on the prompt; after the live ones they hold guesses."""

    def __post_init__(self) -> None:
        DraftState.__post_init__(self)
        self.beams = Beams(self.session)

    @property
    def cached_len(self) -> int:
        live = self.beams.parents or self.beams.sessions or [self.session]
        return min(*(session.cached_len for session in live), self.committed_len)

    def check(self, wanted: Wanted, base_len: int) -> None:
        if wanted.search is None:
            raise InvalidRequest("advance.beams", "absent", WHERE_BEAMS)
        self.check_branches(wanted)
        length = self.spec.prompt_len + wanted.search.output_len
        if base_len != length:
            raise InvalidRequest("fence.base_len", base_len, f"{length}, a prompt and its beams")

    def rewind(self, epoch: int, length: int) -> bool:
        self.beams.free_beams()
        return DraftState.rewind(self, epoch, length)

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Does nothing: what is committed are the beams, which come with the request."""

    def back_to(self, length: int) -> None:
        """Does nothing: the next job begins with the beams of its request."""

    def new_task(self, wanted: Wanted, room: int, ends: Ends) -> Task:
        if wanted.search is None:
            raise InvalidRequest("advance.beams", "absent", WHERE_BEAMS)
        self.beams.become(wanted.search.beams)
        return BeamDraftTask(
            beams=self.beams,
            spec=self.spec,
            width=wanted.search.width,
            draft_count=wanted.draft_count if wanted.search.beams else 0,
            max_steps=room,
            meter=Meter(wanted.arrived_ns),
            on_done=ends.on_done,
            on_failure=ends.on_failure,
        )

    def free_parts(self) -> None:
        self.beams.free_beams()


@dataclass(slots=True, eq=False)
class HostedState(DraftState):
    """A session whose guesses are those of a drafter beside the service's model, which computes nothing for it."""

    hosted: HostedSession = field(kw_only=True)

    @property
    def cached_len(self) -> int:
        # The drafter has read all that is committed; the model's cache has nothing of it, and is no sign of drift.
        return self.committed_len

    def check(self, wanted: Wanted, base_len: int) -> None:
        DraftState.check(self, wanted, base_len)
        check_shape(self.hosted.drafter, wanted, "advance")

    def rewind(self, epoch: int, length: int) -> bool:
        was_stopped = DraftState.rewind(self, epoch, length)
        self.hosted.part.truncate(len(self.session))
        return was_stopped

    def new_task(self, wanted: Wanted, room: int, ends: Ends) -> Task:
        self.hosted.propose(self.session, GuessLimits(wanted.draft_count, wanted.shape).within(room))
        return HostedTask(self.session, self.hosted, on_done=ends.on_done, on_failure=ends.on_failure)

    def free_parts(self) -> None:
        self.hosted.part.free()


def check_shape(drafter: Drafter[Any], wanted: Wanted, action: str) -> None:
    """Raises InvalidRequest about a tree that is asked of a drafter which makes chains."""
    if wanted.shape is not None and not drafter.makes_trees:
        raise InvalidRequest(f"{action}.shape", "present", f"absent for the drafter {drafter.name}, which makes chains")
