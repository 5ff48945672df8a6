"""What is told in figures."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from support.command_line import RESULT

from outrider.cli.model_facts import ModelFacts
from outrider.cli.tables import figures, model_table
from outrider.parameters import Acceptance, Rule


def test_figures_name_speed_acceptance_and_seed() -> None:
    """The last line has the figures that the user needs to compare and to replay."""
    assert figures(RESULT) == (
        "5 tokens, 50 tokens/s, 2 rounds, acceptance rate 0.50, mean acceptance length 2.00, 1 fallback rounds, seed 11"
    )


def test_figures_say_what_the_request_survived() -> None:
    """A request that was opened again says so, and so does one that another kind of target went on with."""
    survived = replace(RESULT, target_reopens=2)
    assert figures(survived).endswith("seed 11, 2 times opened again on a target")
    moved = replace(survived, numerics_ids=("cpu-a", "cuda-b"))
    assert figures(moved).endswith(", moved between the numerics cpu-a and cuda-b")


@pytest.mark.parametrize(
    ("acceptance", "told"),
    [
        (Acceptance(rule=Rule.RATIO), "rule ratio"),
        (Acceptance(rule=Rule.BLOCK), "rule block"),
        (
            Acceptance(rule=Rule.LENIENT, lenience=0.25),
            "rule lenient with lenience 0.25: does not follow the target's distribution",
        ),
        (
            Acceptance(rule=Rule.TYPICAL),
            "rule typical with typical epsilon 0.09 and typical delta 0.3: does not follow the target's distribution",
        ),
    ],
)
def test_figures_name_every_rule_but_match(acceptance: Acceptance, told: str) -> None:
    """With its settings, and a warning where the answer is another one than the target's."""
    assert figures(replace(RESULT, acceptance=acceptance)).endswith(f"seed 11, {told}")
    assert "rule" not in figures(RESULT)


@pytest.mark.parametrize("width", [60, 160])
def test_model_table_names_everything(width: int) -> None:
    """The table fits into a narrow terminal and loses nothing."""
    facts = [
        ModelFacts(
            role, "story", 11_015_808, "bfloat16", "cpu", 2, "cpu-bfloat16-v4", 1024, 4096, 16, "127.0.0.1:50052"
        )
        for role in ("target", "draft")
    ]
    output = io.StringIO()
    Console(file=output, width=width).print(model_table(facts, {"draft": "127.0.0.1:4711"}))
    for word in (
        "target",
        "draft",
        "11,015,808",
        "cpu-bfloat16-v4",
        "1,024 tokens",
        "4,096 of 16 tokens",
        ":50052",
        ":4711",
    ):
        assert word in output.getvalue()
