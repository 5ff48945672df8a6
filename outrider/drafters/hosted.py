"""Models that guess in the target's process, just before the forward that checks: an ordinary draft model, or a head.

Such guesses cost no message: a round takes one hop, and none where it is unasked.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from outrider.drafters.drafter import NO_PROPOSAL, DrafterProposal, DrafterSession, GuessLimits
from outrider.drafters.lines import is_plain, line_decoder
from outrider.drafters.masked import as_wanted
from outrider.drafters.model_drafter import MODEL, DraftTask, Learn, ModelDrafter, noise_of
from outrider.drafters.scales import Experience
from outrider.engine.batching import MAX_STEP_TOKENS
from outrider.engine.cache import KVCache
from outrider.engine.devices import send
from outrider.engine.heads.block_head import BlockHead
from outrider.engine.heads.fused import FusedHead, head_decoder
from outrider.engine.heads.head import Head
from outrider.engine.models.decoder import Decoder
from outrider.engine.ops import Ops
from outrider.engine.runner import Allocate, ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.session import Session
from outrider.errors import CacheFull, OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree

log = structlog.get_logger()

HOSTED = "hosted"
"""Name of the ordinary draft model in the target's process."""
# States that are copied at a time, so that what they are made of stays small.
COPIED_ROWS = 512


class FeatureCopy:
    """Makes states of a head, or keys and values of one without, from what the target has stored of its tokens."""

    def __init__(self, target: KVCache, head: Head, decoder: Decoder) -> None:
        """`target` taps all boundaries that the head reads; `decoder` computes it."""
        self._target = target
        self.head = head
        self._fused = decoder if isinstance(decoder, FusedHead) else None

    @cached_property
    def _columns(self) -> Tensor | None:
        """What the head reads of a slot's features, None for all; others may tap more until there is the first one."""
        columns = self._target.columns(self.head.facts.taps)
        is_whole = len(columns) == self._target.features.shape[1] and (columns == np.arange(len(columns))).all()
        return None if is_whole else send(columns, self._target.features.device)

    def __call__(self, source: Session, session: Session, start: int, end: int) -> None:
        """Writes what is made of tokens [start, end), which the target has cached in `source`, into `session`."""
        own = session.table.cache.features
        for first in range(start, end, COPIED_ROWS):
            last = min(first + COPIED_ROWS, end)
            places = source.table.slots(first, last), session.table.slots(first, last)
            features, rows = self._target.features, places[0]
            if self._columns is not None:
                features = features.index_select(0, send(rows, own.device)).index_select(1, self._columns)
                rows = np.arange(last - first)
            if self._fused is not None and self._fused.copy_states(features, rows, own, places[1]):
                continue
            features = features.index_select(0, send(rows, own.device)).float()
            if isinstance(self.head, BlockHead):
                self.head.keep(features, first, places[1], session.table.cache)
                continue
            states = self.head.states_of(features)
            # No guesses follow a committed token.
            states = torch.cat((states, states.new_zeros(len(states), 1)), 1).to(own.dtype)
            own.index_copy_(0, send(places[1], own.device), states)


class Lesson(NamedTuple):
    """A proposal that can be learned from, when the tokens that follow base_len are committed."""

    learn: Learn
    tree: TokenTree
    base_len: int


class TaskDraft(DrafterSession):
    """A session's part whose proposal is the work of a task."""

    task: DraftTask | None = None

    def truncate(self, length: int) -> None:
        self._end()

    def free(self) -> None:
        self._end()

    def _end(self, proposal: DrafterProposal = NO_PROPOSAL) -> None:
        """Ends the task that was begun, if there is one, with this proposal."""
        if self.task is not None:
            self.task.stopped = True
        self.task, self.proposal = None, proposal


