"""What all sessions lose with guesses, and when there are none for a while."""

import math
from dataclasses import replace

import pytest

from gateway.rounds.account import GuessAccount
from gateway.rounds.choice import Case
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, LOOKUP, Proposal, Round, Verdict
from gateway.rounds.tuning import TUNING
from outrider.token_tree import TokenTree

LOAD = 4
PLAIN_US = 1000.0
MOST = TUNING.most_lost + LOAD * TUNING.most_lost_each
FIRST_REST = TUNING.rest_times * MOST


def lose(account: GuessAccount, tokens: float, load: int = LOAD) -> None:
    """Rounds that take twice as long as their token does plainly, until so many tokens are lost."""
    for _ in range(int(tokens)):
        account.observe(load, 2 * PLAIN_US, 1, PLAIN_US, is_pure=False)


def decode(account: GuessAccount, tokens: float, plain_us: float = PLAIN_US) -> None:
    """So many plain tokens beside no guesses."""
    for _ in range(int(tokens)):
        account.observe(LOAD, plain_us, 1, plain_us, is_pure=True)


def test_there_are_no_guesses_after_too_much_was_lost() -> None:
    """At that load and its like alone, for so many plain tokens as were lost, many times over."""
    account = GuessAccount(TUNING)
    lose(account, MOST)
    assert account.rest(LOAD) == 0
    lose(account, 1)
    assert account.rest(LOAD) == FIRST_REST
    assert account.rest(1) == account.rest(16) == 0
    decode(account, FIRST_REST - 1)
    assert account.rest(LOAD) == 1
    decode(account, 1)
    assert account.rest(LOAD) == 0
    lose(account, MOST)
    assert account.rest(LOAD) == 0


def test_what_was_won_is_not_saved_up() -> None:
    """However long guesses were good, they may lose no more than ever."""
    account = GuessAccount(TUNING)
    for _ in range(1000):
        account.observe(LOAD, PLAIN_US, 3, PLAIN_US, is_pure=False)
    lose(account, MOST + 1)
    assert account.rest(LOAD)


def test_what_is_lost_now_and_then_is_won_back() -> None:
    """Rounds that lose and rounds that win by turns end nothing."""
    account = GuessAccount(TUNING)
    for _ in range(1000):
        lose(account, 2)
        account.observe(LOAD, PLAIN_US, 3, PLAIN_US, is_pure=False)
    assert account.rest(LOAD) == 0


def test_a_machine_that_stood_still_ends_nothing() -> None:
    """A round of each session that took a thousand times as long counts as a few tokens."""
    account = GuessAccount(TUNING)
    for _ in range(LOAD):
        account.observe(LOAD, 1000 * PLAIN_US, 1, PLAIN_US, is_pure=False)
    assert account.rest(LOAD) == 0


def test_a_rest_ends_where_plain_decoding_is_as_slow() -> None:
    """A machine that became busy made guesses slow, and not they themselves."""
    account = GuessAccount(TUNING)
    lose(account, MOST + 1)
    decode(account, 1, 1.1 * PLAIN_US)
    assert account.rest(LOAD)
    decode(account, 1, 2 * PLAIN_US)
    assert account.rest(LOAD) == 0


def test_rests_grow_until_guesses_hold_out() -> None:
    """Each is twice as long as that before it, up to a limit; after long enough without one they begin anew."""
    account, rests = GuessAccount(TUNING), []
    for _ in range(6):
        lose(account, MOST + 1)
        rests.append(account.rest(LOAD) / FIRST_REST)
        decode(account, account.rest(LOAD))
    assert rests == [1, 2, 4, 8, 8, TUNING.most_rests]
    for _ in range(int(FIRST_REST)):
        account.observe(LOAD, PLAIN_US, 1, PLAIN_US, is_pure=False)
    lose(account, MOST + 1)
    assert account.rest(LOAD) == FIRST_REST


def test_a_tuning_without_a_bound_never_rests() -> None:
    """So the bench can show what the account is worth."""
    account = GuessAccount(replace(TUNING, most_lost=float("inf")))
    lose(account, 10_000)
    assert account.rest(LOAD) == 0


def observed(round_us: int, *, is_trial: bool) -> SpeculationPolicy:
    """A policy that has seen a hundred rounds of a session with two rows of a lookup each, and none kept."""
    policy = SpeculationPolicy()
    policy.costs.begin(dict.fromkeys((1, 2, 4, 8), PLAIN_US), {ANY_DRAFT: {1: 10.0}})
    proposal = Proposal(TokenTree.chain((1, 1)), drafter=LOOKUP)
    verdict = Verdict(5, (), 1, None, 1, int(PLAIN_US), 1, 3, 1)
    for _ in range(100):
        policy.observe(Round(proposal, verdict, (1,), (), round_us), unasked=False, is_trial=is_trial)
    return policy


@pytest.mark.parametrize(
    ("round_us", "is_trial", "rests"), [(2000, False, True), (2000, True, False), (900, False, False)]
)
def test_nothing_guesses_during_a_rest(round_us: int, is_trial: bool, rests: bool) -> None:
    """Neither a lookup nor a drafter, however good they look; what was only tried is no reason for one."""
    policy = observed(round_us, is_trial=is_trial)
    session = policy.session(ANY_DRAFT)
    assert bool(policy.rest) == rests
    assert policy.choose(8, session).case is (Case.NOT_WORTH if rests else Case.BEST)
    assert policy.is_worth(ANY_DRAFT) != rests
    assert (policy.least_value(session) == math.inf) == rests
    if rests:
        assert policy.choose_lookup((0.99, 0.98), session, halts=False) is None
        policy.costs.load = LOAD
        assert policy.is_worth(ANY_DRAFT)
