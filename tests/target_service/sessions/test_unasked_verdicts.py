"""Tests of target_service.sessions without a thread: how far a target goes on alone, and what moves or ends that."""

import pytest
from support.basics import spec_of
from support.services.stepped_target import PROMPT, Target, plain

from target_service.states import UNACKNOWLEDGED_WINDOW


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_unasked_verdicts_respect_the_budget(target: Target, budget: int) -> None:
    """One for each token while the committed length is below base_len + 1 + budget; the tokens are plain decoding's."""
    spec = spec_of(PROMPT, 60, seed=2, eos=(), temperature=1.0)
    target.open(spec, budget=budget)
    answers = target.run()
    assert [answer.fence.base_len for answer in answers] == list(range(5, 6 + budget))
    assert target.tokens == plain(target.runner, spec)[: 6 + budget]
    assert all(answer.times.forward_count == 1 for answer in answers)


def test_the_budget_counts_from_the_step_and_not_from_the_verdict(target: Target) -> None:
    """Accepted tokens use up the budget of their own step."""
    spec = spec_of(PROMPT, 60, eos=())
    expected = plain(target.runner, spec)
    target.open(spec)
    target.run()
    target.step(1, 6, expected[6:9], budget=5)
    assert [answer.fence.base_len for answer in target.run()] == [6, 10, 11]


def test_an_acknowledgement_moves_the_limit(target: Target) -> None:
    """A target that ran into its limit goes on; one that gets 0 does not."""
    target.open(spec_of(PROMPT, 60, eos=()), budget=2)
    assert len(target.run()) == 3
    target.acknowledge(1, 7, 4)
    assert [answer.fence.base_len for answer in target.run()] == [8, 9, 10, 11]
    assert [answer.fence.base_len for answer in target.held.verdicts] == [7, 8, 9, 10, 11]
    target.acknowledge(1, 12, 0)
    assert target.run() == []
    assert target.held.verdicts == []
    target.acknowledge(1, 11, 9)
    target.acknowledge(1, 13, 9)
    assert target.run() == []


def test_an_acknowledgement_without_a_budget_ends_the_stretch_at_once(target: Target) -> None:
    """What would have come unasked is not begun, so that the step which follows finds the target at rest."""
    spec = spec_of(PROMPT, 60, seed=2, eos=(), temperature=1.0)
    expected = plain(target.runner, spec)
    target.open(spec, budget=20)
    for _ in range(3):
        target.device.step(target.verifier.advance)
    assert len(target.tokens) == 8
    target.acknowledge(1, 7, 0)
    assert target.held.task is None
    target.step(1, 7, expected[7:9])
    # The token after the seventh had been committed unasked: it is sent once more, whatever was proposed.
    assert [answer.fence.base_len for answer in target.run()][-1] == 7
    target.step(1, 8, expected[8:10])
    [answer] = target.run()
    assert (answer.content.accepted_rows, answer.content.evaluated_count) == ((1, 2), 2)
    assert target.tokens == expected[:11]


@pytest.mark.parametrize(("budget", "last"), [(0, 7), (1, 7), (9, 15)])
def test_a_repeated_step_moves_the_limit_and_takes_nothing_back(target: Target, budget: int, last: int) -> None:
    """Its verdicts are given once more and not made once more; then the target goes on as far as was asked now."""
    spec = spec_of(PROMPT, 60, seed=2, eos=(), temperature=1.0)
    expected = plain(target.runner, spec)
    target.open(spec, budget=2)
    first = target.run()
    assert [answer.fence.base_len for answer in first] == [5, 6, 7]
    target.step(1, 6, budget=budget)
    again = target.run()
    assert again[:2] == first[1:]
    assert [answer.fence.base_len for answer in again] == list(range(6, last + 1))
    assert target.tokens == expected[: last + 1]
    target.step(1, 7)
    assert target.run() == again[1:]


def test_a_repeated_step_makes_room_in_the_window(target: Target) -> None:
    """It acknowledges what comes before it, so a target that the window held up goes on to its limit."""
    target.open(spec_of(PROMPT, 600, eos=()), budget=4096)
    target.run()
    target.step(1, 100)
    assert [answer.fence.base_len for answer in target.run()][-1] == 100 + UNACKNOWLEDGED_WINDOW - 1


def test_a_repeated_step_does_not_disturb_a_target_that_is_going_on(target: Target) -> None:
    """The job under way goes on to the new limit, and no verdict is given twice after the repetition."""
    target.open(spec_of(PROMPT, 60, eos=()), budget=6)
    target.device.step(target.verifier.advance)
    target.device.step(target.verifier.advance)
    target.answers.clear()
    target.step(1, 6, budget=9)
    assert [answer.fence.base_len for answer in target.run()] == list(range(6, 16))


def test_a_repeated_step_behind_the_end_goes_on_with_nothing(target: Target) -> None:
    """The request is over, however much the repetition would allow."""
    target.open(spec_of(PROMPT, 8, eos=()), budget=2)
    first = target.run()
    assert target.held.finish_reason is not None
    target.step(1, 7, budget=9)
    assert target.run() == first[2:]


def test_a_repeated_open_moves_the_limit(target: Target) -> None:
    """As a repeated step does."""
    spec = spec_of(PROMPT, 60, eos=())
    target.open(spec, budget=1)
    assert len(target.run()) == 2
    target.open(spec, budget=4)
    assert [answer.fence.base_len for answer in target.run()] == [5, 6, 7, 8, 9]


def test_the_window_ends_what_the_budget_allows(target: Target) -> None:
    """A target never goes further than the window past the last acknowledged length."""
    target.open(spec_of(PROMPT, 600, eos=()), budget=4096)
    target.run()
    assert len(target.tokens) == len(PROMPT) + UNACKNOWLEDGED_WINDOW
    target.acknowledge(1, 100, 4096)
    target.run()
    assert len(target.tokens) == 100 + UNACKNOWLEDGED_WINDOW


def test_a_step_takes_over_a_target_that_is_going_on_alone(target: Target) -> None:
    """A proposal that comes between two unasked verdicts is verified at once."""
    spec = spec_of(PROMPT, 60, eos=())
    expected = plain(target.runner, spec)
    target.open(spec, budget=50)
    target.device.step(target.verifier.advance)
    target.device.step(target.verifier.advance)
    target.answers.clear()
    target.step(1, 7, expected[7:10])
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.accepted_rows == (1, 2, 3)