class HostedDraft(TaskDraft):
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
        TaskDraft.__init__(self)
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

    def propose(self, session: Session, limits: GuessLimits) -> None:
        self._end()
        token_ids = session.token_ids
        if self._lesson is not None:
            self._lesson.learn(self._lesson.tree, token_ids[self._lesson.base_len :])
            self._lesson = None
        # The last token of a request is the target's alone, and no guess may lie past the draft's context.
        room = min(self._spec.max_len - 1, self._runner.context_len) - len(token_ids)
        if room < 0:
            return
        if self._copy is not None:
            # A head has weights for so many guesses one after the other, of which a tree may have several side by side.
            room = min(room, self._copy.head.facts.max_draft_count or room)
        masks = self._runner.config.masks
        if masks is not None and len(token_ids) + masks.count(1) > self._runner.context_len:
            # A block of fewer rows would be another guess.
            room = 0
        draft_count = min(limits.draft_count, room)
        if self._copy is not None and not draft_count:
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
        room = min(room, limits.max_depth)
        # In lines (outrider.drafters.lines) more steps cost less than rows that are computed in vain; but all rows of a
        # shape with expansions are wanted, and elsewhere each step is a call.
        is_free = limits.shape is None or not limits.shape.expansions
        has_lines = is_free and line_decoder(self._runner) is not None
        in_lines = has_lines and is_plain(task.draw_input, wants_logprob=task.wants_logprob)
        self.task = as_wanted(task, masks, limits.shape, limits.draft_count, room, self._known, one_by_one=in_lines)

    def _done(self, caught_up_count: int, task: DraftTask) -> None:
        tree = task.proposal
        if task.learn is not None:
            self._lesson = Lesson(task.learn, tree, task.base_len)
        self._end(DrafterProposal(tree, task.meter.times(), caught_up_count))

    def _follow(self, token_ids: Sequence[int]) -> Session:
        """Session of just these tokens, with what is cached of them."""
        if self._session is None:
            self._session = self._runner.open(token_ids, self._spec.prompt_len, self._salt)
            self._session.grammar = self.grammar
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
        if copy.head.facts.masks is not None:
            # Keys and values are there, of all but the last token.
            own.advance(end, EMPTY)

    def truncate(self, length: int) -> None:
        self._end()
        if self._lesson is not None and length < self._lesson.base_len:
            self._lesson = None
        self._known_len = min(self._known_len, length)
        self._stated_len = min(self._stated_len, length)

    def free(self) -> None:
        self._end()
        if self._session is not None:
            self._session.free()
        self._session, self._known_len, self._stated_len, self._lesson = None, 0, 0, None

    def _fail(self, error: OutriderError) -> None:
        log.info("no guesses", model=self._runner.identity.model_name, reason=error.message)
        self.free()


class HostedModel:
    """A model in this process that guesses for the target: an ordinary draft model, or a head.

    The proposals of an ordinary one are those of a draft service with the same model, bit for bit. It has a cache of
    its own. A session for which that has no room has no guesses, and takes nothing from others.
    """

    rules = frozenset(Rule)
    makes_trees = True

    def __init__(
        self, runner: ModelRunner, top_n: int = DEFAULT_TOP_N, copy: FeatureCopy | None = None, name: str = HOSTED
    ) -> None:
        """`copy` as in HostedDraft."""
        self.name = name
        self.runner = runner
        self.copy = copy
        self._known = Experience()
        self._drafter = ModelDrafter(runner, without_room, top_n)

    def open(self, spec: SessionSpec, salt: bytes | None) -> HostedDraft:
        return HostedDraft(self.runner, spec, salt, self.copy, self._known)

    def advance(self, drafts: Sequence[HostedDraft]) -> None:
        self._drafter.advance([draft.task for draft in drafts if draft.task is not None])


def host_head(target: ModelRunner, head: Head, digest: str, ops: Ops | None = None) -> HostedModel:
    """The drafter of a head, named as its method; from now on the target keeps what it reads."""
    runner = head_runner(target, head, digest, ops)
    return HostedModel(runner, copy=FeatureCopy(target.cache, head, runner.model), name=head.facts.method)


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
