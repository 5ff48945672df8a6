"""Trees beside chains of as many guesses: what is kept of them, what their values promise, and what a step costs.

Under `match` the target keeps the guesses that its own text goes on with, so the text says what it would say. The scale
of the values is learned on the way, as a draft service learns it, from the tokens that follow each place.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.acceptance.report import mean
from bench.acceptance.runs import AT_A_TIME, AcceptancePlan, ModelPair, Readers
from outrider.cli.bench.common import markdown
from outrider.drafters.drafter import NO_GUESSES, GuessLimits
from outrider.drafters.hosted import HostedDraft
from outrider.drafters.scales import Experience, Scales
from outrider.engine.batching import Feed
from outrider.errors import CacheFull
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import SessionSpec
from outrider.token_tree import TokenTree, TreeShape

SYMBOLS = """\
Behind the same prefixes of texts that the target wrote at that temperature, under `match`. Tokens a round: what is kept
of the guesses, and the target's own token. Promised: the same as the values of a tree's rows add up to. Scale: s at the
end, which is learned from where it starts. Step: one forward of a session that drafts alone, with its draws and what it
has to read first. ±: one standard error, over texts."""


@dataclass(slots=True)
class Proposed:
    """Sums of one kind of proposal in all rounds of one prompt."""

    rounds: int = 0
    accepted: int = 0
    depths: int = 0
    """Sum of the depths of the proposals."""
    promised: float = 0.0
    """Sum of all values, none of which a chain without a shape has."""
    forwards: int = 0
    step_us: list[float] = field(default_factory=list)
    """Microseconds of a forward, of each proposal the mean."""

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds

    def add(self, tree: TokenTree, accepted: int, times: ComputeTimes) -> None:
        """Counts one proposal of a round."""
        self.rounds += 1
        self.accepted += accepted
        self.depths += max(tree.depths)
        self.promised += sum(tree.values)
        self.forwards += times.forward_count
        self.step_us.append(times.compute_us / times.forward_count)


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
    session = pair.target.open(text[: spec.prompt_len], spec.prompt_len)
    drafts = [HostedDraft(pair.draft.runner, spec, None, pair.draft.copy, Experience(scales)) for _ in (chain, tree)]
    for place in range(0, plan.text_len - num_rows, plan.stride):
        length = spec.prompt_len + place
        session.replace_tail(1, text[1:length])
        while pair.draft.copy is not None and session.cached_len < length - 1:
            pair.target.forward([Feed(session, without_last=True)])
        for draft, shape, proposed in zip(drafts, (None, TreeShape()), (chain, tree), strict=True):
            draft.propose(session, GuessLimits(num_rows, shape, num_rows))
            while draft.proposal is None:
                pair.draft.advance([draft])
            guesses = draft.proposal.tree
            if not guesses:
                # Nothing may fail in a measurement; a full pool is a run that was planned wrongly.
                raise CacheFull("a draft had no room for its guesses")
            proposed.add(guesses, len(list(kept_rows(guesses, text[length:]))), draft.proposal.times)
        # What a service would learn from, as soon as the target has said it.
        session.replace_tail(1, text[1 : length + num_rows])
        drafts[1].propose(session, NO_GUESSES)
        drafts[1].truncate(length)
    session.free()
    for draft in drafts:
        draft.free()
    return tree, chain


def kept_rows(tree: TokenTree, token_ids: Sequence[int]) -> Iterator[int]:
    """The rows of the path that these tokens go down."""
    row = 0
    for token_id in token_ids:
        row = next((child for child in tree.children(row) if tree.token_ids[child - 1] == token_id), 0)
        if not row:
            return
        yield row


def render_trees(counts: Sequence[TreeCounts]) -> str:
    """The table of a run, and what its figures mean."""
    rows = []
    for temperature, num_rows in dict.fromkeys((each.temperature, each.num_rows) for each in counts):
        own = [each for each in counts if (each.temperature, each.num_rows) == (temperature, num_rows)]
        rounds = sum(each.tree.rounds for each in own)
        counted = 1 + sum(each.tree.accepted for each in own) / rounds
        promised = 1 + sum(each.tree.promised for each in own) / rounds
        chain_step, tree_step = (
            statistics.median(step for each in kind for step in each.step_us) / 1e3
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
                f"{sum(each.tree.forwards for each in own) / rounds:.2f}",
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
