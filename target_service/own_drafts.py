"""Guesses that the target makes for itself, just before the forward that checks them.

A drafter in the target's process costs no message: a round of such guesses takes one hop, and none where it is unasked.
A proposal is made and decided within one step, so that nothing undecided exists between two messages; it depends on
tokens, K, noise and sampling alone, and never on what was computed before. All of it runs on the device thread.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import structlog
import torch

from outrider.drafters.model_drafter import MODEL, DraftTask, Learn, ModelDrafter, noise_of
from outrider.drafters.scales import Experience
from outrider.drafters.tree_drafter import as_tree
from outrider.engine.batching import MAX_STEP_TOKENS
from outrider.engine.cache import KVCache
from outrider.engine.heads.fused import FusedHead, head_decoder
from outrider.engine.heads.head import Head
from outrider.engine.models.decoder import Decoder
from outrider.engine.ops import Ops
from outrider.engine.runner import Allocate, ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.session import Session
from outrider.errors import CacheFull, OutriderError
from outrider.parameters import Rule, SessionSpec
from outrider.timing import ComputeTimes, Meter
from outrider.token_tree import EMPTY, TokenTree, TreeShape

log = structlog.get_logger()

HOSTED = "hosted"
"""Name of the ordinary draft model in the target's process."""
# States that are copied at a time, so that what they are made of stays small.
COPIED_ROWS = 512


class OwnProposal(NamedTuple):
    """Proposal of a session's own drafter, its cost, and how many committed tokens had to be read first."""

    tree: TokenTree
    times: ComputeTimes
    caught_up_count: int


NO_PROPOSAL = OwnProposal(EMPTY, ComputeTimes(), 0)


class Asked(NamedTuple):
    """Request to a drafter: so many guesses, a chain or the rows of a tree of a shape, at most so deep."""

    draft_count: int = 0
    shape: TreeShape | None = None
    max_depth: int = 0


NOT_ASKED = Asked()


class OwnDraft(Protocol):
    """State of a drafter for one session, and the proposal that it makes for it."""

    proposal: OwnProposal | None
    """The one that was begun last; None while it is on its way."""

    @property
    def is_reading(self) -> bool:
        """Whether many tokens are to be read first, for which other sessions need not wait."""

    @property
    def reads_features(self) -> bool:
        """Whether it needs the target's features of all committed tokens but the last."""

    def begin(self, session: Session, draft_count: int) -> None:
        """Begins a proposal after the tokens of the target's session, or just reads them for 0.

        Whatever was begun before ends. What reads features must find all but the last token cached.
        """

    def truncate(self, length: int) -> None:
        """Committed tokens from here on are no longer so, and what was begun ends."""

    def free(self) -> None:
        """Gives back what is kept; what was begun ends."""


@runtime_checkable
class ProbingDraft(OwnDraft, Protocol):
    """A draft that finds its guesses in rows of the target's own forwards."""

    probes: TokenTree
    """Rows that the next forward is to compute after the committed tokens, beside the proposal; EMPTY: none."""

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes the likeliest token after each probe of the forward of a verdict, and drops the probes.

        Called with every verdict, when the session holds its tokens; with nothing where no probe was computed.
        """


DraftT = TypeVar("DraftT", bound=OwnDraft)


class OwnDrafter(Protocol[DraftT]):
    """Makes proposals in the target's process."""

    rules: frozenset[Rule]
    makes_trees: bool
    """Whether its drafts are instances of HostedDraft that begin trees."""

    def open(self, spec: SessionSpec, salt: bytes | None) -> DraftT:
        """A session's part; with a salt it shares what is read of equal tokens with those of the same salt."""

    def advance(self, drafts: Sequence[DraftT]) -> None:
        """Makes one step of all drafts, none of which has its proposal."""


