"""How long a draft is waited for."""

from gateway.deadline import DraftDeadline


def test_an_unknown_draft_gets_the_most() -> None:
    """Before its first answer nobody knows what is slow."""
    assert DraftDeadline().seconds(1) == 5.0


def test_follows_the_drafts_own_answers() -> None:
    """Twenty times the usual answer, between the least and the most."""
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
