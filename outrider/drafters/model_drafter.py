"""Guesses with a small model: a chain of draws, each after the one before. One step is one token of every active task.

All drafters guess with the service's model, so that sessions of any of them share a forward. They differ in
whose noise they draw with, and so which rules they serve. A session that shares the target's noise draws as the target
does (Daliri, Musco and Suresh, 2024, arXiv 2408.07978). One with noise of its own draws from a truncated and quantised
distribution, and the target tests with exactly that one. The log-probability of a guess is computed after its draw,
for the sessions that want it, and so changes no guess. Runs on the device thread.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.lines import Ranked, StepLine, may_be_line
from outrider.engine.batching import Feed
from outrider.engine.device_thread import EndingTask, own_fault
from outrider.engine.noise import LANES_EACH, Purpose, round_key
from outrider.engine.runner import Allocate, ForwardResult, ModelRunner, reserve
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, DraftDistributions, quantise
from outrider.engine.sampling.draw import DrawInput, draw_each, row_contexts, rows_of, scores_behind
from outrider.engine.sampling.transforms import index, transform
from outrider.engine.session import Session
from outrider.engine.sharing import LEAST_S, ForwardPace
from outrider.engine.walk import walk
from outrider.errors import InvalidRequest, NoTokenLeft, OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.token_tree import TokenTree

# Draws as the rule of a session needs it.
MODEL = "model"
# Draws with the target's own noise, so that both choose the same token wherever their distributions allow it. What it
# draws says something about what the target will draw, and rules that test with uniforms must not have that.
COUPLED = "coupled"
# Draws with noise of its own, whatever the rule.
SAMPLED = "sampled"

DRAFTERS: Mapping[str, frozenset[Rule]] = {
    MODEL: frozenset(Rule),
    COUPLED: frozenset(rule for rule in Rule if not rule.needs_distributions),
    SAMPLED: frozenset(Rule),
}

# A round of the target takes as long as so many of a draft's steps at most.
STEPS_A_ROUND = 16
# Of several steps of a chain in one call, for which those who come meanwhile wait.
LINE_S = 0.01
# The logarithm of a number that float64 rounds to 0 is not infinite here.
MIN_PROB = 5e-324


def choose_drafter(name: str, rule: Rule, offers: Mapping[str, frozenset[Rule]], field: str) -> str:
    """The drafter that a session gets; an empty name leaves the choice to the service.

    Raises InvalidRequest about a name that is not on offer, and about one that cannot serve the rule.
    """
    if name and name not in offers:
        raise InvalidRequest(field, name, f"one of {', '.join(offers)}, or empty")
    fitting = [offer for offer, rules in offers.items() if rule in rules]
    if name and name not in fitting:
        raise InvalidRequest(field, name, f"one that serves the rule {rule}: {', '.join(fitting)}")
    return name or fitting[0]


def noise_of(drafter: str, rule: Rule) -> Purpose:
    """TOKEN for a draft that shares the target's noise, DRAFT for one with noise of its own."""
    return Purpose.DRAFT if drafter == SAMPLED or rule.needs_distributions else Purpose.TOKEN


class Guess(NamedTuple):
    """A token, the distribution that it was drawn from where the rule needs it, and its log-probability if wanted."""

    token_id: int
    distribution: DraftDistribution | None = None
    logprob: float | None = None


# What a step of a task has found, to be taken when all of the batch is; or why there is nothing.
Step = Callable[[], None] | OutriderError
# Takes into account that these tokens followed the ones that a tree was made after.
Learn = Callable[[TokenTree, Sequence[int]], None]
# Finds the steps of tasks of one kind, whose rows are logits[ranges[i]], drawing from at most so many tokens.
Guesser = Callable[[ModelRunner, Sequence[Any], Tensor, Sequence[range], int], list[Step]]


class Inner(Protocol):
    """State that a cheaper guesser keeps for one session of a draft."""

    rest: int

    def free(self) -> None:
        """Frees the state."""