class Hosting(Generic[DraftT]):
    """A drafter, and the proposals that sessions make with it."""

    def __init__(self, name: str, drafter: OwnDrafter[DraftT], runner: ModelRunner | None = None) -> None:
        """`runner` is the model that the drafter has, if it has one of its own."""
        self.name = name
        self.drafter = drafter
        self.runner = runner

    @property
    def rules(self) -> frozenset[Rule]:
        return self.drafter.rules

    @property
    def makes_trees(self) -> bool:
        """Whether a shape may be asked for."""
        return self.drafter.makes_trees

    def open(self, spec: SessionSpec, salt: bytes | None) -> DraftT:
        return self.drafter.open(spec, salt)

    def begin(self, draft: DraftT, session: Session, asked: Asked) -> None:
        """Lets a draft begin, a tree only where it makes some; one that fails has an empty proposal."""
        try:
            if asked.shape is not None and isinstance(draft, HostedDraft):
                draft.begin_tree(session, asked.draft_count, asked.shape, asked.max_depth)
            else:
                draft.begin(session, asked.draft_count)
        except Exception:
            # Guesses are worth no request, and what a bug says is for the log.
            log.exception("drafting failed", drafter=self.name, num_sessions=1)
            give_up(draft)

    def advance(self, drafts: Sequence[DraftT]) -> None:
        """Makes one step of all drafts without a proposal; those of a step that fails have an empty one."""
        busy = [draft for draft in drafts if draft.proposal is None]
        if not busy:
            return
        try:
            self.drafter.advance(busy)
        except Exception:
            log.exception("drafting failed", drafter=self.name, num_sessions=len(busy))
            for draft in busy:
                give_up(draft)


def give_up(draft: OwnDraft) -> None:
    """Leaves a draft with an empty proposal and nothing else."""
    draft.free()
    draft.proposal = NO_PROPOSAL


class FeatureCopy:
    """Makes states of a head from what the target has stored of its tokens."""

    def __init__(self, target: KVCache, head: Head, decoder: Decoder) -> None:
        """`target` taps all boundaries that the head reads; `decoder` computes it."""
        self._target = target
        self.head = head
        self._fused = decoder if isinstance(decoder, FusedHead) else None
        size = target.features.shape[1] // len(target.taps)
        places = [target.taps.index(tap) * size for tap in head.facts.taps]
        columns = torch.cat([torch.arange(place, place + size) for place in places]).to(target.features.device)
        # Mostly there are no other taps.
        self._columns = None if columns.tolist() == list(range(target.features.shape[1])) else columns

    def __call__(self, source: Session, session: Session, start: int, end: int) -> None:
        """Writes the states of tokens [start, end), which the target has cached in `source`, into `session`."""
        own = session.table.cache.features
        for first in range(start, end, COPIED_ROWS):
            last = min(first + COPIED_ROWS, end)
            places = source.table.slots(first, last), session.table.slots(first, last)
            fused = self._fused if self._columns is None else None
            if fused is not None and fused.copy_states(self._target.features, places[0], own, places[1]):
                continue
            features = self._target.features.index_select(0, torch.from_numpy(places[0]).to(own.device)).float()
            states = self.head.states_of(features if self._columns is None else features.index_select(1, self._columns))
            # No guesses follow a committed token.
            states = torch.cat((states, states.new_zeros(len(states), 1)), 1).to(own.dtype)
            own.index_copy_(0, torch.from_numpy(places[1]).to(own.device), states)


class Lesson(NamedTuple):
    """A proposal that can be learned from, when the tokens that follow base_len are committed."""

    learn: Learn
    tree: TokenTree
    base_len: int


