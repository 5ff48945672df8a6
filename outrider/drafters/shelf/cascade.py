"""Speeds a draft up with a cheaper guess that it verifies itself, and lets the cheaper one draw the later rows.

Chen et al., "Cascade speculative drafting for even faster LLM inference", 2023, arXiv 2312.11462. Vertical: the draft
runs one forward over a chain of guesses, draws after each row with just the noise that it would draw with one by one,
and keeps the rows whose tokens are its draws. So its proposals are, token by token and with the same distributions,
those of the draft alone, whatever guesses; the paper's lenience at this level would change them, and is left out.
Horizontal: after the first J rows of a proposal the cheaper guesser draws, and each row has its drawer's distribution.

What guesses is the text of the session itself, or a smaller model with sessions of its own, which may have a cascade in
turn. Guesses are worth no request: who cannot guess, does not. All of it runs on the device thread.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog

from outrider.drafters.guess_counts import NUM_SAMPLES, Chance, RowSeconds, share_guesses
from outrider.drafters.model_drafter import DraftTask, Guess, Inner, ModelDrafter, Taking
from outrider.drafters.shelf.text_index import TextIndex, continue_from
from outrider.engine.batching import Feed
from outrider.engine.device_thread import own_fault
from outrider.engine.runner import ModelRunner, reopen
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.session import Session
from outrider.errors import CacheFull, OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import Acceptance, DraftDistribution, SessionSpec
from outrider.token_tree import TokenTree

log = structlog.get_logger()

# A session for which no guess was worth its rows is not looked at for up to so many steps.
MAX_REST = 63
# And one that had no guess for so many.
BLIND_REST = 3
# Of so many steps one verifies a guess that seems not worth it, so that a chance that has risen is found.
PROBE_STEPS = 64
# Of so many one is timed, where nothing is guessed.
TIMED_STEPS = 8
# What a bug says is for the log.
FAILED = "guessing for the draft failed"


class CheaperDraft(ABC):
    """State that a cheaper guesser keeps for one session of a draft."""

    def __init__(self) -> None:
        self.task: DraftTask | None = None
        """Work of its model for the guesses that it was asked for; None where they are there."""
        self.guesses: Sequence[Guess] = ()
        self.kind = 0
        """Kind of guesses that `look` found last."""
        self.rest = 0
        """Number of steps for which it is not looked at."""
        self._last_rest = 0

    def take_rest(self, *, is_wanted: bool) -> None:
        """Rests for longer the more often its guesses were not wanted."""
        self.rest = self._last_rest = 0 if is_wanted else min(2 * self._last_rest + 1, MAX_REST)

    @abstractmethod
    def look(self, outer: DraftTask, count: int) -> int:
        """The kind of guesses that it has for the draft's next tokens, up to `count` of them; 0 for none.

        Guesses of one kind are right equally often.
        """

    @abstractmethod
    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        """Begins to guess; final guesses are proposed as they are, with distributions where the rule needs any."""

    def free(self) -> None:
        """Gives back what is kept, and what was begun ends."""
        self.task, self.guesses = None, ()


class TextDraft(CheaperDraft):
    """Guesses that a session's text repeats itself; its kinds are lengths of repetitions."""

    def __init__(self) -> None:
        CheaperDraft.__init__(self)
        self.index = TextIndex()
        """Text of committed tokens only."""
        self._place = -1

    def look(self, outer: DraftTask, count: int) -> int:
        token_ids = outer.session.token_ids
        self.index.follow(token_ids, outer.base_len)
        self.kind, self._place = self.index.find(token_ids)
        return self.kind

    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        needs_law, logprob = outer.needs_distribution and is_final, 0.0 if outer.wants_logprob else None
        self.guesses = [
            # Certain of each token, whatever it is: that is the distribution that it comes with.
            Guess(token_id, DraftDistribution((token_id,), (1,)) if needs_law else None, logprob)
            for token_id in continue_from(outer.session.token_ids, self._place, count)
        ]


