"""Trees beside chains of as many guesses: what is kept of them, what their values promise, and what a step costs.

Under `match` the target keeps the guesses that its own text goes on with, so the text says what it would say. The scale
of the values is learned on the way, as a draft service learns it, from the tokens that follow each place.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.acceptance.report import mean
from bench.acceptance.runs import AT_A_TIME, AcceptancePlan, ModelPair, Readers
from outrider.cli.bench.common import markdown
from outrider.drafters.hosted import without_room
from outrider.drafters.model_drafter import DraftTask, ModelDrafter
from outrider.drafters.scales import Experience, Scales
from outrider.drafters.tree_drafter import as_tree
from outrider.engine.noise import Purpose
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.estimates.timing import Meter
from outrider.parameters import SessionSpec
from outrider.token_tree import TokenTree, TreeShape

SYMBOLS = """\
Behind the same prefixes of texts that the target wrote at that temperature, under `match`. Tokens a round: what is kept
of the guesses, and the target's own token. Promised: the same as the values of a tree's rows add up to. Scale: s at the
end, which is learned from where it starts. Step: one forward of a session that drafts alone, with its draws and all
that is decided behind it. ±: one standard error, over texts."""


@dataclass(slots=True)
class Proposed:
    """Sums of one kind of proposal in all rounds of one prompt."""

    rounds: int = 0
    accepted: int = 0
    depths: int = 0
    """Sum of the depths of the proposals."""
    promised: float = 0.0
    """Sum of all values, none of which a chain without a shape has."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each forward."""

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds

    def add(self, tree: TokenTree, accepted: int, step_s: Sequence[float]) -> None:
        """Counts one proposal of a round."""
        self.rounds += 1
        self.accepted += accepted
        self.depths += max(tree.depths)
        self.promised += sum(tree.values)
        self.step_s += step_s


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """Counts of all rounds of one prompt at one temperature, with trees and chains of so many guesses."""

    temperature: float
    num_rows: int
    prompt: int
    scale: float
    tree: Proposed
    chain: Proposed


def measure_trees(
    pair: ModelPair,
    plan: AcceptancePlan,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    tell: Callable[[str], None],
) -> list[TreeCounts]:
    """Runs the plan's texts and places for each size; prompts are token ids."""
    counts: list[TreeCounts] = []
    for temperature in plan.temperatures:
        scales = {num_rows: Scales() for num_rows in sizes}
        for first in range(0, len(prompts), AT_A_TIME):
            part = prompts[first : first + AT_A_TIME]
            tell(f"Temperature {temperature:g}, texts {first + 1} to {first + len(part)} of {len(prompts)}.")
            readers = Readers(pair, part, temperature, plan.text_len)
            for number, (spec, text) in enumerate(zip(readers.specs, readers.texts, strict=True), start=first):
                for num_rows in sizes:
                    found = _counted(pair, plan, spec, text, num_rows, scales[num_rows])
                    counts.append(TreeCounts(temperature, num_rows, number, scales[num_rows].of(spec), *found))
            readers.close()
    return counts


def _counted(
    pair: ModelPair, plan: AcceptancePlan, spec: SessionSpec, text: Sequence[int], num_rows: int, scales: Scales
) -> tuple[Proposed, Proposed]:
    """Trees and chains at all places of one text."""
    tree, chain = Proposed(), Proposed()
    drafter, session = ModelDrafter(pair.draft.runner, without_room), pair.draft.runner.open(text, spec.prompt_len)
    for place in range(0, plan.text_len - num_rows, plan.stride):
        length = spec.prompt_len + place
        for shape, proposed in ((None, chain), (TreeShape(), tree)):
            session.replace_tail(1, text[1:length])
            # The prefix is not what is measured.
            propose(drafter, session, spec, 0, None, scales)
            guesses, step_s = propose(drafter, session, spec, num_rows, shape, scales)
            proposed.add(guesses, len(list(kept_rows(guesses, text[length:]))), step_s)
            if shape is not None:
                scales.learn(spec, guesses, text[length:])
    session.free()
    return tree, chain


def propose(
    drafter: ModelDrafter, session: Session, spec: SessionSpec, num_rows: int, shape: TreeShape | None, scales: Scales
) -> tuple[TokenTree, list[float]]:
    """Guesses of one session after its tokens, and the seconds of each step."""
    found: list[TokenTree] = []
    task = DraftTask(
        *(session, spec, Purpose.TOKEN, num_rows, Meter()),
        on_done=lambda task: found.append(task.proposal),
        on_failure=_refuse,
    )
    if shape is not None:
        task = as_tree(task, shape, num_rows, num_rows, Experience(scales))
    step_s = []
    while not task.done:
        started_s = time.perf_counter()
        drafter.advance([task])
        step_s.append(time.perf_counter() - started_s)
    return found[0], step_s


def kept_rows(tree: TokenTree, token_ids: Sequence[int]) -> Iterator[int]:
    """The rows of the path that these tokens go down."""
    row = 0
    for token_id in token_ids:
        row = next((child for child in tree.children(row) if tree.token_ids[child - 1] == token_id), 0)
        if not row:
            return
        yield row


def _refuse(error: OutriderError) -> None:
    # Nothing may fail in a measurement.
    raise error


def render_trees(counts: Sequence[TreeCounts]) -> str:
    """The table of a run, and what its figures mean."""
    rows = []
    for temperature, num_rows in dict.fromkeys((each.temperature, each.num_rows) for each in counts):
        own = [each for each in counts if (each.temperature, each.num_rows) == (temperature, num_rows)]
        rounds = sum(each.tree.rounds for each in own)
        counted = 1 + sum(each.tree.accepted for each in own) / rounds
        promised = 1 + sum(each.tree.promised for each in own) / rounds
        chain_step, tree_step = (
            1e3 * statistics.median(step for each in kind for step in each.step_s)
            for kind in ([each.chain for each in own], [each.tree for each in own])
        )
        rows.append(
            [
                f"{temperature:g}",
                str(num_rows),
                mean(each.chain.tokens_per_round for each in own).show(".3f"),
                mean(each.tree.tokens_per_round for each in own).show(".3f"),
                mean(each.tree.tokens_per_round - each.chain.tokens_per_round for each in own).show(".3f"),
                f"{promised:.3f} ({promised / counted - 1:+.1%})",
                f"{sum(each.tree.depths for each in own) / rounds:.2f}",
                f"{sum(len(each.tree.step_s) for each in own) / rounds:.2f}",
                f"{own[-1].scale:.3f}",
                f"{chain_step:.3f}",
                f"{tree_step:.3f}",
            ]
        )
    titles = ["temperature", "guesses", "chain: tokens a round", "tree", "difference", "promised", "depth", "forwards"]
    titles += ["scale", "ms a step, chain", "tree"]
    return (
        f"### Trees and chains of as many guesses\n\n{markdown(titles, rows)}\n\n### What the figures are\n\n{SYMBOLS}"
    )
