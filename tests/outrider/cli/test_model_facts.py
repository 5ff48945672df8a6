"""Tests of outrider.cli.model_facts: the table of both models."""

import io

import pytest
from rich.console import Console

from outrider.cli.model_facts import ModelFacts, model_table


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
