"""Figures of a load run under the names of `vllm bench serve`, which tools read already. Knows no gateway.

TTFT is the time to the first burst, ITL the time between two bursts, TPOT the time behind the first burst for each
further token, E2EL the whole. A round brings several tokens at once, so ITL has two humps, and TPOT tells the speed.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from bench.load import Asked, Block

TIMES = ("ttft", "tpot", "itl", "e2el")
Figures = dict[str, float | int | list[int] | None]


def figures(blocks: Sequence[Block], streams: int) -> Figures:
    """All figures of one setting; times and rates are None where nothing was answered."""
    asked = [each for block in blocks for each in block.requests]
    answered = [each for each in asked if not each.error]
    duration_s = sum(block.seconds for block in blocks)
    tokens, prompt_tokens = (sum(counts) for counts in ((len(each.token_ids) for each in answered), _prompts(answered)))
    return {
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(asked) - len(answered),
        "max_concurrency": streams,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": _rate(len(answered), duration_s),
        "output_throughput": _rate(tokens, duration_s),
        "total_token_throughput": _rate(tokens + prompt_tokens, duration_s),
        **{name: value for kind in TIMES for name, value in _spread(kind, times_s(kind, answered)).items()},
        **_speculation(answered),
    }


def _prompts(answered: Sequence[Asked]) -> list[int]:
    return [each.prompt_tokens for each in answered]


def times_s(kind: str, answered: Sequence[Asked]) -> list[float]:
    """Times of one kind over all requests; one with a single token has neither a TPOT nor an ITL."""
    told = [each for each in answered if each.bursts]
    match kind:
        case "ttft":
            return [each.bursts[0].at_s for each in told]
        case "e2el":
            return [each.seconds for each in told]
        case "itl":
            return [after.at_s - before.at_s for each in told for before, after in pairwise(each.bursts)]
    # The first burst is one token, or several where a proposal was verified with the prompt.
    behind = [(each, sum(burst.tokens for burst in each.bursts[1:])) for each in told]
    return [(each.bursts[-1].at_s - each.bursts[0].at_s) / count for each, count in behind if count]


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation, as numpy does by default. Raises ValueError without values."""
    if not values:
        raise ValueError("there is no percentile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def equal_answers(blocks: Sequence[Block]) -> tuple[int, int]:
    """Requests whose answers with and without speculation have the same tokens, and requests that have both."""
    sides: dict[bool, dict[int, tuple[int, ...]]] = {True: {}, False: {}}
    for block in blocks:
        sides[block.speculative] |= {each.number: each.token_ids for each in block.requests if not each.error}
    both = sides[True].keys() & sides[False].keys()
    return sum(sides[True][number] == sides[False][number] for number in both), len(both)


def _spread(kind: str, seconds: Sequence[float]) -> Figures:
    times_ms = [1e3 * each for each in seconds]
    if not times_ms:
        return {f"{name}_{kind}_ms": None for name in ("mean", "median", "std", "p99")}
    return {
        f"mean_{kind}_ms": statistics.fmean(times_ms),
        f"median_{kind}_ms": statistics.median(times_ms),
        f"std_{kind}_ms": statistics.pstdev(times_ms),
        f"p99_{kind}_ms": percentile(times_ms, 0.99),
    }


def _speculation(answered: Sequence[Asked]) -> Figures:
    drafts = [draft for each in answered for draft in each.drafts]
    drafted, evaluated, accepted = (sum(draft[part] for draft in drafts) for part in range(3))
    longest = max((draft[0] for draft in drafts), default=0)
    return {
        "num_drafts": len(drafts),
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "accepted_per_pos": [sum(draft[2] > place for draft in drafts) for place in range(longest)],
        "acceptance_rate": _rate(accepted, evaluated),
        "draft_acceptance_rate": _rate(accepted, drafted),
        "mean_acceptance_length": 1 + accepted / len(drafts) if drafts else None,
    }


def _rate(count: float, over: float) -> float | None:
    return count / over if over else None
