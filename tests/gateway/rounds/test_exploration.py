"""What is looked at beside what is best, and what that may cost."""

from gateway.rounds.choice import Case, Choice
from gateway.rounds.costs import RoundCosts, SessionEstimates
from gateway.rounds.exploration import Exploration, Trial
from gateway.rounds.round import ANY_DRAFT, DrafterId, Place
from gateway.rounds.tuning import TUNING

HEAD = DrafterId("head", Place.HOSTED)


def no_hope(drafter: DrafterId) -> float:
    """Says that no luck makes a drafter worth it."""
    return 0.0


def exploration() -> Exploration:
    return Exploration(RoundCosts(TUNING), TUNING)


def test_one_session_finds_out_about_a_drafter() -> None:
    """The others wait until it has, or has ended."""
    made = exploration()
    first, second = SessionEstimates({}), SessionEstimates({})
    assert made.unknown([HEAD], first, no_hope) == HEAD
    made.begin(Choice(4, drafter=HEAD, case=Case.EXPLORING), first)
    assert made.unknown([HEAD], first, no_hope) == HEAD
    assert made.unknown([HEAD, ANY_DRAFT], second, no_hope) == ANY_DRAFT
    made.leave(first)
    assert made.unknown([HEAD], second, no_hope) == HEAD


def test_bad_luck_is_told_from_bad_guesses() -> None:
    """A drafter whose costs are known is tried by several sessions while a little luck would make it worth it."""
    made = exploration()
    made._costs.begin({1: 1000.0}, {HEAD: {1: 10.0}})
    made._costs.of(HEAD)
    made.trials[HEAD].judge(0.9, TUNING.margin_alone)
    first, second = SessionEstimates({}), SessionEstimates({})
    assert made.unknown([HEAD], first, no_hope) is None
    assert made.unknown([HEAD], first, lambda drafter: 1.2) == HEAD
    made.begin(Choice(4, drafter=HEAD, case=Case.EXPLORING), first)
    assert made.unknown([HEAD], second, lambda drafter: 1.2) is None
    for _ in range(TUNING.probe_rounds):
        made.drafted(HEAD, 2)
    assert made.unknown([HEAD], second, lambda drafter: 1.2) == HEAD
    for _ in range(TUNING.least_tests):
        made.drafted(HEAD, 2)
    assert made.unknown([HEAD], second, lambda drafter: 1.2) is None


def test_a_probe_is_paid_for_by_plain_tokens() -> None:
    """At least so many, and until they have earned what drafting lost; after the maximum nothing is owed any more."""
    made = exploration()
    least, most = TUNING.probe_tokens
    for _ in range(least):
        assert not made.is_probe_due
        made.decoded_plainly(1000)
    assert made.is_probe_due
    made.pay(1000 * TUNING.probe_cost * 100)
    for _ in range(99):
        made.decoded_plainly(1000)
        assert not made.is_probe_due
    made.decoded_plainly(1000)
    assert made.is_probe_due
    made.pay(1e9)
    for _ in range(most):
        made.decoded_plainly(1000)
    assert made.is_probe_due
    made.begin(Choice(4, case=Case.PROBE), None)
    assert not made.is_probe_due


def test_plain_decoding_and_other_drafters_are_looked_at_in_turn() -> None:
    """After so many rounds with guesses, and once."""
    made = exploration()
    for _ in range(TUNING.other_probe_rounds):
        made.drafted(HEAD, 1)
    assert made.is_plain_due
    assert made.other_turn == 0
    made.begin(Choice(0, 2, case=Case.PLAIN_LOOK), None)
    made.begin(Choice(2, case=Case.OTHER), None)
    assert not made.is_plain_due
    assert made.other_turn is None


def test_sessions_begin_to_draft_in_ever_larger_groups() -> None:
    """Twice as many after two rounds each; guesses that are not worth it begin with one again."""
    trial = Trial()
    allowed = []
    for _ in range(2 + 4 + 8):
        trial.ramp(num_sessions=5, explorer_rounds=4)
        allowed.append(trial.allowed)
    assert allowed == [1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 8]
    margin = TUNING.margin(5)
    trial.judge(margin.keeping - 0.01, margin)
    assert (trial.is_worth, trial.allowed) == (False, 1)
    trial.judge(margin.changing - 0.01, margin)
    assert not trial.is_worth
    trial.judge(margin.changing + 0.01, margin)
    assert trial.is_worth
    trial.judge(margin.keeping + 0.01, margin)
    assert trial.is_worth


def test_guesses_end_only_when_plain_decoding_was_seen() -> None:
    """What a model of plain decoding says ends nothing, and begins nothing that is not clearly worth it."""
    trial, margin = Trial(), TUNING.margin(1)
    trial.judge(0.9, margin, is_sure=False)
    assert trial.is_worth
    trial.judge(0.9, margin)
    assert not trial.is_worth
    trial.judge(margin.changing - 0.01, margin, is_sure=False)
    assert not trial.is_worth


def test_one_session_needs_less_of_a_gain_than_several() -> None:
    """Guesses that look 5 % faster are begun with where nobody else waits for them, and not where others do."""
    alone, shared = Trial(), Trial()
    for trial, load in ((alone, 1), (shared, 4)):
        trial.judge(0.9, TUNING.margin(load))
        trial.judge(1.05, TUNING.margin(load))
    assert (alone.is_worth, shared.is_worth) == (True, False)
