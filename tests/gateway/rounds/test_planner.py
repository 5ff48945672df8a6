"""Plans of single rounds: which limit decides, and how plain stretches begin and end."""

import pytest

from gateway.rounds.planner import DraftOutlook, RoundPlan, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, NOTHING, FallbackReason, GuessRequest, Proposal, TokenLog
from gateway.rounds.tuning import TUNING


def planner_of(draft_count: int | None = 4, max_len: int = 100) -> RoundPlanner:
    """A planner for a target that takes at most eight rows."""
    return RoundPlanner(SpeculationPolicy(), draft_count, max_len, max_draft_count=8)


def log_of(length: int) -> TokenLog:
    """A log of a prompt of two tokens and an output."""
    log = TokenLog((1,) * length)
    log.prompt_len = 2
    return log


@pytest.mark.parametrize(
    ("draft_count", "length", "draft", "expected"),
    [
        (4, 10, DraftOutlook(), 4),
        (8, 10, DraftOutlook(max_draft_count=5), 5),
        (8, 97, DraftOutlook(), 2),
        (8, 99, DraftOutlook(), 0),
        (8, 10, DraftOutlook(context_len=13), 3),
        (None, 10, DraftOutlook(), 4),
        (None, 97, DraftOutlook(), 2),
    ],
)
def test_the_smallest_limit_decides(draft_count: int | None, length: int, draft: DraftOutlook, expected: int) -> None:
    """K is bounded by the draft, by what is left of the request, and by the draft's context."""
    guesses = (GuessRequest(ANY_DRAFT, expected),) if expected else ()
    assert planner_of(draft_count).plan(log_of(length), 0, draft) == RoundPlan(guesses)


def test_the_prompts_own_pass_has_no_proposal() -> None:
    """The first round is plain, and without a reason, because no draft was wanted in it."""
    assert planner_of().plan(log_of(2), 0, DraftOutlook()) == RoundPlan()
    assert planner_of().plan(log_of(2), 0, DraftOutlook(FallbackReason.DRAFT_ABSENT)) == RoundPlan(
        (), TUNING.waiting_budget
    )
    assert planner_of(0).plan(log_of(2), 0, DraftOutlook()) == RoundPlan((), TUNING.plain_budget)


def test_an_obstacle_makes_a_short_stretch_with_its_reason() -> None:
    """While the draft is away the target goes on alone, for so few tokens that the draft is soon used again."""
    plan = planner_of().plan(log_of(9), 0, DraftOutlook(FallbackReason.DRAFT_LOST))
    assert plan == RoundPlan((), TUNING.waiting_budget, FallbackReason.DRAFT_LOST)


def test_a_stretch_is_left_before_the_draft_is_asked() -> None:
    """The draft is back: the stretch is not extended, its rest keeps its reason, and then comes a proposal."""
    planner = planner_of()
    planner.plan(log_of(9), 0, DraftOutlook(FallbackReason.DRAFT_ABSENT))
    assert planner.plan(log_of(10), 3, DraftOutlook()) == RoundPlan((), 0, FallbackReason.DRAFT_ABSENT)
    assert planner.plan(log_of(12), 1, DraftOutlook()) == RoundPlan((), 0, FallbackReason.DRAFT_ABSENT)
    assert planner.plan(log_of(13), 0, DraftOutlook()) == RoundPlan((GuessRequest(ANY_DRAFT, 4),))


def test_past_the_drafts_context_the_stretch_is_long() -> None:
    """A context does not grow again, so nothing is gained by looking often."""
    plan = planner_of().plan(log_of(50), 0, DraftOutlook(context_len=50))
    assert plan == RoundPlan((), TUNING.plain_budget, FallbackReason.DRAFT_CONTEXT)


def test_a_plan_does_not_hide_the_proposals_own_reason() -> None:
    """What the session says about its fault is kept; otherwise the plan's reason is what there is to say."""
    lost = Proposal(fallback_reason=FallbackReason.DRAFT_LOST)
    plan = RoundPlan((), 8, FallbackReason.DRAFT_ABSENT)
    assert plan.explain(lost) is lost
    assert plan.explain(NOTHING).fallback_reason is FallbackReason.DRAFT_ABSENT
    assert RoundPlan((), 8).explain(NOTHING) is NOTHING


@pytest.mark.parametrize(("draft_count", "expected"), [(0, False), (3, True), (None, True)])
def test_the_draft_reads_the_prompt_when_it_will_be_asked(draft_count: int | None, expected: bool) -> None:
    """A request that never speculates does not open a draft session."""
    assert planner_of(draft_count).expects_draft() is expected