@dataclass(slots=True, eq=False)
class DraftTask(EndingTask):
    """A session on its way to `draft_count` guesses, or none: then only its tokens are cached."""

    session: Session
    spec: SessionSpec
    noise: Purpose
    """TOKEN, which is shared with the target, or DRAFT; see noise_of."""
    draft_count: int
    meter: Meter
    num_private: int = 0
    """Committed tokens at the end of which other sessions must not find what is cached."""
    lane: int = 0
    """Number of the draft among those of the request: their draws are independent."""
    learn: Learn | None = None
    """Function that gets what was committed after its base_len, where something can be learned from that."""
    inner: Inner | None = None
    """The session's part in what guesses its guesses, where there is such a thing."""
    base_len: int = field(init=False)
    """Committed tokens that the guesses build on."""
    ends: frozenset[int] = field(init=False)
    """Tokens that end the request."""
    draw_input: DrawInput = field(init=False)
    """Input of its next forward, and parameters of the draws after it."""
    guesses: list[Guess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base_len = len(self.session)
        self.ends = frozenset((*self.spec.eos_token_ids, *self.spec.stop_token_ids))
        self.draw_input = DrawInput(Feed(self.session), self.spec)

    @property
    def guesser(self) -> Guesser:
        """Function that finds its steps, together with those of others of its kind."""
        return _coupled if self.noise is Purpose.TOKEN else _sampled

    def draft_key(self, depth: int, row_lane: int = 0, base_depth: int = 0) -> int:
        """The key of a draw of its own for a token `depth` places after those that its session holds.

        It is for the round that builds on base_depth tokens more than this one.
        """
        base_len, lane = self.base_len + base_depth, self.lane * LANES_EACH + row_lane
        return round_key(self.spec.seed, base_len, len(self.session) + depth, Purpose.DRAFT, lane)

    @property
    def needs_distribution(self) -> bool:
        return self.spec.acceptance.rule.needs_distributions

    @property
    def wants_logprob(self) -> bool:
        return self.spec.draft_logprobs and self.draft_count > 0

    @property
    def line_depth(self) -> int:
        """Guesses that are left, of a chain that shares the target's noise and is plain; see LineTask."""
        is_fit = self.guesser is _coupled and may_be_line(self.draw_input, wants_logprob=self.wants_logprob)
        return self.draft_count - len(self.guesses) if is_fit else 0

    @property
    def max_children(self) -> int:
        """One, because a chain has no siblings."""
        return 1

    @property
    def line_scale(self) -> float:
        """Scale of shares, of which a chain looks at none."""
        return 1.0

    @property
    def proposal(self) -> TokenTree:
        distributions = [guess.distribution for guess in self.guesses if guess.distribution]
        logprobs = [guess.logprob for guess in self.guesses if guess.logprob is not None]
        return TokenTree.chain([guess.token_id for guess in self.guesses], distributions, logprobs)

    def take(self, guesses: Sequence[Guess]) -> None:
        """Adds guesses where they are wanted, and ends the task after the last.

        Where the last forward had a chain, all but the last are its first rows, and stay cached. Nothing can follow a
        token that ends the request, and so no guess is wasted on it. Under a rule that tests with uniforms the length
        of a chain must not depend on what was drawn, and the target stops there by itself.
        """
        end = 0
        if not self.needs_distribution:
            for number, guess in enumerate(guesses, start=1):
                if guess.token_id in self.ends:
                    end = number
                    break
        if self.draft_count:
            taken = guesses[:end] if end else guesses
            token_ids = [guess.token_id for guess in taken]
            if self.session.tree:
                self.session.keep(range(1, len(taken)))
                del token_ids[:-1]
            self.guesses += taken
            self.session.extend(token_ids)
        if self.draw_input.feed.tree:
            self.draw_input = DrawInput(Feed(self.session), self.spec)
        if len(self.guesses) == self.draft_count or end:
            self.finish()

    def take_line(self, levels: Sequence[Ranked]) -> None:
        """Takes the first token after each row of a line, the row itself and those below it."""
        token_ids = [level.token_ids[0] for level in levels]
        self.session.advance(self.session.cached_len, TokenTree.chain(token_ids[:-1]))
        self.take([*map(Guess, token_ids)])


@dataclass(frozen=True, slots=True)
class Taking:
    """The step of a chain: its task takes the guesses after a forward, at least one."""

    task: DraftTask
    guesses: list[Guess]

    def __call__(self) -> None:
        self.task.take(self.guesses)


class Ahead(Protocol):
    """Guesses what a drafter draws next, so that one forward finds several of its draws."""

    def open(self, spec: SessionSpec, salt: bytes | None) -> Inner:
        """A session's part; with a salt it shares what is read of equal tokens with those of the same salt."""

    def prepare(self, tasks: Sequence[DraftTask]) -> None:
        """Gives a chain to the feeds of some tasks, all of which have their slots; the chains' are reserved here."""

    def learn(self, steps: Sequence["Taking"], num_rows: int) -> None:
        """Takes what came of it after a forward of so many rows; before any of the tasks takes its guesses."""

    def go_on(self, tasks: Sequence[DraftTask]) -> None:
        """Adds guesses of its own after those of tasks that are to have some. Must not raise."""


class ModelDrafter:
    """Makes one step of all draft tasks at a time, whatever noise each draws with."""

    def __init__(
        self,
        runner: ModelRunner,
        with_room: Callable[[Allocate], None],
        top_n: int = DEFAULT_TOP_N,
        clock: Callable[[], float] = time.perf_counter,
        ahead: Ahead | None = None,
        line_s: float = LINE_S,
    ) -> None:
        """`with_room` makes room for an allocation when the pool is full; see outrider.engine.runner.reserve.

        top_n is the most tokens of a distribution that is sent; see outrider.engine.sampling.draft_distribution.
        `clock` as in outrider.engine.sharing.Pace. With `ahead` a step may find several guesses of a task, which are
        those that it would find without, one by one; so may a step without it of a model whose steps are short: as many
        as line_s seconds have room for.
        """
        self._runner = runner
        self._pace = ForwardPace(clock, STEPS_A_ROUND)
        self._with_room = with_room
        self._top_n = top_n
        self._ahead = ahead
        self._line_s, self._step_s = line_s, math.inf

    def advance(self, tasks: Sequence[DraftTask]) -> bool:
        """Makes one forward over all tasks, and guesses for each whose tokens are cached; no task ever waits.

        When it raises, no session has changed but for what is cached: see outrider.engine.device_thread.
        """
        for task in tasks:
            if not task.stopped:
                try:
                    reserve(self._runner, task.draw_input.feed, self._with_room)
                except OutriderError as error:
                    task.fail(error)
        # A task that made room for another has no part in this forward.
        tasks = [task for task in tasks if not (task.done or task.stopped)]
        if self._ahead is not None:
            self._ahead.prepare(tasks)
        result, steps, cost = self._step(tasks)
        found = iter(steps)
        if self._ahead is not None:
            self._ahead.learn([step for step in steps if isinstance(step, Taking)], result.num_rows)
        for task, grant, rows in zip(tasks, result.grants, result.ranges, strict=True):
            if grant:
                task.meter.add(*cost)
            # A guess that was made must not be made again, so what fails from here on fails alone.
            with own_fault(task):
                step = None if rows is None else next(found)
                # Only what is committed; the guesses after it are of use to this session alone.
                task.session.publish(task.base_len - task.num_private)
                if isinstance(step, NoTokenLeft):
                    # Nothing follows the guesses so far, by what this draft knows: then they are all.
                    task.finish()
                elif isinstance(step, OutriderError):
                    task.fail(step)
                elif step is not None:
                    step()
        if self._ahead is not None:
            self._ahead.go_on([task for task, rows in zip(tasks, result.ranges, strict=True) if rows is not None])
        return True

    def _step(self, tasks: Sequence[DraftTask]) -> tuple[ForwardResult, Sequence[Step], tuple[int, ...]]:
        """A forward, the steps of those whose tokens it has cached, and what it cost, for Meter.add."""
        started_ns = time.perf_counter_ns()
        line = StepLine.of(self._runner, tasks, int(self._line_s / self._step_s)) if self._ahead is None else None
        feeds = [task.draw_input.feed for task in tasks] if line is None else line.feeds
        most_rows = self._pace.begin(feeds, self._runner.max_rows)
        result = self._runner.forward(feeds, most_rows, None if line is None else line.compute)
        if line is not None and line.num_steps:
            steps: Sequence[Step] = line.steps()
            # All else is once a proposal, however many steps it has, and no part of what one more costs.
            ended_ns, num_rows = started_ns + line.computed_ns, result.num_rows + (line.num_steps - 1) * len(tasks)
            cost = started_ns, ended_ns, num_rows, 0, line.num_steps
            self._runner.forward_counts.go_on(line.num_steps - 1, len(tasks))
            self._runner.finish()
        else:
            ready = [(task, rows) for task, rows in zip(tasks, result.ranges, strict=True) if rows is not None]
            guessing, ranges = [task for task, _ in ready], [rows for _, rows in ready]
            steps = guess_each(self._runner, guessing, result.logits, ranges, self._top_n)
            self._runner.finish()
            cost = started_ns, time.perf_counter_ns(), result.num_rows, 0, 1
        self._step_s = max(self._pace.end(result.grants, cost[-1]), LEAST_S)
        return result, steps, cost


def guess_each(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, ranges: Sequence[range], top_n: int
) -> list[Step]:
    """The next step of each task, whose rows of logits are logits[ranges[i]].

    Where the feed has a chain, a guess follows for each of its tokens that is the guess at its place. Distributions
    have at most top_n tokens.
    """
    groups: dict[Guesser, list[int]] = {}
    for number, task in enumerate(tasks):
        groups.setdefault(task.guesser, []).append(number)
    if len(groups) == 1:
        return next(iter(groups))(runner, tasks, logits, ranges, top_n)
    steps: dict[int, Step] = {}
    for guesser, numbers in groups.items():
        chosen = [tasks[number] for number in numbers]
        steps |= zip(
            numbers, guesser(runner, chosen, logits, [ranges[number] for number in numbers], top_n), strict=True
        )
    return [steps[number] for number in range(len(tasks))]


def _walked(task: DraftTask, drawn: Sequence[int]) -> list[int]:
    """The tokens of a task's next guesses, of what was drawn after each row of its feed."""
    tree = task.draw_input.feed.tree
    if not tree:
        return [drawn[0]]
    kept = walk(tree, drawn)
    return [*tree.token_ids[: len(kept.accepted_rows)], kept.next_token_id]


def _coupled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], _top_n: int
) -> list[Step]:
    """Guesses drawn with the shared noise."""
    drawn = draw_each(runner, logits, [task.draw_input for task in tasks], rows)
    walked = [
        each if isinstance(each, OutriderError) else _walked(task, each)
        for task, each in zip(tasks, drawn, strict=True)
    ]
    asked = {n: each for n, each in enumerate(walked) if tasks[n].wants_logprob and isinstance(each, list)}
    # At temperature 0 the distribution is the one token.
    logprobs = {number: [0.0] * len(token_ids) for number, token_ids in asked.items()}
    hot = [number for number in asked if tasks[number].spec.sampling.temperature]
    if hot:
        # Of a chain only the rows that guesses follow: others need not have a distribution.
        chains = {n: TokenTree.chain(asked[n][:-1]) for n in hot}
        inputs = [DrawInput(Feed(tasks[n].session, chains[n]), tasks[n].spec) for n in hot]
        scores = scores_behind(runner, rows_of(logits, [rows[n][: len(asked[n])] for n in hot]), inputs)
        ids = index([token_id for n in hot for token_id in asked[n]], scores)
        probs = iter(runner.ops.softmax(scores).gather(1, ids[:, None]).flatten().tolist())
        logprobs |= {n: [log_of(next(probs)) for _ in asked[n]] for n in hot}
    steps: list[Step] = []
    for number, (task, each) in enumerate(zip(tasks, walked, strict=True)):
        if isinstance(each, OutriderError):
            steps.append(each)
        else:
            steps.append(Taking(task, [*map(Guess, each, repeat(None), logprobs.get(number, repeat(None)))]))
    return steps


