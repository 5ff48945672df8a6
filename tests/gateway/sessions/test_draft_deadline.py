"""How long a draft is waited for."""

from gateway.sessions.session import DraftDeadline


def test_an_unknown_draft_gets_the_maximum() -> None:
    """Before its first answer it is not known what is slow."""
    assert DraftDeadline().seconds(1) == 5.0


def test_follows_the_drafts_own_answers() -> None:
    """Twenty times the usual answer, between the minimum and the maximum."""
    deadline = DraftDeadline()
    deadline.observe(0.02, 1)
    assert deadline.seconds(1) == 0.4
    for _ in range(200):
        deadline.observe(0.001, 1)
    assert deadline.seconds(1) == 0.25
    for _ in range(200):
        deadline.observe(2.0, 1)
    assert deadline.seconds(1) == 5.0


def test_reading_a_prompt_takes_longer_and_says_nothing_about_guessing() -> None:
    """A long catch-up has an allowance of its own, and its time is not taken for the usual one."""
    deadline = DraftDeadline()
    deadline.observe(0.02, 1)
    deadline.observe(30.0, 1000)
    assert deadline.seconds(1) == 0.4
    assert deadline.seconds(1032) == 5.4


def test_a_miss_is_not_taken_for_an_answer() -> None:
    """A miss at most doubles the deadline, and misses alone never raise it above a second, however many there are."""
    deadline = DraftDeadline()
    deadline.observe(0.02, 1)
    waits = []
    for _ in range(50):
        deadline.missed()
        waits.append(deadline.seconds(1))
    assert waits[0] == 0.8
    assert set(waits[1:]) == {1.0}
    for _ in range(200):
        deadline.observe(0.1, 1)
    slow = deadline.seconds(1)
    deadline.missed()
    assert deadline.seconds(1) == slow


def test_an_unknown_draft_that_misses_gets_less() -> None:
    """A draft that hangs from the start costs the maximum only once."""
    deadline = DraftDeadline()
    deadline.missed()
    assert deadline.seconds(1) == 1.0
