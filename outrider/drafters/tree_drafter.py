"""Guesses as a tree. One step is one forward over all rows whose children are wanted next.

With the target's noise the children of a row are its best tokens under scores plus noise: the first is what a chain
would go on with, the others are what the target may draw where the draft errs. The likeliest rows of all are kept,
whatever was drawn, because the rules that this serves commit the same tokens whatever is proposed. A shape that does
not depend on the guesses may be asked for as well.

With noise of its own the draft draws the children of a row one after the other without replacement, and which rows have
how many is fixed before anything is drawn: the rules that test with distributions depend on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.lines import Ranked, may_be_line
from outrider.drafters.model_drafter import MIN_PROB, DraftTask, Guess, Guesser, Step, drawable_scores, log_of
from outrider.drafters.scales import Experience
from outrider.engine.batching import Feed
from outrider.engine.branching import Branching
from outrider.engine.growth import (
    MAX_CHILDREN,
    ROOT,
    Child,
    Filling,
    Growth,
    Limits,
    depth_first,
    level_order,
    static_shape,
)
from outrider.engine.noise import Purpose
from outrider.engine.ops.faults import check_ids
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DraftDistributions, quantise
from outrider.engine.sampling.draw import (
    DrawInput,
    before_argmax,
    key_column,
    row_contexts,
    rows_of,
    scores_behind,
    shared_keys,
    undrawable,
)
from outrider.engine.sampling.transforms import column, transform
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec
from outrider.token_tree import TokenTree, TreeShape

# What may follow each of a task's newest rows.
Level = list[list[Child]]

MAX_DEPTH = 32
# Of a drawn tree whose shape leaves it to the draft.
DRAWN_CHILDREN = 2


@dataclass(slots=True, eq=False, kw_only=True)
class GrownTask(DraftTask):
    """A session on its way to the `draft_count` likeliest guesses; see outrider.engine.growth."""

    growth: Growth | Filling | Branching
    scale: float
    """Scale of the draft's scores; see outrider.drafters.scales."""
    rows: dict[int, int] = field(init=False)
    """Rows of the session's tree by the numbers of the nodes that are expanded, the newest of them last."""
    num_new: int = 1
    """Number of the newest rows, which are expanded now."""
    ranked: SessionSpec = field(init=False)
    """Parameters of its scores: at temperature 0 the argmax leaves one token, and the second best is wanted."""

    def __post_init__(self) -> None:
        DraftTask.__post_init__(self)
        self.ranked = before_argmax(self.draw_input).spec
        self.rows = {ROOT: 0}

    @property
    def guesser(self) -> Guesser:
        return children_each

    @property
    def proposal(self) -> TokenTree:
        return self.growth.tree(with_logprobs=self.wants_logprob)

    @property
    def newest(self) -> list[int]:
        """Nodes of the newest rows, which are expanded now."""
        return [*self.rows][-self.num_new :]

    def take_level(self, level: Level) -> None:
        """Adds the children of the newest rows, and goes on with those rows that may matter."""
        for number, children in zip(self.newest, level, strict=True):
            self.growth.expand(number, children)
        self.go_on()

    @property
    def line_depth(self) -> int:
        """Levels that may be wanted below the newest row, of a plain tree that grows row by row; see LineTask."""
        limits = self.growth.limits if isinstance(self.growth, Growth) else None
        if limits is None or not limits.one_by_one or limits.width:
            return 0
        if not may_be_line(self.draw_input, wants_logprob=self.wants_logprob):
            return 0
        # Below a row that was not the likeliest at once few are wanted.
        return min(limits.max_depth, limits.max_rows) if self.newest[0] == ROOT else 1

    @property
    def max_children(self) -> int:
        """Most children of any row, as its limits say."""
        return self.growth.max_children

    @property
    def line_scale(self) -> float:
        """Scale of its scores, by which children have values."""
        return self.scale

    def take_line(self, levels: Sequence[Ranked]) -> None:
        """Adds the children of the newest row, and of those below it as long as they are what is wanted next."""
        above: tuple[int, int] | None = None
        for level in levels:
            number = self.newest[0]
            row = self.growth.nodes[number]
            if self.done or self.num_new != 1 or above not in (None, (row.parent, row.token_id)):
                break
            self.take_level([children_of(self, *level)])
            above = number, level.token_ids[0]
        if not self.done:
            # What a line has computed beyond that is computed again, or never.
            self.session.advance(self.session.cached_len, self.draw_input.feed.begun)

    def go_on(self) -> None:
        """Goes on with those rows that may matter, and ends the task where none does."""
        growth = self.growth
        wanted = growth.frontier()
        if not wanted:
            self.finish()
            return
        nodes = [(number, growth.nodes[number].token_id, growth.nodes[number].parent) for number in wanted]
        self.draw_input, self.num_new = _going_on(self.draw_input, self.rows, nodes), len(nodes)


