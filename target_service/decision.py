"""What the target does with the logits of a step: each session's rule, many sessions at once. Commits nothing.

An empty proposal is plain decoding under every rule. A session that cannot be served fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import Ask, draw_each
from outrider.errors import OutriderError
from outrider.parameters import Acceptance
from target_service.acceptance import Walk, walk
from target_service.chains import decide_chains
from target_service.substitutes import find_substitutes


@dataclass(frozen=True, slots=True)
class Kind:
    """What chains must have in common to be decided at once."""

    acceptance: Acceptance
    is_greedy: bool
    draft_count: int


def decide(
    runner: ModelRunner, asks: Sequence[Ask], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walk of each session through its proposal, or why there is none.

    The rows of asks[i] are logits[ranges[i]], the root's first. Keeps nothing: the same ask and logits give the same
    walk, on the CPU whatever stands beside them.
    """
    kinds = [_kind(ask) for ask in asks]
    if not any(kinds):
        return _follow_draws(runner, asks, logits, ranges)
    decided: dict[int, Walk | OutriderError] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        decide_group = decide_chains if kind else _follow_draws
        chosen, rows = [asks[number] for number in numbers], [ranges[number] for number in numbers]
        decided |= zip(numbers, decide_group(runner, chosen, logits, rows), strict=True)
    return [decided[number] for number in range(len(asks))]


def _kind(ask: Ask) -> Kind | None:
    """The kind of a chain that is tested with coins or against a bound, None for whatever follows draws."""
    spec, draft_count = ask.spec, len(ask.feed.tree)
    if not draft_count or not spec.acceptance.rule.needs_distributions:
        return None
    return Kind(spec.acceptance, spec.sampling.temperature == 0, draft_count)


def _follow_draws(
    runner: ModelRunner, asks: Sequence[Ask], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The rules `match` and `typical`, and every rule without a proposal: a draw behind each row, and a walk."""
    drawn = draw_each(runner, logits, asks, ranges)
    substitutes = find_substitutes(runner, asks, logits, ranges, drawn)
    return [
        each if isinstance(each, OutriderError) else walk(ask.feed.tree, each, substitutes.get(number, ()))
        for number, (ask, each) in enumerate(zip(asks, drawn, strict=True))
    ]
