"""Guesses of a model that was trained to make several in one forward: PARD.

An et al., "PARD: accelerating LLM inference with low-cost parallel draft model adaptation", 2025, arXiv 2504.18583. The
forward reads the tokens that are not cached, and after them a token again and again that stands for one which is not
known yet. What follows the last token is the first guess, and what follows the mask of a depth is a guess of the depth
below it. So a guess depends on the committed tokens and on its depth alone: not on how many are wanted, and not on the
guesses before it, but for what penalties and grammars make of these. What a guess was drawn from is its row's
distribution, and the rules that test with distributions get it.

Chains and trees are those of `model_drafter` and `tree_drafter`, drawn with the same keys: only the rows that they draw
after are those of one forward. The rows of masks are never kept. Runs on the device thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from outrider.drafters.model_drafter import DRAFTERS, DraftTask, Guesser, Step, guess_each
from outrider.drafters.scales import Experience
from outrider.drafters.tree_drafter import as_tree
from outrider.engine.batching import Feed
from outrider.engine.models.config import DecoderFacts, Masks
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.sampling.transforms import index
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import Rule
from outrider.token_tree import TokenTree, TreeShape

PARD = "pard"
# The depth up to which the published drafts were trained; a chain may be longer if it is asked for.
TREE_DEPTH = 8


def drafters_of(model: DecoderFacts, *, has_cascade: bool = False) -> Mapping[str, frozenset[Rule]]:
    """What a model offers, with the rules of each; the first is who guesses where none is named.

    Of a model with masks these guess, unless there is a cascade, which speeds chains up.
    """
    if model.masks is None:
        return DRAFTERS
    masked = {PARD: frozenset(Rule)}
    return {**DRAFTERS, **masked} if has_cascade else {**masked, **DRAFTERS}


@dataclass(slots=True, eq=False, kw_only=True)
class MaskedTask(DraftTask):
    """A session on its way to guesses of one forward."""

    plan: DraftTask
    """What is guessed: a chain or a tree that takes its steps one after the other after that forward."""
    masks: Masks
    num_masks: int

    def __post_init__(self) -> None:
        DraftTask.__post_init__(self)
        masks = TokenTree.chain([self.masks.token_id] * self.num_masks)
        self.draw_input = DrawInput(Feed(self.session, masks), self.spec)

    @property
    def guesser(self) -> Guesser:
        return masked_each

    @property
    def proposal(self) -> TokenTree:
        return self.plan.proposal

    def finish(self) -> None:
        # What lies after the committed tokens are masks, which nothing may follow.
        self.session.extend(())
        DraftTask.finish(self)


def as_masked(
    chain: DraftTask, masks: Masks, shape: TreeShape | None, max_rows: int, room: int, known: Experience
) -> MaskedTask:
    """The task of one forward in the place of a chain's, of at least one guess; with a shape of a tree's (as_tree)."""
    session = chain.session
    # Its tokens only: nothing is computed of it, and the blocks are the session's.
    planned = Session(session.table, session.token_ids, min(session.prompt_len, len(session)))
    planned.grammar = session.grammar
    plan = DraftTask(
        planned,
        chain.spec,
        chain.noise,
        chain.draft_count,
        Meter(),
        lane=chain.lane,
        on_done=_as_it_is,
        on_failure=_as_it_is,
    )
    depth = chain.draft_count
    if shape is not None:
        most = masks.most_guesses or TREE_DEPTH
        depth = min(room, max_rows, shape.max_depth or most, len(shape.expansions) or most)
        plan = as_tree(plan, shape, max_rows, depth, known)
    return MaskedTask(
        session,
        chain.spec,
        chain.noise,
        max_rows if shape is not None else chain.draft_count,
        chain.meter,
        chain.num_private,
        chain.lane,
        plan.learn,
        plan=plan,
        masks=masks,
        num_masks=masks.count(depth),
        on_done=chain.on_done,
        on_failure=chain.on_failure,
    )


def as_wanted(
    chain: DraftTask,
    masks: Masks | None,
    shape: TreeShape | None,
    max_rows: int,
    room: int,
    known: Experience,
    *,
    one_by_one: bool = False,
) -> DraftTask:
    """The task in the place of a chain's: of one forward where the model has masks, and with a shape of a tree.

    A tree may have max_rows guesses, where a chain has as many as there is room for, and none more than `room` deep. A
    chain without guesses stays itself. one_by_one as in growth.Limits.
    """
    if not chain.draft_count:
        return chain
    if masks is not None:
        return as_masked(chain, masks, shape, max_rows, room, known)
    return chain if shape is None else as_tree(chain, shape, max_rows, room, known, one_by_one=one_by_one)


def _as_it_is(_: object) -> None:
    """Does nothing: no caller waits for a plan."""


def masked_each(
    runner: ModelRunner, tasks: Sequence[MaskedTask], logits: Tensor, ranges: Sequence[range], top_n: int
) -> list[Step]:
    """All guesses of each task, whose rows are logits[ranges[i]]: one for each depth, the root's first.

    What a task has found so far is its proposal, where nothing can be drawn after it.
    """
    faults: dict[int, OutriderError] = {}
    while live := [number for number, task in enumerate(tasks) if not task.plan.done and number not in faults]:
        plans = [tasks[number].plan for number in live]
        rows = []
        for number, plan in zip(live, plans, strict=True):
            first = ranges[number].start + tasks[number].masks.first_row + len(plan.session) - plan.base_len
            rows.append([first + depth for depth in plan.draw_input.feed.depths])
        own = logits.index_select(0, index([row for each in rows for row in each], logits))
        ends = accumulate(map(len, rows), initial=0)
        for number, step in zip(
            live, guess_each(runner, plans, own, [range(*pair) for pair in pairwise(ends)], top_n), strict=True
        ):
            if isinstance(step, OutriderError):
                faults[number] = step
            else:
                step()
    return [faults.get(number, task.finish) for number, task in enumerate(tasks)]