def _going_on(draw_input: DrawInput, rows: dict[int, int], nodes: Iterable[tuple[int, int, int]]) -> DrawInput:
    """The next step, which computes these nodes after what was computed so far: number, token id and parent of each.

    `rows` has the rows of all nodes that are computed, and gets the new ones'.
    """
    grown = draw_input.feed.tree
    token_ids, parents = list(grown.token_ids), list(grown.parents)
    for number, token_id, parent in nodes:
        token_ids.append(token_id)
        parents.append(rows[parent])
        rows[number] = len(token_ids)
    tree = TokenTree(tuple(token_ids), tuple(parents))
    return DrawInput(Feed(draw_input.feed.session, tree, num_computed=1 + len(grown)), draw_input.spec)


def children_each(
    runner: ModelRunner, tasks: Sequence[GrownTask], logits: Tensor, ranges: Sequence[range], _top_n: int
) -> list[Step]:
    """The children of each task's newest rows, logits[ranges[i]]; or why there are none after its root."""
    found: dict[int, Level | OutriderError] = {}
    for is_hot in (False, True):
        numbers = [n for n, task in enumerate(tasks) if (task.spec.sampling.temperature > 0) is is_hot]
        if numbers:
            chosen = [tasks[number] for number in numbers]
            part = rows_of(logits, [ranges[number] for number in numbers])
            inputs = [DrawInput(task.draw_input.feed, task.ranked) for task in chosen]
            try:
                children = iter(_children(runner, chosen, scores_behind(runner, part, inputs)))
            except ValueError:
                levels = _children_of_each(runner, chosen, inputs, part)
            else:
                levels = [[next(children) for _ in range(task.num_new)] for task in chosen]
            found |= zip(numbers, levels, strict=True)
    return [
        level if isinstance(level, OutriderError) else partial(task.take_level, level)
        for task, (_, level) in zip(tasks, sorted(found.items()), strict=True)
    ]


def _children_of_each(
    runner: ModelRunner, tasks: Sequence[GrownTask], inputs: Sequence[DrawInput], logits: Tensor
) -> list[Level | OutriderError]:
    """Children row by row: a row after which nothing can be drawn has none, and only at the root is that an error."""
    found: list[Level | OutriderError] = []
    row = 0
    for task, draw_input in zip(tasks, inputs, strict=True):
        level: Level = []
        error: OutriderError | None = None
        for place, context in enumerate(row_contexts(draw_input)):
            try:
                scores = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)
                level += _children(runner, [task], scores, place)
            except ValueError as cause:
                level.append([])
                if not context.path:
                    error = undrawable(runner, logits[row : row + 1], draw_input, context, cause)
            row += 1
        found.append(error or level)
    return found