class SmallerDraft(CheaperDraft):
    """A session of a smaller model, which follows the draft's, guesses included."""

    def __init__(
        self, runner: ModelRunner, spec: SessionSpec, salt: bytes | None, inner: CheaperDraft | None = None
    ) -> None:
        """`inner` guesses for the smaller model in turn."""
        CheaperDraft.__init__(self)
        self.session: Session | None = None
        self._runner = runner
        self._spec = spec
        # Its guesses are tested by their tokens alone.
        self._silent = replace(spec, acceptance=Acceptance(), draft_logprobs=False)
        self._salt = salt
        self._inner = inner
        self._known_len = 0  # committed tokens that its session holds

    def look(self, outer: DraftTask, count: int) -> int:
        self.kind = int(len(outer.session) + count <= self._runner.context_len)
        return self.kind

    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        self.guesses = ()
        self.task = DraftTask(
            session=self._follow(outer),
            spec=self._spec if is_final else self._silent,
            noise=outer.noise,
            draft_count=count,
            meter=Meter(),
            on_done=self._end,
            on_failure=self._fail,
            lane=outer.lane,
            inner=self._inner,
        )
        # Its noise is that of the draft's round, and the draft's guesses are no more committed than its own.
        self.task.base_len = outer.base_len

    def _follow(self, outer: DraftTask) -> Session:
        """Session of the smaller model with the draft's tokens, with what is cached of them."""
        own, token_ids, known_len = self.session, outer.session.token_ids, self._known_len
        if own is None:
            own = self._runner.open(token_ids, self._spec.prompt_len, self._salt)
            own.owner = outer.session.owner
            own.take_prefix()
        elif len(token_ids) >= known_len and own.token_ids[:known_len] == token_ids[:known_len]:
            own.replace_tail(known_len, token_ids[known_len:])
        else:
            own = reopen(self._runner, own, token_ids, self._spec.prompt_len, self._salt)
        own.grammar = outer.session.grammar
        self.session, self._known_len = own, outer.base_len
        return own

    def _end(self, task: DraftTask) -> None:
        self.task, self.guesses = None, task.guesses

    def _fail(self, error: OutriderError) -> None:
        log.debug("no guesses", model=self._runner.identity.model_name, reason=error.message)
        self.free()

    def free(self) -> None:
        CheaperDraft.free(self)
        if self.session is not None:
            self.session.free()
        if self._inner is not None:
            self._inner.free()
        self.session = None


class Wish(NamedTuple):
    """A task that has a use for up to `limit` guesses."""

    task: DraftTask
    cheaper: CheaperDraft
    limit: int