class HostedDraft:
    """A session of a model in this process, which follows a session of the target."""

    def __init__(
        self,
        runner: ModelRunner,
        spec: SessionSpec,
        salt: bytes | None,
        copy: FeatureCopy | None = None,
        known: Experience | None = None,
    ) -> None:
        """With `copy` the model is a head, which reads the target's features beside the tokens.

        `known` is what sessions of the model have learned about its trees.
        """
        self.proposal: OwnProposal | None = NO_PROPOSAL
        self.task: DraftTask | None = None
        self._runner = runner
        self._spec = spec
        self._copy = copy
        self._known = known or Experience()
        self._lesson: Lesson | None = None
        # Without keys and values there is nothing that sessions could share.
        self._salt = salt if runner.config.num_layers else None
        self._session: Session | None = None
        self._known_len = 0  # committed tokens that its session holds
        self._stated_len = 0  # tokens after which the target's own state is in the cache of a head

    @property
    def is_reading(self) -> bool:
        return self.task is not None and self.task.draw_input.feed.num_committed > MAX_STEP_TOKENS

    @property
    def reads_features(self) -> bool:
        return self._copy is not None

    def begin(self, session: Session, draft_count: int) -> None:
        self._begin(session, draft_count)

    def begin_tree(self, session: Session, max_rows: int, shape: TreeShape, max_depth: int) -> None:
        """Begins a proposal of at most max_rows rows, none of them more than max_depth deep; as `begin` does else."""
        self._begin(session, max_rows, shape, max_depth)

    def _begin(self, session: Session, draft_count: int, shape: TreeShape | None = None, max_depth: int = 0) -> None:
        self._stop()
        token_ids = session.token_ids
        if self._lesson is not None:
            self._lesson.learn(self._lesson.tree, token_ids[self._lesson.base_len :])
            self._lesson = None
        # The last token of a request is the target's alone, and no guess may lie past the draft's context.
        room = min(self._spec.max_len - 1, self._runner.context_len) - len(token_ids)
        if room < 0:
            return
        num_rows, draft_count = draft_count, min(draft_count, room)
        if self._copy is not None:
            draft_count = min(draft_count, self._copy.head.facts.max_draft_count or draft_count)
            if not draft_count:
                # What it would read is kept by the target, and read when a guess is wanted.
                return
        own = self._follow(token_ids)
        if self._copy is not None:
            try:
                self._state(self._copy, session, own)
            except CacheFull as error:
                self._fail(error)
                return
        caught_up_count = len(token_ids) - own.cached_len
        self.proposal = None
        task = DraftTask(
            session=own,
            spec=self._spec,
            noise=noise_of(MODEL, self._spec.acceptance.rule),
            draft_count=draft_count,
            meter=Meter(),
            on_done=partial(self._done, caught_up_count),
            on_failure=self._fail,
            # Of the last token a head knows its own guess of a state only, until the target has read it.
            num_private=1 if self._copy is not None else 0,
        )
        if shape is not None and draft_count:
            task = as_tree(task, shape, num_rows, min(room, max_depth), self._known)
        self.task = task

    def _done(self, caught_up_count: int, task: DraftTask) -> None:
        tree = task.proposal
        if task.learn is not None:
            self._lesson = Lesson(task.learn, tree, task.base_len)
        self._end(OwnProposal(tree, task.meter.times(), caught_up_count))

    def _follow(self, token_ids: Sequence[int]) -> Session:
        """Session of just these tokens, with what is cached of them."""
        if self._session is None:
            self._session = self._runner.open(token_ids, self._spec.prompt_len, self._salt)
            self._session.take_prefix()
            self._stated_len = self._session.cached_len
        else:
            if self._copy is not None:
                # What a head has cached of guesses stands on guesses, also where they were right.
                self._session.truncate(self._known_len)
                self._stated_len = min(self._stated_len, self._session.cached_len)
            self._session.replace_tail(self._known_len, token_ids[self._known_len :])
        self._known_len = len(token_ids)
        return self._session

    def _state(self, copy: FeatureCopy, session: Session, own: Session) -> None:
        """Gives a head the states that it reads next; raises CacheFull."""
        end = len(own) - 1
        if not self._runner.config.num_layers:
            # Nothing of earlier tokens is needed but the one state that the last one stands on.
            own.advance(end, EMPTY)
            self._stated_len = max(end - 1, 0)
        own.table.reserve(len(own), min(own.next_position, self._stated_len))
        copy(session, own, self._stated_len, end)
        self._stated_len = end

    def truncate(self, length: int) -> None:
        self._stop()
        if self._lesson is not None and length < self._lesson.base_len:
            self._lesson = None
        self._known_len = min(self._known_len, length)
        self._stated_len = min(self._stated_len, length)

    def free(self) -> None:
        self._stop()
        if self._session is not None:
            self._session.free()
        self._session, self._known_len, self._stated_len, self._lesson = None, 0, 0, None

    def _stop(self) -> None:
        if self.task is not None:
            self.task.stopped = True
        self._end(NO_PROPOSAL)

    def _end(self, proposal: OwnProposal) -> None:
        self.task, self.proposal = None, proposal

    def _fail(self, error: OutriderError) -> None:
        log.info("no guesses", model=self._runner.identity.model_name, reason=error.message)
        self.free()