def _children(runner: ModelRunner, tasks: Sequence[GrownTask], scores: Tensor, place: int | None = None) -> Level:
    """Children of all newest rows of the tasks, or of the one at a place; raises ValueError for a row without any."""
    ops, keys, rows = runner.ops, None, slice(None) if place is None else slice(place, place + 1)
    owners = [task for task in tasks for _ in range(task.num_new)][rows]
    is_hot = tasks[0].spec.sampling.temperature > 0
    if is_hot:
        keys = key_column(runner, shared_keys([task.draw_input for task in tasks])[rows])
    scales = column([task.scale for task in owners], scores)[:, 0]
    count = max(task.growth.max_children for task in tasks)
    ids, shares = ops.rank(scores, scales, count, keys)
    token_ids = ids.tolist()
    check_ids(row[0] for row in token_ids)
    logprobs: list[list[float]] = [[0.0] * count] * len(owners)
    if any(task.wants_logprob for task in tasks):
        logprobs = [[0.0, *[log_of(MIN_PROB)] * count]] * len(owners)
        if is_hot:
            probs = ops.softmax(scores).gather(1, ids.clamp(min=0)).tolist()
            logprobs = [[log_of(prob) for prob in row] for row in probs]
    return [children_of(*row) for row in zip(owners, token_ids, shares.tolist(), logprobs, strict=True)]


def children_of(
    task: GrownTask, token_ids: Iterable[int], shares: Iterable[float], logprobs: Iterable[float] | None = None
) -> list[Child]:
    """Children with these shares. What has no score at all is not a guess."""
    rows = zip(token_ids, shares, logprobs or repeat(0.0), strict=False)
    return [Child(token_id, share, token_id in task.ends, logprob) for token_id, share, logprob in rows if share]


class DrawnNode(NamedTuple):
    """A guess that was drawn, with its place in the shape."""

    guess: Guess
    place: int
    """Row of the node in the shape."""
    parent: int
    """Number of its parent among all that were drawn."""
    lane: int
    """Number of the node among those of its depth."""


@dataclass(slots=True, eq=False, kw_only=True)
class DrawnTask(DraftTask):
    """A session on its way to at most `draft_count` guesses that are drawn, in a shape that was fixed before."""

    parents: tuple[int, ...]
    """Parents of the shape's rows. Rows are fewer where a distribution has fewer tokens."""
    nodes: list[DrawnNode] = field(default_factory=list)
    """The root, and what was drawn, in the order of the shape."""
    level: list[int] = field(default_factory=lambda: [ROOT])
    """Numbers of the nodes whose children are drawn next."""
    rows: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    """Rows of the session's tree by the numbers of the nodes that are expanded."""
    depth: int = 0
    """Depth of the level."""

    def __post_init__(self) -> None:
        DraftTask.__post_init__(self)
        self.nodes.append(DrawnNode(Guess(-1), ROOT, -1, 0))

    @property
    def guesser(self) -> Guesser:
        return siblings_each

    @property
    def proposal(self) -> TokenTree:
        """Rows that were drawn, in depth-first order, siblings in the order in which they were drawn."""
        order = depth_first((number, node.parent) for number, node in enumerate(self.nodes) if number)
        rows = {ROOT: 0} | {number: row for row, number in enumerate(order, start=1)}
        guesses = [self.nodes[number].guess for number in order]
        return TokenTree(
            tuple(guess.token_id for guess in guesses),
            tuple(rows[self.nodes[number].parent] for number in order),
            tuple(guess.distribution for guess in guesses if guess.distribution),
            tuple(guess.logprob for guess in guesses if guess.logprob is not None),
        )

    def child_places(self, number: int) -> list[int]:
        """Rows of the shape below a node. After an end there are none, where shapes may depend on what was drawn."""
        node = self.nodes[number]
        if not self.needs_distribution and node.guess.token_id in self.ends:
            return []
        return [place for place, parent in enumerate(self.parents, start=1) if parent == node.place]

    def take_level(self, drawn: Sequence[Sequence[Guess]]) -> None:
        """Adds the children of the level, and goes on with those of them that are to have some."""
        known = len(self.nodes)
        for number, guesses in zip(self.level, drawn, strict=True):
            for place, guess in zip(self.child_places(number), guesses, strict=False):
                self.nodes.append(DrawnNode(guess, place, number, len(self.nodes) - known))
        self.depth += 1
        self.level = [number for number in range(known, len(self.nodes)) if self.child_places(number)]
        if not self.level:
            self.finish()
            return
        nodes = [(number, self.nodes[number].guess.token_id, self.nodes[number].parent) for number in self.level]
        self.draw_input = _going_on(self.draw_input, self.rows, nodes)


