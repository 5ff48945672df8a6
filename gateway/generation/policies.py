"""A policy for each target: what forwards and rounds cost with one says nothing of another.

A gateway has one target at a time, the first of its replicas that is there. The next one may have other weights because
it was replaced, or the same ones on another device or in another type, and be many times as slow.
"""

from collections.abc import Callable, Mapping

from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import DrafterId, Place
from gateway.sessions.peer import ModelInfo

MOST_POLICIES = 8
"""Targets that are remembered."""


class Policies:
    """Policies by what a target computes: its weights and its numerics, which name device and type."""

    def __init__(self, new_policy: Callable[[str], SpeculationPolicy] = SpeculationPolicy) -> None:
        """`new_policy` makes the policy of a target of such numerics."""
        self.latest = new_policy("")
        """The policy that was asked for last, for observers on any thread."""
        self._new_policy = new_policy
        self._known: dict[tuple[str, str], tuple[SpeculationPolicy, list[int | None]]] = {}
        """With each the services whose measurements it knows."""

    def of(self, target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> SpeculationPolicy:
        """The policy of a target, which knows what that and the drafts have measured of their models."""
        identity = target.model_hash, target.numerics_id
        instances = [None if info is None else info.instance_id for info in (target, *drafts.values())]
        if identity in self._known:
            self.latest, told = self._known.pop(identity)
        else:
            self.latest, told = self._new_policy(target.numerics_id), []
        if told != instances:
            self.latest.costs.begin(target.row_costs, _measured(target, drafts))
        # Last, as the one that was asked for last.
        self._known[identity] = self.latest, instances
        if len(self._known) > MOST_POLICIES:
            del self._known[next(iter(self._known))]
        return self.latest

    def copied(self, target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> SpeculationPolicy:
        """A copy for an observer of what `of` gives, which changes nothing for requests."""
        known, _ = self._known.get((target.model_hash, target.numerics_id), (None, []))
        policy = self._new_policy(target.numerics_id) if known is None else known.copied()
        policy.costs.begin(target.row_costs, _measured(target, drafts))
        return policy


def _measured(target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> dict[DrafterId, Mapping[int, int]]:
    """What services have measured of each drafter."""
    measured = {DrafterId(name, Place.HOSTED): costs for name, costs in target.drafter_costs.items()}
    for name, info in drafts.items():
        if info is not None:
            measured |= {DrafterId(each): costs for each, costs in info.drafter_costs.items()}
            measured[DrafterId(name)] = info.row_costs
    return measured
