"""Branches of a round: what outcomes of its verification they are there for, by how many there are. Pure.

A verification ends after one of the guesses, with a token of the target's own. After each of them the draft keeps the
likeliest such tokens, and that the right one is not among F of them falls with a power of F; the surer the guesses are,
the faster (SSD, Kumar et al., 2026, arXiv 2603.03251; the power was fitted to distributions of language models). So
branches are best spread as F_k ~ P(k)^(1/(1+r)) over the places k, which end so often.
"""

from collections.abc import Sequence
from functools import lru_cache

POWER, POWER_OF_DOUBT = 0.31, 0.75
"""The power of F is 0.31 / (1 - acceptance)^0.75."""
SUREST, LEAST_SURE = 0.97, 0.05
"""Acceptance beyond which nothing is extrapolated."""
BYTES, TOKEN_BYTES = 10, 3
"""Bytes of a branch beside its guesses, and of each guess, where ids are those of a large vocabulary."""
COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of branches that are looked at."""


@lru_cache(maxsize=256)
def missed_share(acceptance: float, draft_count: int, branch_count: int) -> float:
    """Expected share of outcomes of so many guesses, each accepted with such a chance, that have no branch."""
    sure = min(max(acceptance, LEAST_SURE), SUREST)
    power: float = POWER * (1 - sure) ** -POWER_OF_DOUBT
    ends = [*(sure**place * (1 - sure) for place in range(draft_count)), sure**draft_count]
    weights = [end ** (1 / (1 + power)) for end in ends]
    *spread, last = (branch_count * weight / sum(weights) for weight in weights)
    # After the last guess the likeliest token is not one that was just refused.
    missed: float = ends[-1] * (1 - sure) ** min(last, 1.0) * max(last, 1.0) ** -power
    for end, count in zip(ends, spread, strict=False):
        missed += end * (1 + count) ** -power
    return missed


def mean_acceptance(rates: Sequence[float], draft_count: int) -> float:
    """One rate for guesses of several depths, in hundredths."""
    return round(sum(rates[:draft_count]) / max(draft_count, 1), 2)


def most_within(num_bytes: int, draft_count: int) -> int:
    """Number of branches with so many guesses that take so many bytes on their two ways together, at least 1."""
    return max(1, num_bytes // (2 * (BYTES + TOKEN_BYTES * draft_count)))