class HostedModel:
    """A model in this process that guesses for the target: an ordinary draft model, or a head.

    The proposals of an ordinary one are those of a draft service with the same model, bit for bit. It has a cache of
    its own. A session for which that has no room has no guesses, and takes nothing from others.
    """

    rules = frozenset(Rule)

    def __init__(self, runner: ModelRunner, top_n: int = DEFAULT_TOP_N, copy: FeatureCopy | None = None) -> None:
        """`copy` as in HostedDraft."""
        self.runner = runner
        self.copy = copy
        self.makes_trees = copy is None
        self._known = Experience()
        self._drafter = ModelDrafter(runner, without_room, top_n)

    def open(self, spec: SessionSpec, salt: bytes | None) -> HostedDraft:
        return HostedDraft(self.runner, spec, salt, self.copy, self._known)

    def advance(self, drafts: Sequence[HostedDraft]) -> None:
        self._drafter.advance([draft.task for draft in drafts if draft.task is not None])


def host_head(target: ModelRunner, head: Head, digest: str, ops: Ops | None = None) -> Hosting[HostedDraft]:
    """The drafter of a head, named as its method; from now on the target keeps what it reads."""
    runner = head_runner(target, head, digest, ops)
    return Hosting(head.facts.method, HostedModel(runner, copy=FeatureCopy(target.cache, head, runner.model)), runner)


def head_runner(target: ModelRunner, head: Head, digest: str, ops: Ops | None = None) -> ModelRunner:
    """Runner that computes a head; from now on the target keeps what it reads.

    Its cache has room for as many tokens as the target's. `digest` names the head's weights, `ops` are
    those that it computes with, by default the target's.
    """
    target.tap(head.facts.taps)
    identity = replace(target.identity, model_name=head.facts.method, model_hash=digest)
    decoder = head_decoder(head, target.parts, ops or target.ops)
    runner = ModelRunner(decoder, identity, target.pool.num_blocks * target.pool.block_size)
    runner.cache.keep_features(head.facts.state_size + 1)
    return runner


def without_room(allocate: Allocate) -> None:
    allocate()


class OwnSession(NamedTuple):
    """A session's part in one drafter."""

    hosting: Hosting[Any]
    draft: OwnDraft
    probing: ProbingDraft | None = None
    """The draft itself, where it is one that probes."""

    @classmethod
    def of(cls, hosting: Hosting[Any], spec: SessionSpec, salt: bytes | None) -> Self:
        # What is committed is decided by the follower of the target's own.
        guessing = None if spec.grammar is None else spec.grammar.session()
        draft = hosting.open(replace(spec, grammar=guessing), salt)
        # Asked once: a protocol's every name is looked up for the answer.
        return cls(hosting, draft, draft if isinstance(draft, ProbingDraft) else None)


def guess(sessions: Sequence[OwnSession], awaited: Sequence[OwnDraft]) -> None:
    """Lets drafters go on until all awaited proposals are there, but for those that have much to read first.

    Such a one gets one step of its drafter, with as many rows as that reads at a time, and then its turn again; so
    does a session that is not awaited.
    """
    hostings = {each.hosting.name: each.hosting for each in sessions}
    while True:
        for name, hosting in hostings.items():
            hosting.advance([each.draft for each in sessions if each.hosting.name == name])
        if not any(draft.proposal is None and not draft.is_reading for draft in awaited):
            return
