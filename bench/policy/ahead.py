"""Sessions whose draft runs ahead: branches that it makes while the target verifies, and what the target makes of them.

A branch is there for an outcome as often as the formula of its rates says. The draft's own cache is not simulated:
where it has to guess after a miss, it begins anew.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from bench.policy.devices import SimulatedSession
from gateway.rounds.branching import missed_share
from gateway.rounds.round import NOTHING, GuessRequest, Makes, Place, Proposal, Verdict
from outrider.token_tree import TokenTree


class Branches(NamedTuple):
    """Branches for what comes of the verification on a length, as they were asked for."""

    base_len: int
    asked: GuessRequest


class AheadSession(SimulatedSession):
    """One request whose draft may run ahead."""

    trunk_len = 0
    """Steps of the draft's job before branches."""
    due = Branches(0, GuessRequest())
    """Branches that it is to make."""
    went_on = is_of_branch = had_branches = False
    handed = there = Branches(0, GuessRequest())
    """The newest branches that the gateway has handed on, and those that have come to the target."""
    decided_len = 0
    """Length that the target's last verdict is on."""

    def guess(self, asked: GuessRequest) -> None:
        super().guess(asked)
        # What the draft still has to do for an earlier length is not wanted any more.
        self.job += 1
        self.simulation.draft.waiting.pop(self, None)
        self.due = Branches(len(self.log), asked)
        chain = () if asked.went_on else self.levels
        self.trunk_len = len(chain)
        self.levels = (*chain, *(asked.branch_count,) * (asked.count + 1 if asked.branch_count else 0))

    def next_round(self) -> None:
        if not self.went_on or self.ended or len(self.log) >= self.max_len:
            super().next_round()
            return
        self.log.begin_round()
        self.plan = self.planner.plan(self.log, 0, self.simulation.outlook, went_on=True)
        asked = self.plan.asked(Place.REMOTE)
        self.proposal = NOTHING
        if asked.count:
            self.guess(asked)
            self._ask_draft()
        if not self.trunk_len or not asked.count:
            self._await()

    def drafted(self, took_us: float, num_rows: int) -> None:
        done, due = len(self.levels) - self.left + 1, self.due
        if done <= self.trunk_len:
            self.draft_us += took_us
            self.draft_rows += num_rows
        self.left -= 1
        if self.left:
            self.simulation.draft.waiting[self] = self.simulation.now_us
        if done == self.trunk_len:
            self._answer(due.asked, self.trunk_len)
        elif not self.left:
            self.simulation.after(self.simulation.world.message_us / 2, lambda: self._hand_on(due))

    def _arrived(
        self, base_len: int, tree: TokenTree, chance: Callable[[int, int], float], limit: int, own: GuessRequest
    ) -> None:
        if self.is_of_branch and base_len == self.target_len:
            # It has begun with a branch.
            tree, chance = self.tree, self.chance
        super()._arrived(base_len, tree, chance, limit, own)

    def _hand_on(self, branches: Branches) -> None:
        """Branches are at the gateway, which does not read them."""
        if branches.base_len == len(self.log) and not self.ended:
            self.handed = branches
            self._send(partial(self._come, branches))

    def _come(self, branches: Branches) -> None:
        """Branches are at the target."""
        self.there = branches
        is_idle = self not in self.simulation.target.waiting and self not in self.simulation.stepping
        # Else the gateway counts on nothing, and sends guesses.
        is_awaited = branches.asked.plain_on_miss and branches.base_len == self.decided_len
        if is_awaited and is_idle and self.target_len < self.max_len:
            self._go_on()

    def _go_on(self) -> None:
        """The target begins with what fits, or with a plain token."""
        asked = self.there.asked
        rate = self.rates(asked.drafter, 2, self.jitter * self.simulation.tide)[0]
        room = self.max_len - self.target_len - 1
        is_hit = self.simulation.dice.random() >= missed_share(round(rate, 2), asked.count, asked.branch_count)
        if is_hit and room > 0:
            self.tree, self.is_of_branch = TokenTree.chain((1,) * min(asked.count, room)), True
            self.chance = self.chance_of(asked.drafter)
        if is_hit or asked.plain_on_miss:
            self.goes_on.add(self.decided_len)
            self.simulation.target.put(self)

    def verified(self, took_us: float, rows: int, prompt_rows: int) -> None:
        self.decided_len = self.target_len
        super().verified(took_us, rows, prompt_rows)
        if self.there.base_len == self.decided_len and self.target_len < self.max_len and not self.ended:
            self._go_on()

    def own_proposal(self) -> Proposal | None:
        if not self.is_of_branch:
            return super().own_proposal()
        self.is_of_branch = False
        drafter = self.there.asked.drafter._replace(makes=Makes.CHAIN)
        return Proposal(self.tree, drafter=drafter, is_ahead=True)

    def take(self, verdict: Verdict) -> None:
        verdict.had_branches, self.had_branches = self.had_branches, self.handed.base_len == verdict.base_len
        verdict.is_of_branch = verdict.own is not None and verdict.own.is_ahead
        goes_on = verdict.base_len in self.goes_on or self.handed.asked.plain_on_miss
        self.went_on = self.had_branches and goes_on and verdict.finish_reason is None
        super().take(verdict)
