"""Parts of the choice of guesses that can be left out: it shows what each is worth, and that the bench can fail."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.policy.devices import Simulation
from gateway.rounds.costs import SessionEstimates
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import DrafterId
from gateway.rounds.tuning import TUNING
from outrider.estimates.acceptance import AcceptanceRates

NEVER = 1 << 40


class FreeRows(SpeculationPolicy):
    """A policy in which rows of a lookup have no price: a session takes what is worth it to itself alone."""

    def row_price(self, session: SessionEstimates) -> float:
        return 0.0


class Strangers(SpeculationPolicy):
    """A policy whose sessions begin without what is known of all."""

    def session(self, *drafters: DrafterId) -> SessionEstimates:
        session = super().session(*drafters)
        session.acceptance = {each: AcceptanceRates() for each in drafters}
        return session


class Equals(SpeculationPolicy):
    """A policy to which all sessions are alike."""

    def session(self, *drafters: DrafterId) -> SessionEstimates:
        session = super().session(*drafters)
        session.acceptance = {each: self.costs.of(each).acceptance for each in drafters}
        return session


PARTS: dict[str, Callable[..., Simulation]] = {
    "": Simulation,
    # What services have measured before they serve.
    "measured": partial(Simulation, knows_costs=False),
    # Tests of what may be bad luck.
    "doubt": partial(Simulation, tuning=replace(TUNING, least_tests=0)),
    # Seeing plain decoding before guesses that look little faster.
    "plain": partial(Simulation, tuning=replace(TUNING, sure_gain=0.0)),
    # Looks whether guesses that were not worth it are now.
    "probes": partial(Simulation, tuning=replace(TUNING, probe_tokens=(NEVER, NEVER))),
    # What a row of a lookup costs all sessions.
    "price": partial(Simulation, policy=FreeRows),
    # Seeing that all sessions together are slower with guesses.
    "account": partial(Simulation, tuning=replace(TUNING, most_lost=math.inf)),
    # What is known of all sessions, for one that begins.
    "pool": partial(Simulation, policy=Strangers),
    # What is known of a session beside the others.
    "sessions": partial(Simulation, policy=Equals),
}
"""Choices without a part by its name; of the empty one the choice is whole."""
