"""bench.copying: which answers go in circles, and where they are counted."""

import random
from dataclasses import replace

import pytest
from support.command_line import RESULT

from bench.copying import AUTO, LOOKUP, PLAIN, REPEATING, Found, middle, render, repeats
from outrider.cli.bench.common import Timed

SOURCE = random.Random(3)
FRESH = [SOURCE.randrange(5000) for _ in range(120)]


@pytest.mark.parametrize(
    ("token_ids", "circles"),
    [
        (FRESH, False),
        (FRESH[:60] + FRESH[20:30] * 6, True),
        (FRESH[:12] * 10, True),
        ([7] * 40, True),
        # The same words with a number between that changes, as lists without an end have it.
        ([each for number in range(10) for each in (5000 + number, *FRESH[:14])], True),
        # A name, or a phrase said twice, is no circle.
        (FRESH + FRESH[:12], False),
        ([], False),
        ([1, 2, 3], False),
    ],
)
def test_an_answer_that_goes_in_circles_is_found(token_ids: list[int], circles: bool) -> None:
    """Exactly or with small changes, at its end or all along."""
    assert repeats(token_ids) is circles


def test_answers_that_repeat_themselves_are_counted_apart() -> None:
    """In the last row, and not among all others."""

    def answers(count: int, plain_us: float) -> dict[str, list[Timed]]:
        timed = Timed(100.0, 2.0, (1, 2), replace(RESULT))
        return {PLAIN: [timed._replace(token_us=plain_us)] * count, LOOKUP: [timed] * count, AUTO: [timed] * count}

    found: Found = {"qa": answers(3, 120.0), REPEATING: answers(2, 400.0)}
    rows = [line.strip("| ").split(" | ") for line in render(found).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["qa", "3"], ["all others", "3"], ["all that repeat themselves", "2"]]
    assert [row[4] for row in rows] == ["1.20 (1.20 to 1.20)", "1.20 (1.20 to 1.20)", "4.00 (4.00 to 4.00)"]


def test_of_several_answers_to_a_prompt_the_median_counts() -> None:
    """One that a busy machine made slow says nothing."""
    answers = [Timed(token_us, 2.0, (1, 2), replace(RESULT)) for token_us in (300.0, 110.0, 100.0)]
    assert middle(answers).token_us == 110
    assert middle(answers[:2]).token_us == 300
