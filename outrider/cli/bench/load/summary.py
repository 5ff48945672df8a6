"""From blocks to figures: quartiles over turns, ratios of neighbours with their intervals, and equal answers.

A ratio is one of two blocks of the same turn and load. Its figure is the median over turns with an interval of 95 %
from the bootstrap. Gaps and first tokens are taken from all turns together.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from outrider.cli.bench.common import AUTO, PLAIN, TREE, Spread, interval, spread
from outrider.cli.bench.load.driver import CLIENT, Block, Clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Figures of one setting under one load. Rounds are messages with tokens, as the clients saw them."""

    temperature: float
    streams: int
    setting: str
    tokens_per_s: Spread
    over_plain: Spread
    over_best_fixed: Spread
    """Tokens/s over those of the fastest setting but auto."""
    over_best_chain: Spread
    """Tokens/s over those of the fastest setting but auto that has no trees."""
    rounds_per_s: Spread
    tokens_per_round: float
    drafted_per_round: float
    acceptance_rate: float | None
    """Accepted of all draft tokens that were evaluated; None where there were none."""
    gap_s: Spread
    p99_gap_s: float
    p99_gap_over_plain: Spread
    first_token_s: Spread
    cpu_per_round_s: dict[str, float]
    """CPU seconds a round by process, the client too."""
    device_busy: dict[str, float]
    """Share of the time, by process."""
    equal_answers: int
    """Number of compared answers that are plain's token for token."""
    compared_answers: int


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of all does not exceed. Raises ValueError when there are none."""
    numbers = sorted(values)
    if not numbers:
        raise ValueError("there is no percentile of no values")
    return numbers[max(0, math.ceil(share * len(numbers)) - 1)]


def p99_gap_s(block: Block) -> float:
    """The gap that 99 of 100 do not exceed."""
    return percentile(block.gaps_s, 0.99)


def ratios(blocks: Sequence[Block], bases: Sequence[Block], figure: Callable[[Block], float]) -> Spread:
    """A figure over that of the other setting in the same turn."""
    by_turn = {each.turn: figure(each) for each in bases}
    return interval(figure(each) / by_turn[each.turn] for each in blocks)


def equal_answers(blocks: Sequence[Block]) -> tuple[int, int]:
    """Number of answers that have the tokens of plain decoding, and number of those that were compared."""
    equal = [
        block.plain[each.number] == each.token_ids
        for block in blocks
        for each in block.answers
        if each.number in block.plain
    ]
    return sum(equal), len(equal)


def spent(blocks: Sequence[Block], clock: Callable[[Clocks], Mapping[str, float]]) -> dict[str, float]:
    """Seconds that clocks advanced within the windows of all blocks together, by process."""
    return {
        name: sum(clock(each.ended)[name] - clock(each.began)[name] for each in blocks)
        for name in clock(blocks[0].began)
    }


def summarize(blocks: Sequence[Block]) -> list[LoadFigures]:
    """Figures of every setting under every load, in the order of the run's first turn."""
    found = []
    temperatures, streams = ({getattr(each, name): None for each in blocks} for name in ("temperature", "streams"))
    for load in product(temperatures, streams):
        settings: dict[str, list[Block]] = {}
        for block in blocks:
            if (block.temperature, block.streams) == load:
                settings.setdefault(block.setting, []).append(block)
        fixed = [name for name in settings if not name.startswith(AUTO)]
        medians = {name: spread(each.tokens_per_s for each in settings[name]).median for name in fixed}
        best = max(fixed, key=medians.__getitem__)
        chain = max((name for name in fixed if not name.startswith(TREE)), key=medians.__getitem__)
        bases = settings[PLAIN], settings[best], settings[chain]
        found += [figures_of(each, *bases) for each in settings.values()]
    return found


def figures_of(
    blocks: Sequence[Block], plain: Sequence[Block], best: Sequence[Block], chain: Sequence[Block]
) -> LoadFigures:
    """Figures of one setting, the others are what it is compared with. Raises ValueError about no blocks."""
    bursts = [burst for block in blocks for burst in block.bursts]
    seconds, evaluated = sum(block.seconds for block in blocks), sum(burst.evaluated for burst in bursts)
    gaps_s = [gap_s for block in blocks for gap_s in block.gaps_s]
    equal, compared = equal_answers(blocks)
    used_s, busy_s = spent(blocks, lambda clocks: clocks.cpu_s), spent(blocks, lambda clocks: clocks.busy_s)
    return LoadFigures(
        temperature=blocks[0].temperature,
        streams=blocks[0].streams,
        setting=blocks[0].setting,
        tokens_per_s=spread(each.tokens_per_s for each in blocks),
        over_plain=ratios(blocks, plain, lambda block: block.tokens_per_s),
        over_best_fixed=ratios(blocks, best, lambda block: block.tokens_per_s),
        over_best_chain=ratios(blocks, chain, lambda block: block.tokens_per_s),
        rounds_per_s=spread(len(each.bursts) / each.seconds for each in blocks),
        tokens_per_round=sum(burst.tokens for burst in bursts) / len(bursts),
        drafted_per_round=sum(burst.drafted for burst in bursts) / len(bursts),
        acceptance_rate=sum(burst.accepted for burst in bursts) / evaluated if evaluated else None,
        gap_s=spread(gaps_s),
        p99_gap_s=percentile(gaps_s, 0.99),
        p99_gap_over_plain=ratios(blocks, plain, p99_gap_s),
        first_token_s=spread(each for block in blocks for each in block.first_tokens_s),
        cpu_per_round_s={name: each_s / len(bursts) for name, each_s in used_s.items()},
        device_busy={name: each_s / seconds for name, each_s in busy_s.items()},
        equal_answers=equal,
        compared_answers=compared,
    )


def client_share(blocks: Iterable[Block]) -> float:
    """The largest share of a core that the client took in a block."""
    return max((each.ended.cpu_s[CLIENT] - each.began.cpu_s[CLIENT]) / each.seconds for each in blocks)
