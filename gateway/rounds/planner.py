"""The plan of each round of one request, within all limits: K, and what the target may commit unasked. Pure."""

from dataclasses import dataclass, replace
from typing import Self

from gateway.rounds.policy import PLAIN_BUDGET, Choice, SpeculationPolicy
from gateway.rounds.round import FallbackReason, Proposal, Round, TokenLog

OWN_BUDGET = 64  # tokens committed unasked while the target drafts for itself
WAITING_BUDGET = 8  # tokens committed unasked while the draft is away and may come back at any time


@dataclass(frozen=True, slots=True)
class DraftOutlook:
    """What can be expected of a draft session now; None where nothing is in the way, or nobody knows."""

    obstacle: FallbackReason | None = None  # why it is no use to ask for guesses now
    context_len: int | None = None
    max_draft_count: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round: draft tokens to ask for, tokens that the target may commit unasked, and why there is no draft.

    own_draft_count are those that the target's own drafter is to make, for this verdict and for unasked ones behind it.
    """

    draft_count: int
    plain_budget: int
    fallback_reason: FallbackReason | None = None
    own_draft_count: int = 0

    def explain(self, proposal: Proposal) -> Proposal:
        """The proposal, with this plan's reason where it has none of its own."""
        is_explained = self.fallback_reason is None or proposal.fallback_reason is not None
        return proposal if is_explained else replace(proposal, fallback_reason=self.fallback_reason)


class RoundPlanner:
    """The planner of one request. draft_count None lets the policy choose for every round; 0 never speculates.

    `drafter` is what the draft service is asked for, None where there is none to ask; `own` is a drafter of the
    target's process, empty for none. The policy counts the request among the sessions at work until its context is
    left.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        draft_count: int | None,
        max_len: int,
        max_draft_count: int,
        drafter: str | None = "",
        own: str = "",
    ) -> None:
        self._policy = policy
        self._remote, self._own = drafter, own
        self._session = policy.session(*self._drafters(own) or ("",))
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
        return choice.draft_count > 0 and choice.drafter == self._remote

    def plan(self, log: TokenLog, outstanding: int, draft: DraftOutlook, own: str = "") -> RoundPlan:
        """Plans the round on top of the log, while the target may still commit `outstanding` tokens unasked.

        `own` is the drafter that the target has for this session now; another target may have none.
        """
        if 2 * outstanding > self._plain_plan.plain_budget > 0:
            # Nothing is sent in the first half of a stretch, so there is nothing to choose at every token.
            self._unasked = True
            return RoundPlan(0, 0, self._plain_plan.fallback_reason)
        if own != self._own and self._drafters(own):
            self._own = own
            self._policy.change(self._session, *self._drafters(own))
        log_len = len(log)
        is_first, limit = log_len == log.prompt_len, min(self._max_draft_count, self._max_len - log_len - 1)
        past_context = draft.context_len is not None and log_len + 1 > draft.context_len
        ready = not (is_first or (not own and (outstanding or past_context or draft.obstacle)))
        choice = self._next or self._choose(limit, ready=ready)
        self._next, self._unasked = None, outstanding > 0
        if choice.draft_count == 0 or limit == 0:
            return self._plain(choice.plain_budget)
        if self._own and choice.drafter == self._own:
            return self._own_plan(choice, limit, own, is_first)
        limit = min(limit, draft.max_draft_count or limit)
        if past_context or draft.obstacle is not None:
            budget = PLAIN_BUDGET if past_context else WAITING_BUDGET
            return self._plain(budget, FallbackReason.DRAFT_CONTEXT if past_context else draft.obstacle, is_first)
        if outstanding or is_first:
            # Choosing waits for the end of the stretch, or for the prompt's own pass.
            return RoundPlan(0, 0, None if is_first else self._plain_plan.fallback_reason)
        if choice.rounds > 1:
            self._next = replace(choice, rounds=choice.rounds - 1)
        room = limit if draft.context_len is None else draft.context_len - log_len
        return RoundPlan(min(choice.draft_count, limit, room), 0)

    def observe(self, committed: Round) -> None:
        """Passes a round on to the policy, except for the prompt's own pass, which costs what the prompt costs."""
        if not committed.is_first:
            self._policy.observe(committed, self._session, unasked=self._unasked)

    def _own_plan(self, choice: Choice, limit: int, own: str, is_first: bool) -> RoundPlan:
        """The target guesses and goes on unasked, in short stretches while it is only tried.

        In the prompt's own pass the drafter reads along.
        """
        if not own:
            return self._plain(WAITING_BUDGET, FallbackReason.DRAFT_ABSENT, is_first)
        count = min(choice.draft_count, limit)
        if is_first:
            return RoundPlan(0, 0, own_draft_count=count)
        budget = OWN_BUDGET if choice.rounds == 1 else choice.rounds * (count + 1)
        self._plain_plan = RoundPlan(0, budget, own_draft_count=count)
        return self._plain_plan

    def _drafters(self, own: str) -> tuple[str, ...]:
        """Those that there are, the target's own first."""
        return (*([own] if own else []), *([self._remote] if self._remote is not None else []))

    def _plain(self, plain_budget: int, reason: FallbackReason | None = None, is_first: bool = False) -> RoundPlan:
        self._plain_plan = RoundPlan(0, plain_budget, reason)
        return RoundPlan(0, plain_budget, None if is_first else reason)

    def _choose(self, limit: int, *, ready: bool) -> Choice:
        if self._draft_count is None:
            return self._policy.choose(limit, self._session, ready=ready)
        if ready:
            self._policy.note(self._session, is_drafting=self._draft_count > 0)
        # The draft service remains what it is for where there are two devices.
        drafter = self._own if self._remote is None else self._remote
        return Choice(self._draft_count, 0 if self._draft_count else PLAIN_BUDGET, drafter=drafter)
