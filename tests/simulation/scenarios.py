"""What hypothesis may draw: requests side by side, faults at chosen messages, storms, small caches."""

from hypothesis import strategies as st
from simulation.invariants import Client
from simulation.models import PROMPTS, Asked
from simulation.weather import Fault, Kind
from simulation.world import DRAFT, DURATIONS_S, PLACES, TARGETS, Scenario

from outrider.parameters import Rule

asked = st.builds(
    Asked,
    prompt=st.integers(0, len(PROMPTS) - 1),
    temperature=st.sampled_from((0.8, 0.0)),
    penalty=st.sampled_from((0.0, 0.0, 0.7)),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from((4, 12, 24)),
)
clients = st.builds(
    Client,
    asked=asked,
    draft_count=st.sampled_from((4, 0, 1, 8, None, None)),
    greedy_rule=st.sampled_from((Rule.MATCH, Rule.RATIO, Rule.BLOCK)),
    starts_s=st.sampled_from((0.0, 0.0, 0.01, 0.1)),
    cancel_at=st.none() | st.none() | st.integers(0, 60),
    deadline_s=st.sampled_from((None, None, None, 5.0)),
    dawdle_s=st.sampled_from((0.0, 0.0, 0.05)),
)
faults = st.builds(
    Fault,
    place=st.sampled_from(PLACES),
    is_up=st.booleans(),
    ordinal=st.integers(0, 20),
    kind=st.sampled_from(Kind),
    duration_s=st.sampled_from(DURATIONS_S),
)
scenarios = st.builds(
    Scenario,
    clients=st.lists(clients, min_size=1, max_size=4).map(tuple),
    faults=st.lists(faults, max_size=5).map(tuple),
    storm=st.sampled_from((0.0, 0.03, 0.1, 0.3)),
    storm_places=st.sampled_from((PLACES, TARGETS, (DRAFT,))),
    seed=st.integers(0, 2**32 - 1),
    kv_tokens=st.sampled_from((256, 64)),
    draft_kv_tokens=st.sampled_from((256, 48)),
    hosts=st.sampled_from(((), TARGETS, TARGETS[:1])),
    branches=st.sampled_from((0, 4, 16)),
    gateway_dies_s=st.sampled_from((None, None, None, None, None, 0.01, 0.05, 3.0)),
)
# Worlds in which a fault of the targets shows soon: long answers side by side, and a rough way to the targets.
rough_ways = st.builds(
    Scenario,
    clients=st.just(
        tuple(
            Client(
                Asked(number % 2, 0.8 * (number % 2), seed=number, max_tokens=48), draft_count, starts_s=0.01 * number
            )
            for number, draft_count in enumerate((4, 0, None, 4))
        )
    ),
    storm=st.just(0.15),
    storm_places=st.just(TARGETS),
    hosts=st.sampled_from(((), TARGETS, TARGETS[:1])),
    seed=st.integers(0, 2**32 - 1),
)
