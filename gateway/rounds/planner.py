"""The plan of each round of one request, within all limits: K, and what the target may commit unasked. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from gateway.rounds.choice import LOOKING, TRYING, WANTED, Case, Choice
from gateway.rounds.merging import cut, merged
from gateway.rounds.offers import FLOORS
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
    LOOKUP,
    NO_REQUEST,
    AheadRound,
    BranchOutcome,
    DrafterId,
    FallbackReason,
    GuessRequest,
    Makes,
    Place,
    Proposal,
    Round,
    TokenLog,
)
from outrider.parameters import Rule
from outrider.token_tree import TreeShape


@dataclass(slots=True)
class DraftOutlook:
    """Outlook of a draft session now; None where nothing is in the way, or nothing is known."""

    obstacle: FallbackReason | None = None  # why it is no use to ask for guesses now
    context_len: int | None = None
    max_draft_count: int | None = None


@dataclass(slots=True)
class RoundPlan:
    """Plan of a round: guesses to ask for, tokens that the target may commit unasked, and why there is no draft.

    Guesses of a hosted drafter are for this verdict and for unasked ones after it. Where the target would go on
    unasked, those of a lookup end that.
    """

    guesses: tuple[GuessRequest, ...] = ()
    plain_budget: int = 0
    fallback_reason: FallbackReason | None = None

    def asked(self, place: Place) -> GuessRequest:
        """Request for guesses from a place, for none of them where it is not asked."""
        for each in self.guesses:
            if each.drafter.place is place:
                return each
        return NO_REQUEST

    def explain(self, proposal: Proposal) -> Proposal:
        """The proposal, with this plan's reason where it has none of its own."""
        is_explained = self.fallback_reason is None or proposal.fallback_reason is not None
        return proposal if is_explained else replace(proposal, fallback_reason=self.fallback_reason)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafters that may guess for a request, at most one at each place; the policy chooses between them.

    One that makes trees makes chains too. `shape` is that of guesses where the request names one. Where it does not,
    the policy chooses between chains and trees, unless the rule tests with distributions. With `merges` several
    drafters, lookups among them, make one proposal under the request's rule, and the remote one stands for all.
    """

    drafters: tuple[DrafterId, ...] = (ANY_DRAFT,)
    shape: TreeShape | None = None
    merges: bool = False
    rule: Rule = Rule.MATCH

    def at(self, place: Place) -> DrafterId | None:
        """Drafter at a place; None where none may guess."""
        return next((each for each in self.drafters if each.place is place), None)


class RoundPlanner:
    """The planner of one request. draft_count None lets the policy choose for every round; 0 never speculates.

    `branches` are the most that a draft may make while the target verifies. `policy_at` finds the policy of the target
    at an address, to which the request has moved.
    The policy counts the request among the sessions at work until its context is left.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        draft_count: int | None,
        max_len: int,
        max_draft_count: int,
        drafting: Drafting = Drafting(),
        branches: int = 0,
        policy_at: Callable[[str], SpeculationPolicy | None] = lambda _: None,
    ) -> None:
        self._policy = policy
        self._policy_at = policy_at
        self._branches = branches
        if branches:
            policy.costs.most_branches = branches
        self._drafting = drafting
        self._draft_count = draft_count
        self._remote, self._hosted = drafting.at(Place.REMOTE), drafting.at(Place.HOSTED)
        self._looks = drafting.at(Place.LOOKUP) is not None
        self._remotes, self._hosteds = self._kinds(self._remote), self._kinds(self._hosted)
        self._is_hosting = self._hosted is not None
        # Without any drafter, rounds say that a draft is absent.
        absent = () if self._looks else (ANY_DRAFT,)
        self._session = policy.session(*((*self._hosteds, *self._remotes) or absent))
        self._max_len = max_len
        self._max_draft_count = max_draft_count
        self._next: Choice | None = None
        self.choice = self.observed_choice = Choice(0)
        """What the round that was planned last, and the one that was observed last, come from. All rounds of a stretch
        come from the same.
        """
        self._plain_plan = RoundPlan()
        self._planned_room = 0
        """Tokens that had room after the verdict that was last planned: no budget is larger."""
        self._unasked = False
        self._look: Sequence[float] = ()
        self._num_looks = 0
        self._tells_offer = False
        """Whether all that a lookup finds now was asked for, so that it says what lookups offer."""
        self._halts = self._went_on = False
        self._asked = self._asked_before = NO_REQUEST
        """Guesses with branches that were asked for in the round under way, and in the one before."""

    def __enter__(self) -> Self:
        self._policy.enter(self._session)
        return self

    def __exit__(self, *_exit: object) -> None:
        self._policy.leave(self._session)

    def expects_draft(self) -> bool:
        """Whether the draft should read the prompt at once, while the target does."""
        choice = self.preview()
        return choice.draft_count > 0 and choice.drafter in self._remotes

    def preview(self) -> Choice:
        """What the first round after the prompt would be, if it were chosen now."""
        return self._choose(self._max_draft_count, ready=False)

    def room(self, log: TokenLog) -> int:
        """Greatest depth of a proposal: the request's last token is the target's alone."""
        return max(0, self._max_len - len(log) - 1)

    def looks_for(self, log: TokenLog) -> float:
        """Value that what a lookup finds on top of the log must be above to be of any use; infinite where none is.

        One round of so many as there are sessions is searched for all that there is.
        """
        is_alone = self._remote is None and not self._is_hosting
        self._tells_offer = False
        if not self._looks or len(log) == log.prompt_len:
            return math.inf
        if self._draft_count is not None:
            return 0.0 if is_alone or self._drafting.merges else math.inf
        if self._policy.rest:
            # Whatever were found, none of it would be taken.
            return math.inf
        every = min(self._policy.costs.load, self._policy.tuning.look_rounds)
        self._num_looks += 1
        self._tells_offer = self._num_looks % every == 0 or self._drafting.merges
        if self._tells_offer:
            # Of offers only what is above the least floor is counted; alone, all that is found may be of use.
            return FLOORS[0] if every > 1 else 0.0
        return self._policy.least_value(self._session)

    def plan(
        self,
        log: TokenLog,
        outstanding: int,
        draft: DraftOutlook,
        own: str = "",
        look: Sequence[float] = (),
        *,
        went_on: bool = False,
        takes_branches: bool = True,
    ) -> RoundPlan:
        """Plans the round on top of the log, while the target may still commit `outstanding` tokens unasked.

        With `went_on` the round has begun without a plan, by a branch: what is planned are the branches after it.
        `own` is the drafter that the target has for this session now; another target may have none. `look` are the
        values of what a lookup has found, falling. After a target that takes no branches none are asked for any more.
        """
        if self._branches and not takes_branches:
            self._branches = 0
            self._remotes = self._kinds(self._remote)
            self._policy.change(self._session, *(self._hosteds if self._is_hosting else ()), *self._remotes)
            self._next = None
        self._look, self._halts, self._went_on, self._asked = look, False, went_on, NO_REQUEST
        log_len, room, looked = len(log), self.room(log), self._looked(log, outstanding)
        if looked is not None:
            self._next, self._unasked = None, outstanding > 0
            self._halts, self.choice = outstanding > 0, looked
            return RoundPlan((GuessRequest(LOOKUP, looked.draft_count),))
        is_vain = self.choice.case in WANTED and not self._policy.is_worth(self.choice.drafter)
        if 2 * outstanding > min(self._plain_plan.plain_budget, self._planned_room) > 0 and not is_vain:
            # Nothing is sent in the first half of a stretch, so there is nothing to choose at every token; unless its
            # guesses have turned out to be worth nothing.
            self._unasked = True
            # The last token has no room for a guess, so that no draft is missed there.
            return RoundPlan(fallback_reason=self._plain_plan.fallback_reason if room else None)
        is_hosting = bool(own) and self._hosted is not None
        if is_hosting != self._is_hosting and (is_hosting or self._remotes):
            self._is_hosting = is_hosting
            self._policy.change(self._session, *(self._hosteds if is_hosting else ()), *self._remotes)
        is_first, limit = log_len == log.prompt_len, min(self._max_draft_count, room)
        past_context = draft.context_len is not None and log_len + 1 > draft.context_len
        obstacle = FallbackReason.DRAFT_CONTEXT if past_context else draft.obstacle
        ready = not (is_first or (not own and (outstanding or obstacle)))
        self._planned_room = room
        # The room is how deep guesses may lie, and a tree may have more of them.
        choice = self._next or self._choose(min(limit, 1) * self._max_draft_count, ready=ready)
        self._next, self._unasked = None, outstanding > 0
        asks = choice.draft_count > 0 and limit > 0
        if asks and choice.drafter.place is not Place.HOSTED and obstacle is None and (outstanding or is_first):
            # Choosing waits for the end of the stretch, or for the prompt's own pass.
            return RoundPlan(fallback_reason=None if is_first else self._plain_plan.fallback_reason)
        self.choice = choice
        if not asks:
            return self._plain(choice.plain_budget)
        if choice.drafter.place is Place.HOSTED:
            return self._hosted_plan(choice, is_hosting, is_first)
        return self._draft_plan(choice, log, draft, obstacle, len(look))

    def complete(self, plan: RoundPlan, drafted: Proposal, found: Proposal) -> Proposal:
        """The round's proposal, of what the draft services made and what a lookup found.

        Where the request leaves K to the policy, rows of a tree that are not worth verifying are left out.
        """
        proposal, rule = found if found.tree.token_ids else drafted, self._drafting.rule
        asked = plan.asked(Place.REMOTE)
        if self._drafting.merges:
            parts = [self._policy.costs.valued(each) for each in (*(drafted.parts or (drafted,)), found)]
            whole = merged(parts, rule, self._max_draft_count, asked.count)
            proposal = replace(whole, drafter=self._remote or LOOKUP)
        if asked.branch_count and proposal is drafted:
            proposal = replace(proposal, is_ahead=True)
        if proposal.tree.values and proposal.drafter != LOOKUP:
            self._policy.costs.of(proposal.learner).observe_tree(proposal, asked)
            if self._draft_count is None and not rule.needs_distributions:
                proposal = cut(proposal, self._policy.cut_count(proposal))
        return plan.explain(proposal)

    def observe(self, committed: Round) -> None:
        """Passes a round on to the policy, except for the prompt's own pass, which costs what the prompt costs."""
        self.observed_choice = self.choice
        verdict, before = committed.verdict, self._asked_before
        self._asked_before = self._asked
        if before.branch_count:
            missed = BranchOutcome.MISS if verdict.had_branches else BranchOutcome.LATE
            outcome = BranchOutcome.HIT if verdict.is_of_branch else missed
            committed.ahead = AheadRound(before.drafter, before.count, before.branch_count, outcome)
        if not committed.is_first:
            if self._tells_offer:
                self._policy.costs.offers.add(self._look, len(committed.token_ids))
            if self._halts:
                self._policy.costs.late.add(self._policy.costs.load, not committed.draft_count)
            # What was asked to end a stretch has been asked; a verdict that came before it has not.
            own = verdict.own
            unasked = self._unasked and (own is not None or not committed.draft_count)
            if own is not None and own.tree.values:
                # It was asked for some rounds ago, maybe with another number; it has what it was asked for.
                asked = GuessRequest(own.drafter, len(own.tree))
                self._policy.costs.of(own.learner).observe_tree(own, asked)
            is_trial = self.choice.case in TRYING and committed.draft_count > 0
            self._policy.observe(committed, self._session, unasked=unasked, is_trial=is_trial)
        if verdict.address != self._policy.address:
            # The request has moved, and goes on with the policy of that target where it is known.
            policy = self._policy_at(verdict.address)
            if policy is not None and policy is not self._policy:
                self._policy.leave(self._session)
                self._policy, self._next = policy, None
                policy.change(self._session, *self._session.drafters)
                policy.enter(self._session)

    def _looked(self, log: TokenLog, outstanding: int) -> Choice | None:
        """Rows of a lookup that are the whole proposal; None where drafters are asked too, or nothing is worth it."""
        look = self._look
        if not look or len(log) == log.prompt_len or (self._drafting.merges and not outstanding):
            return None
        if self._draft_count is None:
            return self._policy.choose_lookup(look[: self._max_draft_count], self._session, halts=outstanding > 0)
        # Of a fixed number the draft makes them where there is one, and then the target's own drafter.
        count = min(self._draft_count, len(look), self._max_draft_count)
        is_alone = self._remote is None and not self._is_hosting
        return Choice(count, drafter=LOOKUP, case=Case.FIXED) if is_alone and count else None

    def _draft_plan(
        self, choice: Choice, log: TokenLog, draft: DraftOutlook, obstacle: FallbackReason | None, num_looked: int
    ) -> RoundPlan:
        """Guesses of the draft services, or whatever there is without them."""
        log_len, tuning = len(log), self._policy.tuning
        is_first = log_len == log.prompt_len
        # A number that the request gives holds for each who guesses.
        num_looked = min(num_looked, self._max_draft_count if self._draft_count is None else self._draft_count)
        if self._remote is None and self._looks:
            # There is no other drafter to ask.
            return self._plain(tuning.plain_budget)
        if obstacle is not None and num_looked and not is_first and self._drafting.merges:
            return RoundPlan((GuessRequest(LOOKUP, num_looked),))
        if obstacle is not None:
            is_final = obstacle is FallbackReason.DRAFT_CONTEXT or self._remote is None
            return self._plain(tuning.plain_budget if is_final else tuning.waiting_budget, obstacle, is_first)
        if choice.rounds > 1:
            self._next = replace(choice, rounds=choice.rounds - 1)
        room = self.room(log) if draft.context_len is None else min(self.room(log), draft.context_len - log_len)
        # What several drafters make together is a tree, even where they are asked for chains.
        is_grown = choice.drafter.makes is Makes.TREE and choice.drafter == self._remote and self._draft_count is None
        shape = self._drafting.shape or (TreeShape() if is_grown else None)
        if shape == TreeShape():
            # How deep a tree should be depends on what a forward of the draft costs, which only the policy knows.
            shape = TreeShape(max_depth=choice.depth)
        count = min(choice.draft_count, self._max_draft_count, draft.max_draft_count or choice.draft_count)
        # A tree is limited in depth by the room, and its drafter sees to that.
        count = min(count, room) if shape is None else count
        looked = (GuessRequest(LOOKUP, num_looked),) if self._drafting.merges and num_looked else ()
        asked = GuessRequest(choice.drafter, count, shape)
        ahead = choice.drafter._replace(makes=Makes.AHEAD)
        if count and ahead in self._remotes and (choice.drafter == ahead or self._draft_count is not None):
            chosen = None if self._draft_count is not None else self._policy.branch_count(ahead, count)
            branch_count = chosen or self._policy.costs.branch_limit(count)
            # Where a rule tests with uniforms, a request would not say the same again with a plain token here or there.
            is_free = not self._drafting.rule.needs_distributions
            plain_on_miss = is_free and self._policy.costs.of(ahead).is_plain_on_miss(count)
            asked = self._asked = GuessRequest(ahead, count, None, branch_count, plain_on_miss, self._went_on)
        return RoundPlan((asked, *looked))

    def _hosted_plan(self, choice: Choice, is_hosting: bool, is_first: bool) -> RoundPlan:
        """The target guesses and goes on unasked, in short stretches while it is only tried.

        After the prompt's own pass it goes on at once, unless something is to be tried: that waits for its turn.
        """
        if not is_hosting:
            return self._plain(self._policy.tuning.waiting_budget, FallbackReason.DRAFT_ABSENT, is_first)
        shape = None
        if self._hosted is not None and self._hosted.makes is Makes.TREE:
            shape = self._drafting.shape or (TreeShape() if choice.drafter.makes is Makes.TREE else None)
        # The target limits guesses by the room that there is when it makes them, so that a stretch is asked for once.
        count = min(choice.draft_count, self._max_draft_count)
        guesses = (GuessRequest(choice.drafter, count, shape),)
        if is_first:
            if choice.rounds > 1:
                return RoundPlan(guesses)
            self._policy.mark(self._session, is_drafting=True)
        tuning = self._policy.tuning
        budget = tuning.looked_budget * choice.rounds if choice.case in LOOKING else tuning.hosted_budget
        self._plain_plan = RoundPlan(guesses, budget)
        return self._plain_plan

    def _kinds(self, drafter: DrafterId | None) -> tuple[DrafterId, ...]:
        """A drafter by what it may be asked to make, which costs and brings different things.

        Trees that were drawn have no values, and count as chains. Several drafters together make trees of any guesses.
        """
        if drafter is None:
            return ()
        chain, tree, ahead = (drafter._replace(makes=each) for each in Makes)
        drafting = self._drafting
        is_chain = not drafting.merges and drafting.shape is None
        runs_ahead = self._branches and drafter.place is Place.REMOTE and is_chain and drafting.rule.runs_ahead
        further = (ahead,) if runs_ahead else ()
        if drafting.rule.needs_distributions:
            return (chain, *further)
        if drafting.merges or (drafter == tree and drafting.shape is not None):
            return (tree,)
        return (chain, tree, *further) if drafter == tree and self._draft_count is None else (chain, *further)

    def _plain(self, plain_budget: int, reason: FallbackReason | None = None, is_first: bool = False) -> RoundPlan:
        self._plain_plan = RoundPlan((), plain_budget, reason)
        return RoundPlan((), plain_budget, None if is_first else reason)

    def _choose(self, limit: int, *, ready: bool) -> Choice:
        if self._draft_count is None:
            return self._policy.choose(limit, self._session, ready=ready)
        if ready:
            self._policy.mark(self._session, is_drafting=self._draft_count > 0)
        # The draft service remains what it is for where there are two devices.
        drafter, *_ = *self._remotes, *(self._hosteds if self._is_hosting else ()), ANY_DRAFT
        budget = 0 if self._draft_count else self._policy.tuning.plain_budget
        return Choice(self._draft_count, budget, drafter=drafter, case=Case.FIXED)
