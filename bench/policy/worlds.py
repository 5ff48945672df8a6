"""Worlds to try a policy in: devices as they were measured or are built, texts, loads; each is made from its seed."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bench.policy.ahead import AheadSession
from bench.policy.devices import CostModel, Law, World
from bench.policy.texts import TextKind
from gateway.rounds.round import ANY_DRAFT, DrafterId, Makes, Place
from outrider.model_files.model_names import SIM_PRESETS, SimulatedModel

HOSTED = DrafterId("hosted", Place.HOSTED)
NUM_TOKENS = 2_000
"""Tokens that plain decoding makes in a world at least, so that a world says something."""
NUM_STEPS = 100
"""Steps of a load with experts at least, for the same."""

# Milliseconds of a forward by its rows: two CPU cores with AVX2 (docs/measurements/2026-11-22-rows.md, and
# `outrider bench load` for whole steps), and one accelerator that waits for its weights up to some 300 rows.
TABLES: dict[str, tuple[tuple[int, float], ...]] = {
    "135m bfloat16": ((1, 13.0), (4, 17.0), (8, 28.0), (16, 53.0), (32, 100.0), (64, 195.0)),
    "135m int8": ((1, 8.0), (4, 12.0), (8, 22.0), (16, 43.0), (32, 84.0), (64, 166.0)),
    "135m int4": ((1, 6.0), (4, 14.0), (8, 26.0), (16, 50.0), (32, 98.0), (64, 194.0)),
    "200m bfloat16": (
        (1, 10.3),
        (6, 11.1),
        (7, 12.9),
        (8, 13.2),
        (12, 17.0),
        (16, 22.5),
        (24, 31.0),
        (32, 43.0),
        (64, 86.0),
    ),
    "11m bfloat16": ((1, 0.75), (5, 0.9), (8, 1.3), (16, 2.4), (32, 4.5), (64, 8.8)),
    "8b on an H100": ((1, 5.4), (290, 5.5), (1024, 18.0)),
}


def table(points: Sequence[tuple[int, float]], scale: float = 1.0) -> CostModel:
    """Costs that go through points of rows and milliseconds, in lines between them and beyond."""
    rows, costs_us = [point[0] for point in points], [1000 * scale * point[1] for point in points]

    def cost_us(num_rows: int) -> float:
        index = min(max(bisect_left(rows, num_rows), 1), len(rows) - 1)
        low, high = costs_us[index - 1 : index + 1]
        slope = (high - low) / (rows[index] - rows[index - 1])
        return low + slope * (num_rows - rows[index - 1])

    return cost_us


def staircase(fixed_us: float, stair_us: float, width: int) -> CostModel:
    """Costs of tiles: so many rows cost what one does."""
    return lambda num_rows: fixed_us + stair_us * -(-num_rows // width)


def _target(dice: random.Random) -> tuple[str, CostModel, bool]:
    """A target's name, its costs, and whether it is a CPU."""
    name = dice.choice([*TABLES, "staircase", "line"])
    if name in TABLES:
        return name, table(TABLES[name]), "H100" not in name
    scale_us = 10 ** dice.uniform(3.0, 4.5)
    if name == "staircase":
        width = dice.choice([4, 5, 8, 16, 32, 64])
        part = dice.uniform(0.1, 0.8)
        return f"staircase of {width}", staircase(scale_us * (1 - part), scale_us * part, width), width < 16
    part = dice.uniform(0.005, 0.6)
    return f"line with {part:.2f} a row", lambda rows: scale_us * (1 - part + part * rows), part > 0.05


def _share_of(costs: CostModel, share: float, num_rows: int) -> float:
    """A share of other costs."""
    return share * costs(num_rows)


def _kind(dice: random.Random, num_drafters: int) -> TextKind:
    copies = dice.choice([0.0, dice.uniform(0.0, 0.02), dice.uniform(0.02, 0.1)])
    return TextKind(
        share=dice.uniform(0.2, 1.0),
        rates=tuple(dice.uniform(0.15, 0.92) for _ in range(num_drafters)),
        first=dice.uniform(0.7, 1.05),
        copies=copies,
        copied=dice.uniform(0.8, 0.99),
        found=dice.choice([0.0, dice.uniform(0.0, 0.5)]),
        right=dice.uniform(0.05, 0.6),
        belief=dice.uniform(0.85, 1.15),
    )


