"""The report's numbers on cases that can be counted by hand."""

import json
from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidRequest
from training.draft_report import (
    DEPTHS,
    QUESTIONS_EACH,
    Question,
    first_answers,
    kept_of,
    markdown,
    read_questions,
    tokens_a_round,
)


def test_what_is_kept_is_counted_at_each_temperature() -> None:
    """At 0 guesses that are the target's likeliest; above it the overlap, and ids that are never guessed are lost."""
    laws = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).log()
    guessed, ids = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log(), torch.tensor([0, 2])
    assert kept_of(laws, guessed, ids, 0.0) == 1
    assert kept_of(laws, guessed, ids, 1.0) == pytest.approx((0.5 + 0.1) + (0.1 + 0.5), rel=1e-5)
    squares = torch.tensor([[0.25, 0.09, 0.04], [0.01, 0.04, 0.49]])
    squares /= squares.sum(-1, keepdim=True)
    wanted = min(0.81 / 0.82, float(squares[0, 0])) + 0.01 / 0.82 + float(squares[1, 0]) + 0.5
    assert kept_of(laws, guessed, ids, 0.5) == pytest.approx(wanted, rel=1e-5)


def test_only_the_first_answer_counts() -> None:
    """Not what comes after a second message that the target wrote."""
    answers = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]).bool()
    wanted = torch.tensor([[0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]).bool()
    assert torch.equal(first_answers(answers), wanted)


def test_a_round_is_the_targets_token_and_the_guesses_that_are_kept() -> None:
    """Each after right ones alone."""
    assert tokens_a_round([0.5, 0.5, 0.0, 1.0]) == 1 + 0.5 + 0.25


def test_the_tables_have_a_row_for_each_task_and_their_mean() -> None:
    """One table for each temperature, the head by depth and the draft."""
    values = {f"{temperature} / {task}": [0.5] * DEPTHS + [share] for temperature in ("0", "0.7", "1")
              for task, share in (("qa", 0.2), ("coding", 0.4))}  # fmt: skip
    text = markdown(values)
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        f"### Temperature {temperature}" for temperature in ("0", "0.7", "1")
    ]
    head = " | ".join(["0.500"] * DEPTHS) + " | 1.97 |"
    assert text.count(f"| qa | {head} 0.200 | 1.25 |") == 3
    assert text.count(f"| mean of the tasks | {head} 0.300 | 1.43 |") == 3


def test_questions_are_the_first_of_each_category(tmp_path: Path) -> None:
    """First turns only; a file of anything else is refused by name."""
    entries = [{"category": each, "turns": [f"{each} {number}", "more"]} for number in range(9) for each in ("a", "b")]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in entries))
    wanted = [Question(each, f"{each} {number}") for each in ("a", "b") for number in range(QUESTIONS_EACH)]
    assert read_questions(path) == wanted
    path.write_text('{"category": "a"}')
    with pytest.raises(InvalidRequest, match="--questions is"):
        read_questions(path)
