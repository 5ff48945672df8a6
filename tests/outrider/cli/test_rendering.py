"""What a generation looks like in a terminal, in a pipe and as JSON."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from outrider.cli.events import ModelFacts, Origin, Result, Round, Speculation, Token
from outrider.cli.rendering import STYLES, JsonView, PlainView, TerminalView, View, figures, model_table

ROUNDS = (
    Round((Token(5, Origin.PLAIN, "Once"),), "Once"),
    Round((Token(6, Origin.ACCEPTED, " upon"), Token(7, Origin.CORRECTION, " a")), " upon a"),
    Round((Token(8, Origin.ACCEPTED, ""), Token(9, Origin.BONUS, " é")), " é"),
)
RESULT = Result(
    rest=" time",
    finish_reason="length",
    seed=11,
    prompt_tokens=3,
    completion_tokens=5,
    speculation=Speculation(2, 4, 2, 0.5, 0.5, 2.0, 1),
    first_token_us=1_000,
    total_us=100_000,
    model_hash="ab",
    numerics_ids=("cpu-test",),
)
TEXT = "Once upon a é time"


def shown(view: View, rounds: tuple[Round, ...] = ROUNDS) -> None:
    """Lets a view see a whole generation."""
    view.begin("Ask: ")
    for event in rounds:
        view.show(event)
    view.finish(RESULT)


def terminal(output: io.StringIO, *, colour: bool) -> TerminalView:
    """A view on a terminal of 20 columns."""
    return TerminalView(
        Console(file=output, force_terminal=True, color_system="standard", no_color=not colour, width=20)
    )


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


def test_json_is_one_object() -> None:
    """Text with what was held back, all token ids, and the sections by their names."""
    output = io.StringIO()
    shown(JsonView(output))
    [line] = output.getvalue().splitlines()
    answer = json.loads(line)
    assert answer["text"] == TEXT
    assert answer["token_ids"] == [5, 6, 7, 8, 9]
    assert answer["finish_reason"] == "length"
    assert answer["seed"] == 11
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5}
    assert answer["speculation"]["acceptance_rate"] == 0.5
    assert answer["timings"] == {"first_token_us": 1_000, "total_us": 100_000}


def test_pipe_gets_the_text_alone() -> None:
    """Nothing but the text and a newline goes to the output; the figures go to the notes."""
    output, notes = io.StringIO(), io.StringIO()
    shown(PlainView(output, notes))
    assert output.getvalue() == TEXT + "\n"
    assert notes.getvalue() == figures(RESULT) + "\n"


def test_terminal_styles_tokens_by_origin() -> None:
    """Each origin has its colour, the legend comes first, and lines are not broken by us."""
    output = io.StringIO()
    shown(terminal(output, colour=True))
    legend, text = output.getvalue().split("\n\n", 1)
    assert "drafted and accepted" in legend
    assert "\x1b[1;32m upon\x1b[0m" in text
    assert "\x1b[4;91m a\x1b[0m" in text
    assert "\x1b[3;33m é\x1b[0m" in text
    assert text.startswith("\x1b[2mAsk: \x1b[0mOnce\x1b[")
    assert text.rstrip().splitlines()[-1].endswith("seed 11\x1b[0m")


def test_without_colours_the_origins_still_differ() -> None:
    """NO_COLOR leaves bold, underline and italic."""
    output = io.StringIO()
    shown(terminal(output, colour=False))
    assert "\x1b[1m upon\x1b[0m" in output.getvalue()
    assert "\x1b[4m a\x1b[0m" in output.getvalue()
    assert "\x1b[3m é\x1b[0m" in output.getvalue()
    assert len(set(STYLES.values())) == len(Origin)


def test_text_wins_over_shares() -> None:
    """When the tokens' shares do not make up the text, the text is what is shown."""
    output = io.StringIO()
    shown(terminal(output, colour=True), (Round((Token(1, Origin.BONUS, "x"),), "held back x"),))
    assert "\x1b[0mheld back x time" in output.getvalue()


def test_control_characters_become_pictures() -> None:
    """Escape sequences in the output of a model do not reach the terminal."""
    output = io.StringIO()
    text = "a\x1b[2Jb\rc\x9bd\te"
    shown(terminal(output, colour=True), (Round((Token(1, Origin.PLAIN, text),), text),))
    assert "a␛[2Jb␍c\N{REPLACEMENT CHARACTER}d\te" in output.getvalue().replace("      ", "\t")


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
    Console(file=output, width=width).print(model_table(facts))
    for word in ("target", "draft", "11,015,808", "cpu-bfloat16-v4", "1,024 tokens", "4,096 of 16 tokens", ":50052"):
        assert word in output.getvalue()