def world(seed: int) -> World:
    """The world of a seed."""
    dice = random.Random(f"world {seed}")
    name, target_us, is_cpu = _target(dice)
    places = dice.choice([(), (ANY_DRAFT,), (ANY_DRAFT,), (HOSTED,), (HOSTED,), (ANY_DRAFT, HOSTED)])
    laws = []
    for drafter in places:
        share = 10 ** dice.uniform(-1.7, -0.4)
        laws.append(Law(drafter, partial(_share_of, target_us, share)))
    is_shared = is_cpu and dice.random() < 0.6
    loads = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, *([64, 128] if not is_cpu else [])]
    num_phases = dice.choice([1, 1, 2, 3])
    phases = []
    for _ in range(num_phases):
        number = dice.choice(loads)
        phases.append((_seconds(target_us, number), number))
    is_short = dice.random() < 0.3
    shortest = dice.choice([12, 40])
    made = World(
        f"{seed}: {name}, {' and '.join(each.place.value for each in places) or 'no draft'}"
        f"{', shared' if is_shared else ''}",
        target_us,
        tuple(laws),
        tuple(_kind(dice, len(laws)) for _ in range(dice.choice([1, 1, 2, 3]))),
        message_us=10 ** dice.uniform(2.5, 3.5),
        # What makes more of a gateway's thread than of its target is no world of guesses.
        round_us=min(dice.uniform(200, 1200) if is_shared else dice.uniform(50, 300), 0.25 * target_us(1)),
        sharing=dice.uniform(0.3, 1.0) if is_shared else 0.0,
        drift=dice.choice([0.0, dice.uniform(0.0, 0.25)]),
        noise=dice.uniform(0.01, 0.1),
        lengths=(shortest, 4 * shortest) if is_short else (1 << 29, 1 << 29),
        prompt_rows=dice.randint(8, 60) if is_short else 1,
        phases=tuple(phases),
        looks=dice.random() < 0.8,
    )
    if not laws or dice.random() >= 0.35:
        return made
    # Drafters make trees too, and are surer in some rounds than in others.
    spread = dice.uniform(0.0, 0.6)
    grown = tuple(replace(law, drafter=law.drafter._replace(makes=Makes.TREE)) for law in made.drafters)
    kinds = tuple(replace(kind, spread=spread) for kind in made.kinds)
    return replace(made, name=f"{made.name}, trees", drafters=grown, kinds=kinds)


def union(num_experts: int, num_chosen: int, num_rows: int) -> float:
    """Experts that so many rows read together, expected, where each row chooses its own and all are as likely."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_rows)


def of_experts(one_us: float, num_experts: int, num_chosen: int, share: float, row_share: float) -> CostModel:
    """Costs of a model with experts that takes one_us for a row, of which a share is for reading its experts.

    A further row adds a share of that for arithmetic, and its experts that no other row has.
    """

    def cost_us(num_rows: int) -> float:
        read = union(num_experts, num_chosen, num_rows) / num_chosen
        return one_us * (1 - share - row_share + share * read + row_share * num_rows)

    return cost_us


def with_experts(seed: int) -> World:
    """The world of a seed, whose target has experts and is as fast for one row; drafts are dense as they were."""
    dice, dense = random.Random(f"experts {seed}"), world(seed)
    num_experts, num_chosen = dice.choice([(8, 2), (32, 4), (64, 8), (128, 8), (128, 4)])
    share, row_share = dice.uniform(0.3, 0.8), dice.choice([0.0, dice.uniform(0.0, 0.1)])
    target_us = of_experts(dense.target_us(1), num_experts, num_chosen, share, row_share)
    # Steps of many sessions read all experts, and take many times as long as those of one.
    phases = tuple(
        (max(_seconds(target_us, each), NUM_STEPS * target_us(each) / 1e6), each) for _, each in dense.phases
    )
    name = f"{dense.name}, {num_chosen} of {num_experts} experts"
    return replace(dense, name=name, target_us=target_us, phases=phases)


def _seconds(target_us: CostModel, num_sessions: int) -> float:
    """Time for which a load lasts."""
    return min(max(3.0, NUM_TOKENS * target_us(num_sessions) / num_sessions / 1e6), 30.0)


CHAT_TOKENS = 600
"""Tokens that a session of a chat has in its context."""


def h100(num_sessions: int, gateway_us: float = 230.0, branches: int = 0) -> World:
    """An 8B model on an H100 that chats with so many sessions, with a 1B draft on another one: presets of `sim:`.

    The draft makes so many branches for each at most.

    The gateway is one process that takes 345 us for a round with the draft service and 115 us for a token that came
    unasked; measured were 343 and 119, see docs/measurements/2026-11-22-load.md. Three of four texts find little in a
    lookup, the others copy from their prompts.
    """

    def step_us(model: SimulatedModel, sessions: float, rows: int) -> float:
        return 1e6 * model.step_s(rows, int(sessions * CHAT_TOKENS), rows * CHAT_TOKENS)

    target, draft = SIM_PRESETS["h100-8b"], SIM_PRESETS["h100-1b"]
    rates = draft.acceptance[:1]
    return World(
        f"8B on an H100, {num_sessions} streams",
        partial(step_us, target, num_sessions),
        (Law(ANY_DRAFT, lambda rows: step_us(draft, rows, rows)),),
        (
            TextKind(0.75, rates, copies=0.005, found=0.1, right=0.3),
            TextKind(0.25, rates, copies=0.04, copied=0.92, found=0.2, right=0.4),
        ),
        round_us=gateway_us,
        lengths=(150, 450),
        prompt_rows=150,
        phases=((max(5.0, 40.0 / num_sessions), num_sessions),),
        branches=branches,
        session=AheadSession if branches else None,
    )
