"""The plan of each round of one request, within all limits: K, and what the target may commit unasked. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from gateway.rounds.drafter_estimates import TREE
from gateway.rounds.merging import cut, merged
from gateway.rounds.policy import PLAIN_BUDGET, Choice, SpeculationPolicy
from gateway.rounds.round import LOOKUP, FallbackReason, OwnGuesses, Proposal, Round, TokenLog
from outrider.parameters import Rule
from outrider.token_tree import TreeShape

OWN_BUDGET = 64  # tokens committed unasked while the target drafts for itself
WAITING_BUDGET = 8  # tokens committed unasked while the draft is away and may come back at any time


@dataclass(frozen=True, slots=True)
class DraftOutlook:
    """Outlook of a draft session now; None where nothing is in the way, or nothing is known."""

    obstacle: FallbackReason | None = None  # why it is no use to ask for guesses now
    context_len: int | None = None
    max_draft_count: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Plan of a round: draft tokens to ask for, tokens that the target may commit unasked, and why there is no draft.

    own_draft_count are those that the target's own drafter is to make, for this verdict and for unasked ones after it,
    a chain or in own_shape. `shape` is that of the draft's guesses, None for a chain. look_count rows come from a
    lookup, and where the target would go on unasked, they end that.
    """

    draft_count: int
    plain_budget: int
    fallback_reason: FallbackReason | None = None
    own_draft_count: int = 0
    shape: TreeShape | None = None
    look_count: int = 0
    own_shape: TreeShape | None = None

    @property
    def own(self) -> OwnGuesses:
        return OwnGuesses(self.own_draft_count, self.own_shape)

    def explain(self, proposal: Proposal) -> Proposal:
        """The proposal, with this plan's reason where it has none of its own."""
        is_explained = self.fallback_reason is None or proposal.fallback_reason is not None
        return proposal if is_explained else replace(proposal, fallback_reason=self.fallback_reason)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafters that may guess for a request.

    `remote` is what the draft services are asked for, None where there is none to ask; `own` a drafter of the target's
    process, empty for none, and own_makes_trees says whether it makes any. `shape` is that of guesses where the request
    names one. Where it does not, the policy chooses between chains and trees, of a draft with may_grow_trees, and of
    the target's own drafter wherever it makes some and the rule does not test with distributions. `looks` says that
    lookups are made: the policy chooses between these and the other drafters. With `merges` several drafters, lookups
    among them, make one proposal under the request's rule, and `remote` is what they are called together.
    """

    remote: str | None = ""
    own: str = ""
    shape: TreeShape | None = None
    may_grow_trees: bool = False
    own_makes_trees: bool = False
    looks: bool = False
    merges: bool = False
    rule: Rule = Rule.MATCH


class RoundPlanner:
    """The planner of one request. draft_count None lets the policy choose for every round; 0 never speculates.

    The policy counts the request among the sessions at work until its context is left.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        draft_count: int | None,
        max_len: int,
        max_draft_count: int,
        drafting: Drafting = Drafting(),
    ) -> None:
        self._policy = policy
        self._drafting = drafting
        self._remote = drafting.remote
        is_free = draft_count is None and drafting.shape is None
        self._grows_trees = drafting.may_grow_trees and is_free
        self._grows_own_trees = drafting.own_makes_trees and is_free and not drafting.rule.needs_distributions
        self._own = drafting.own
        self._own_shape = drafting.shape if drafting.own_makes_trees else None
        # Without any drafter, rounds say that a draft is absent.
        nobody = () if drafting.looks else ("",)
        self._session = policy.session(*(self._drafters(drafting.own) or nobody))
        self._draft_count = draft_count
        self._max_len = max_len
        self._max_draft_count = max_draft_count
        self._next: Choice | None = None
        self._plain_plan = RoundPlan(0, 0)
        self._unasked = False

    def __enter__(self) -> Self:
        self._policy.enter(self._session)
        return self

    def __exit__(self, *_exit: object) -> None:
        self._policy.leave(self._session)

    def expects_draft(self) -> bool:
        """Whether the draft should read the prompt at once, while the target does."""
        choice = self._choose(self._max_draft_count, ready=False)
        return choice.draft_count > 0 and choice.drafter in self._remotes

    def room(self, log: TokenLog) -> int:
        """Greatest depth of a proposal: the request's last token is the target's alone."""
        return max(0, self._max_len - len(log) - 1)

    def plan(
        self, log: TokenLog, outstanding: int, draft: DraftOutlook, own: str = "", look: Sequence[float] = ()
    ) -> RoundPlan:
        """Plans the round on top of the log, while the target may still commit `outstanding` tokens unasked.

        `own` is the drafter that the target has for this session now; another target may have none. `look` are the
        values of what a lookup has found, falling.
        """
        if look and len(log) > log.prompt_len and (outstanding or not self._drafting.merges):
            look_count = self._look_count(outstanding, look)
            if look_count:
                self._next, self._unasked = None, outstanding > 0
                return RoundPlan(0, 0, look_count=look_count)
        if 2 * outstanding > self._plain_plan.plain_budget > 0:
            # Nothing is sent in the first half of a stretch, so there is nothing to choose at every token.
            self._unasked = True
            return RoundPlan(0, 0, self._plain_plan.fallback_reason)
        if own != self._own and self._drafters(own):
            self._own = own
            self._policy.change(self._session, *self._drafters(own))
        is_first, limit = len(log) == log.prompt_len, min(self._max_draft_count, self.room(log))
        past_context = draft.context_len is not None and len(log) + 1 > draft.context_len
        obstacle = FallbackReason.DRAFT_CONTEXT if past_context else draft.obstacle
        ready = not (is_first or (not own and (outstanding or obstacle)))
        # The room is how deep guesses may lie, and a tree may have more of them.
        choice = self._next or self._choose(min(limit, 1) * self._max_draft_count, ready=ready)
        self._next, self._unasked = None, outstanding > 0
        if choice.draft_count == 0 or limit == 0:
            return self._plain(choice.plain_budget)
        if choice.drafter in self._owns(self._own):
            return self._own_plan(choice, limit, own, is_first)
        if obstacle is None and (outstanding or is_first):
            # Choosing waits for the end of the stretch, or for the prompt's own pass.
            return RoundPlan(0, 0, None if is_first else self._plain_plan.fallback_reason)
        return self._draft_plan(choice, log, draft, obstacle, len(look))

    def complete(self, plan: RoundPlan, drafted: Proposal, found: Proposal) -> Proposal:
        """The round's proposal, of what the draft services made and what a lookup found.

        Where the request leaves K to the policy, rows of a tree that are not worth verifying are left out.
        """
        proposal, rule = found if found.tree else drafted, self._drafting.rule
        if self._drafting.merges:
            parts = [self._policy.valued(each) for each in (*(drafted.parts or (drafted,)), found)]
            whole = merged(parts, rule, self._max_draft_count, plan.draft_count)
            proposal = replace(whole, drafter=self._remote or LOOKUP)
        if proposal.tree.values and proposal.drafter != LOOKUP:
            self._policy.saw(proposal, plan.draft_count, plan.shape.max_depth if plan.shape else 0)
            if self._draft_count is None and not rule.needs_distributions:
                proposal = cut(proposal, self._policy.cut_count(proposal))
        return plan.explain(proposal)

    def observe(self, committed: Round) -> None:
        """Passes a round on to the policy, except for the prompt's own pass, which costs what the prompt costs."""
        if not committed.is_first:
            # What was asked to end a stretch has been asked; a verdict that came before it has not.
            own = committed.verdict.own
            unasked = self._unasked and (own is not None or not committed.proposal.tree)
            if own is not None and own.tree.values:
                self._policy.saw(own, self._plain_plan.own_draft_count)
            self._policy.observe(committed, self._session, unasked=unasked)

    def _look_count(self, outstanding: int, look: Sequence[float]) -> int:
        """Number of rows of a lookup that are worth verifying alone."""
        if self._draft_count is None:
            return self._policy.look_count(look[: self._max_draft_count], self._session, halts=outstanding > 0)
        # Of a fixed number the draft makes them where there is one, and then the target's own drafter.
        alone = self._remote is None and not self._own
        return min(self._draft_count, len(look), self._max_draft_count) if alone else 0

    def _draft_plan(
        self, choice: Choice, log: TokenLog, draft: DraftOutlook, obstacle: FallbackReason | None, num_looked: int
    ) -> RoundPlan:
        """Guesses of the draft services, or whatever there is without them."""
        is_first = len(log) == log.prompt_len
        # A number that the request gives holds for each who guesses.
        num_looked = min(num_looked, self._max_draft_count if self._draft_count is None else self._draft_count)
        if self._remote is None and self._drafting.looks:
            # There is no other drafter to ask.
            return self._plain(PLAIN_BUDGET)
        if obstacle is not None and num_looked and not is_first and self._drafting.merges:
            return RoundPlan(0, 0, look_count=num_looked)
        if obstacle is not None:
            past_context = obstacle is FallbackReason.DRAFT_CONTEXT
            return self._plain(PLAIN_BUDGET if past_context else WAITING_BUDGET, obstacle, is_first)
        if choice.rounds > 1:
            self._next = replace(choice, rounds=choice.rounds - 1)
        room = self.room(log) if draft.context_len is None else min(self.room(log), draft.context_len - len(log))
        shape = self._drafting.shape or (TreeShape() if choice.drafter.endswith(TREE) and self._grows_trees else None)
        if shape == TreeShape():
            # How deep a tree should be depends on what a forward of the draft costs, which only the policy knows.
            shape = TreeShape(max_depth=choice.depth)
        count = min(choice.draft_count, self._max_draft_count, draft.max_draft_count or choice.draft_count)
        # A tree is limited in depth by the room, and its drafter sees to that.
        count = min(count, room) if shape is None else count
        looks = num_looked if self._drafting.merges else 0
        return RoundPlan(count, 0, shape=shape, look_count=looks)

    def _own_plan(self, choice: Choice, limit: int, own: str, is_first: bool) -> RoundPlan:
        """The target guesses and goes on unasked, in short stretches while it is only tried.

        In the prompt's own pass the drafter reads along.
        """
        if not own:
            return self._plain(WAITING_BUDGET, FallbackReason.DRAFT_ABSENT, is_first)
        shape = self._own_shape or (TreeShape() if choice.drafter.endswith(TREE) else None)
        # A tree is limited in depth by the room, as that of a draft service is.
        count = min(choice.draft_count, limit if shape is None else self._max_draft_count)
        if is_first:
            return RoundPlan(0, 0, own_draft_count=count, own_shape=shape)
        budget = OWN_BUDGET if choice.rounds == 1 else min(choice.rounds * (count + 1), OWN_BUDGET)
        self._plain_plan = RoundPlan(0, budget, own_draft_count=count, own_shape=shape)
        return self._plain_plan

    def _drafters(self, own: str) -> tuple[str, ...]:
        """Names of the drafters, the target's own first, and of their trees, which cost and bring others than chains.

        Trees that were drawn have no values, and are taken for chains.
        """
        return (*self._owns(own), *self._remotes)

    def _owns(self, own: str) -> tuple[str, ...]:
        """The target's own drafter, if it has one, by what it makes."""
        if not own:
            return ()
        if self._own_shape is not None and not self._drafting.rule.needs_distributions:
            return (own + TREE,)
        return (own, own + TREE) if self._grows_own_trees else (own,)

    @property
    def _remotes(self) -> tuple[str, ...]:
        if self._remote is None:
            return ()
        if (self._drafting.shape is not None or self._drafting.merges) and not self._drafting.rule.needs_distributions:
            return (self._remote + TREE,)
        return (self._remote, *([self._remote + TREE] if self._grows_trees else []))

    def _plain(self, plain_budget: int, reason: FallbackReason | None = None, is_first: bool = False) -> RoundPlan:
        self._plain_plan = RoundPlan(0, plain_budget, reason)
        return RoundPlan(0, plain_budget, None if is_first else reason)

    def _choose(self, limit: int, *, ready: bool) -> Choice:
        if self._draft_count is None:
            return self._policy.choose(limit, self._session, ready=ready)
        if ready:
            self._policy.note(self._session, is_drafting=self._draft_count > 0)
        # The draft service remains what it is for where there are two devices.
        drafter, *_ = *self._remotes, *self._owns(self._own), ""
        return Choice(self._draft_count, 0 if self._draft_count else PLAIN_BUDGET, drafter=drafter)