def siblings_each(
    runner: ModelRunner, tasks: Sequence[DrawnTask], logits: Tensor, ranges: Sequence[range], top_n: int
) -> list[Step]:
    """Children of each task's newest rows, logits[ranges[i]], drawn from distributions that can be sent."""
    scores = drawable_scores(runner, rows_of(logits, ranges), [task.draw_input for task in tasks])
    owners = [(task, number) for task in tasks for number in task.level]
    counts = [len(task.child_places(number)) for task, number in owners]
    found: list[list[Guess]] = [[] for _ in owners]
    left, rows = quantise(scores, top_n, runner.ops), list(range(len(owners)))
    for sibling in range(max(counts)):
        # A row whose distribution has no more tokens has no more children.
        places = [place for place, size in enumerate(left.sizes) if size and sibling < counts[rows[place]]]
        left = DraftDistributions(left.token_ids[places], left.weights[places])
        rows = [rows[place] for place in places]
        drawn = [owners[row] for row in rows]
        keys = [task.draft_key(task.depth, task.nodes[number].lane * MAX_CHILDREN + sibling) for task, number in drawn]
        token_ids = left.draw(torch.from_numpy(np.array(keys, dtype=np.int64)))
        sent = left.distributions() if any(task.needs_distribution for task, _ in drawn) else [None] * len(drawn)
        probs = left.probs(token_ids) if any(task.wants_logprob for task, _ in drawn) else [None] * len(drawn)
        for row, (task, _), token_id, own, prob in zip(rows, drawn, token_ids.tolist(), sent, probs, strict=True):
            logprob = log_of(prob) if prob and task.wants_logprob else None
            found[row].append(Guess(token_id, own if task.needs_distribution else None, logprob))
        left = left.without(token_ids)
    rest = iter(found)
    return [partial(task.take_level, [next(rest) for _ in task.level]) for task in tasks]


def as_tree(
    chain: DraftTask, shape: TreeShape, max_rows: int, room: int, known: Experience, *, one_by_one: bool = False
) -> DraftTask:
    """The task of a tree in the place of a chain's, of at most max_rows guesses, none of them more than `room` deep.

    one_by_one as in Limits.
    """
    spec, noise = chain.spec, chain.noise
    common = (chain.session, spec, noise, max_rows, chain.meter, chain.num_private, chain.lane)
    ends: dict[str, Any] = {"on_done": chain.on_done, "on_failure": chain.on_failure}
    max_depth, static, is_shared = min(room, MAX_DEPTH), None, noise is Purpose.TOKEN
    # With noise of its own and at temperature 0 there is one token to draw.
    most = MAX_CHILDREN if is_shared or spec.sampling.temperature else 1
    if shape.is_static:
        rates = known.ranks.of(spec, noise)[: min(shape.max_children or most, most)]
        static = static_shape(rates, max_rows, min(max_depth, shape.max_depth or max_depth), shape.max_width)
    learn_ranks = partial(known.ranks.learn, spec, noise)
    if is_shared:
        limits = replace(Limits.of(shape, max_rows, max_depth), one_by_one=one_by_one)
        growth = Growth(limits) if static is None else Filling(static)
        learn = partial(known.scales.learn, spec) if static is None else learn_ranks
        return GrownTask(*common, learn, growth=growth, scale=known.scales.of(spec), **ends)
    if static is not None:
        return DrawnTask(*common, learn_ranks, parents=static.parents, **ends)
    expansions = shape.expansions
    if not expansions:
        width = min(shape.max_children or DRAWN_CHILDREN, most)
        expansions = (width, *[1] * ((shape.max_depth or max_depth) - 1))
    return DrawnTask(*common, parents=level_order(expansions[:max_depth], max_rows, shape.max_width), **ends)