def _sampled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], top_n: int
) -> list[Step]:
    """Guesses drawn with noise of their own, from distributions that can be sent."""
    inputs = [task.draw_input for task in tasks]
    distributions = quantise(drawable_scores(runner, rows_of(logits, rows), inputs), top_n, runner.ops)
    keys = [task.draft_key(depth) for task in tasks for depth in task.draw_input.feed.tree.depths]
    drawn = distributions.draw(torch.from_numpy(np.array(keys, dtype=np.int64)))
    left = iter(drawn.tolist())
    walked = [_walked(task, [next(left) for _ in task.draw_input.feed.tree.depths]) for task in tasks]
    starts = accumulate((len(each.feed.tree.depths) for each in inputs), initial=0)
    kept = [start + row for start, each in zip(starts, walked, strict=False) for row in range(len(each))]
    if len(kept) < len(keys):
        distributions = DraftDistributions(distributions.token_ids[kept], distributions.weights[kept])
        drawn = drawn[kept]
    laws = iter(distributions.distributions() if any(task.needs_distribution for task in tasks) else repeat(None))
    probs = iter(distributions.probs(drawn) if any(task.wants_logprob for task in tasks) else repeat(None))
    steps: list[Step] = []
    for task, token_ids in zip(tasks, walked, strict=True):
        needs_law, wants_logprob = task.needs_distribution, task.wants_logprob
        guesses = []
        for token_id, law, prob in zip(token_ids, laws, probs, strict=False):
            logprob = log_of(prob) if prob and wants_logprob else None
            guesses.append(Guess(token_id, law if needs_law else None, logprob))
        steps.append(Taking(task, guesses))
    return steps


def drawable_scores(runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput]) -> Tensor:
    """Transformed scores of all rows; one that has none is -inf throughout, and no task fails for its row."""
    try:
        return scores_behind(runner, logits, inputs)
    except ValueError:
        contexts = [context for each in inputs for context in row_contexts(each)]
    scores = torch.full_like(logits, -torch.inf)
    for row, context in enumerate(contexts):
        with suppress(ValueError):
            scores[row] = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)[0]
    return scores


def log_of(prob: float) -> float:
    """Natural logarithm of a probability, finite and at most 0."""
    return min(math.log(max(prob, MIN_PROB)), 0.0)
