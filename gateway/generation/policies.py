"""A policy for each target: what forwards and rounds cost with one says nothing of another.

Targets share the sessions, and each has a load of its own. One may have other weights because it was replaced, or the
same ones on another device or in another type, and be many times as slow. How often guesses are right depends on the
weights alone, so that those of the same model learn it together.
"""

from collections.abc import Callable, Collection, Mapping

from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import DrafterId, Place
from gateway.sessions.peer import ModelInfo

MOST_POLICIES = 64
"""Least number that are remembered of targets with a link: what was there before at their addresses may come back."""


class Policies:
    """Policies by the address of a target, its weights, and its numerics, which name device and type."""

    def __init__(self, new_policy: Callable[[str], SpeculationPolicy] = SpeculationPolicy) -> None:
        """`new_policy` makes the policy of a target of such numerics."""
        self.latest = new_policy("")
        """The policy that was asked for last, for observers on any thread."""
        self._new_policy = new_policy
        self._known: dict[tuple[str, str, str], tuple[SpeculationPolicy, list[int | None]]] = {}
        """With each the services whose measurements it knows."""

    def of(self, target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> SpeculationPolicy:
        """The policy of a target, which knows what that and the drafts have measured of their models."""
        identity = identity_of(target)
        instances = [None if info is None else info.instance_id for info in (target, *drafts.values())]
        if identity in self._known:
            self.latest, told = self._known.pop(identity)
        else:
            self.latest, told = self._new(target), []
        if told != instances:
            self.latest.costs.begin(target.row_costs, _measured(target, drafts))
        # Last, as the one that was asked for last.
        self._known[identity] = self.latest, instances
        return self.latest

    def keep(self, addresses: Collection[str]) -> None:
        """Forgets targets that have no link any more, and what was long ago at the addresses of those that have."""
        here = [identity for identity in self._known if identity[0] in addresses]
        # As many again as there may be now: those are the last ones, because each was asked for.
        self._known = {each: self._known[each] for each in here[-max(MOST_POLICIES, 2 * len(addresses)) :]}

    def copied(self, target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> SpeculationPolicy:
        """A copy for an observer of what `of` gives, which changes nothing for requests."""
        known, _ = self._known.get(identity_of(target), (None, []))
        policy = self._new(target).copied() if known is None else known.copied()
        policy.costs.begin(target.row_costs, _measured(target, drafts))
        return policy

    def _new(self, target: ModelInfo) -> SpeculationPolicy:
        """A policy that begins with what is known of the same model elsewhere, if anything is."""
        policy = self._new_policy(target.numerics_id)
        policy.address = target.address
        alike = {each[2]: known for each, (known, _) in self._known.items() if each[1] == target.model_hash}
        if alike:
            # All of them have the same already.
            policy.costs.share_acceptance(next(iter(alike.values())).costs)
        if target.numerics_id in alike and not target.row_costs:
            policy.costs.begin(alike[target.numerics_id].costs.verify_us.table, {})
        return policy


def identity_of(target: ModelInfo) -> tuple[str, str, str]:
    """What a policy is of."""
    return target.address, target.model_hash, target.numerics_id


def _measured(target: ModelInfo, drafts: Mapping[str, ModelInfo | None]) -> dict[DrafterId, Mapping[int, int]]:
    """What services have measured of each drafter."""
    measured = {DrafterId(name, Place.HOSTED): costs for name, costs in target.drafter_costs.items()}
    for name, info in drafts.items():
        if info is not None:
            measured |= {DrafterId(each): costs for each, costs in info.drafter_costs.items()}
            measured[DrafterId(name)] = info.row_costs
    return measured