class Cascade:
    """Guesses for a drafter with cheaper drafts, as many tokens as pay; see model_drafter.Ahead."""

    def __init__(
        self,
        open_cheaper: Callable[[SessionSpec, bytes | None], CheaperDraft],
        drafter: ModelDrafter | None = None,
        depth: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter` computes the tasks of cheaper drafts, where they are of a model.

        After the first `depth` guesses of a proposal, if that is not 0, theirs are proposed. `clock` counts seconds.
        """
        self._open = open_cheaper
        self._drafter = drafter
        self._depth = depth
        self._clock = clock
        self._chances: defaultdict[int, Chance] = defaultdict(Chance)
        self._row_seconds = RowSeconds()
        self._guess_seconds: deque[float] = deque([0.0], maxlen=NUM_SAMPLES)
        self._num_steps = 0
        self._next_probe = PROBE_STEPS
        self._forward_began_s: float | None = None
        self._asked: list[tuple[DraftTask, CheaperDraft]] = []

    def open(self, spec: SessionSpec, salt: bytes | None) -> CheaperDraft:
        return self._open(spec, salt)

    def prepare(self, tasks: Sequence[DraftTask]) -> None:
        self._num_steps += 1
        self._asked = []
        wishes = []
        try:
            # Mostly all rest, which must cost next to nothing.
            for task in tasks:
                if task.inner is None:
                    continue
                if task.draw_input.feed.tree:
                    # Of a step that failed, or in which it had no room.
                    task.draw_input = DrawInput(Feed(task.session), task.spec)
                if task.inner.rest:
                    task.inner.rest -= 1
                elif (wish := self._wish(task, task.inner)) is not None:
                    wishes.append(wish)
            if wishes:
                self._guess_ahead(tasks, wishes)
        except Exception:
            log.exception(FAILED, num_sessions=len(tasks))
            _give_up(tasks)
        is_timed = self._asked or not self._num_steps % TIMED_STEPS
        is_timed = is_timed and not any(task.draw_input.feed.is_prompt for task in tasks)
        self._forward_began_s = self._clock() if is_timed else None

    def learn(self, steps: Sequence[Taking], num_rows: int) -> None:
        if self._forward_began_s is not None:
            self._row_seconds.add(num_rows, self._clock() - self._forward_began_s)
        if self._asked:
            found = {id(step.task): step.guesses for step in steps}
            for task, cheaper in self._asked:
                num_asked, own = len(task.draw_input.feed.tree), found.get(id(task))
                if num_asked and own is not None:
                    num_right = len(own) - 1
                    self._chances[cheaper.kind].add(min(num_right + 1, num_asked), num_right)

    def go_on(self, tasks: Sequence[DraftTask]) -> None:
        if not self._depth:
            return
        began_ns = time.perf_counter_ns()
        drafts: list[tuple[DraftTask, CheaperDraft]] = []
        try:
            for task in tasks:
                left, cheaper = task.draft_count - len(task.guesses), task.inner
                is_wanted = len(task.guesses) >= self._depth and not (task.done or task.stopped)
                if is_wanted and isinstance(cheaper, CheaperDraft) and cheaper.look(task, left):
                    cheaper.begin(task, left, is_final=True)
                    drafts.append((task, cheaper))
            # What is proposed must not depend on who else is there, and so all of it is waited for.
            self._run([cheaper for _, cheaper in drafts], to_end=True)
        except Exception:
            log.exception(FAILED, num_sessions=len(tasks))
            _give_up(tasks)
        taken_ns = time.perf_counter_ns() - began_ns
        for task, cheaper in drafts:
            if cheaper.guesses:
                with own_fault(task):
                    task.meter.extend(taken_ns)
                    task.take(cheaper.guesses)

    def _wish(self, task: DraftTask, cheaper: Inner) -> Wish | None:
        """Wish of a task for guesses; None where it has no use for any, or there are none."""
        wanted = min(task.draft_count, self._depth or task.draft_count)
        # After the last row of a chain the draft draws one more.
        limit = wanted - len(task.guesses) - 1
        if limit < 1 or task.draw_input.feed.is_prompt or not isinstance(cheaper, CheaperDraft):
            return None
        if not cheaper.look(task, limit):
            cheaper.rest = BLIND_REST
            return None
        return Wish(task, cheaper, limit)

    def _guess_ahead(self, tasks: Sequence[DraftTask], wishes: Sequence[Wish]) -> None:
        """Gives chains to the feeds of those for which they pay."""
        num_rows = sum(task.draw_input.feed.num_committed for task in tasks)
        guess_s = statistics.median(self._guess_seconds)
        counts = share_guesses(
            [self._chances[wish.cheaper.kind].value for wish in wishes],
            [wish.limit for wish in wishes],
            len(tasks),
            lambda count, longest: self._row_seconds(num_rows + count) + longest * guess_s,
        )
        if not any(counts) and self._num_steps >= self._next_probe:
            counts[0] = 1
        if any(counts):
            self._next_probe = self._num_steps + PROBE_STEPS
        began_s, asked = self._clock(), []
        for (task, cheaper, _), count in zip(wishes, counts, strict=True):
            cheaper.take_rest(is_wanted=count > 0)
            if count:
                cheaper.begin(task, count)
                asked.append((task, cheaper))
        if not asked:
            return
        is_done = self._run([cheaper for _, cheaper in asked])
        if is_done:
            self._guess_seconds.append((self._clock() - began_s) / max(counts))
        self._asked = asked
        for task, cheaper in asked:
            if cheaper.guesses:
                try:
                    task.session.reserve(len(cheaper.guesses))
                except CacheFull:
                    # No session gives way for what may be wrong.
                    continue
                chain = TokenTree.chain([guess.token_id for guess in cheaper.guesses])
                task.draw_input = DrawInput(Feed(task.session, chain), task.spec)
            elif is_done:
                cheaper.take_rest(is_wanted=False)

    def _run(self, drafts: Sequence[CheaperDraft], *, to_end: bool = False) -> bool:
        """Computes what drafts have begun; returns whether all of it is done.

        Those that have much to read first get one step with the others, and have no guesses yet, unless to_end.
        """
        while self._drafter is not None and (busy := [each.task for each in drafts if each.task is not None]):
            self._drafter.advance(busy)
            if not to_end and all(task.done or task.draw_input.feed.is_prompt for task in busy):
                break
        unread = [each for each in drafts if each.task is not None]
        for each in unread:
            each.task = None
        return not unread


def _give_up(tasks: Sequence[DraftTask]) -> None:
    """Leaves tasks without guesses for them."""
    for task in tasks:
        if isinstance(task.inner, CheaperDraft):
            task.inner.free()


def text_cascade(depth: int = 0, clock: Callable[[], float] = time.perf_counter) -> Cascade:
    """A cascade that looks for repetitions in each session's own text."""
    return Cascade(lambda _spec, _salt: TextDraft(), depth=depth, clock=clock)


def model_cascade(
    runner: ModelRunner,
    top_n: int,
    depth: int = 0,
    *,
    with_text: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Cascade:
    """A cascade with a smaller model, whose own guesses are looked up in the text first if `with_text`.

    Its cache is its own. A session for which that has no room has no guesses, and takes nothing from others.
    """

    def open_smaller(spec: SessionSpec, salt: bytes | None) -> SmallerDraft:
        return SmallerDraft(runner, spec, salt, TextDraft() if with_text else None)

    inner = text_cascade(clock=clock) if with_text else None
    drafter = ModelDrafter(runner, lambda allocate: allocate(), top_n, clock, inner)
    return Cascade(open_smaller, drafter, depth, clock)
