"""What answers look like in a terminal, in a pipe and as JSON, and what is told in figures."""

import io
import json
import os
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console
from support.command_line import BRANCHED, CONTROL_SEQUENCES, NUMBERED, REJECTED, RESULT, TEXT, show_two_samples, shown

from outrider.cli.options import RequestOptions
from outrider.cli.rounds import STYLES, styled, trees
from outrider.cli.views import JsonView, PlainView, TerminalView, figures
from outrider.client import DrafterFigures, GeneratedToken, Origin, RejectedToken, Round, RoundFacts, SpeculationFigures
from outrider.parameters import Acceptance, Rule
from outrider.process.streams import LossyFile, LossyText


def test_figures_come_after_the_last_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both streams are one terminal, and the writer of the text is late."""
    reader, fd = os.pipe()
    put, finish, late = LossyFile._put, LossyFile.finish, threading.Event()

    def put_late(self: LossyFile, data: bytes) -> str:
        late.wait()
        return put(self, data)

    def finish_late(self: LossyFile) -> None:
        late.set()
        finish(self)

    class Notes(io.StringIO):
        """Notes that look at what stands in the terminal before them."""

        before = b""

        def write(self, text: str) -> int:
            self.before = self.before or os.read(reader, 1 << 16)
            return super().write(text)

    monkeypatch.setattr(LossyFile, "_put", put_late)
    monkeypatch.setattr(LossyFile, "finish", finish_late)
    output, notes = LossyText(fd, lambda count, reason: reason), Notes()
    os.set_blocking(reader, False)
    monkeypatch.setattr(sys, "stdout", output)
    try:
        shown(PlainView(output, notes))
    finally:
        late.set()
        output.file.end()
        os.close(reader)
        os.close(fd)
    assert notes.before.endswith(b"\n")
    assert notes.getvalue()


def terminal(output: io.StringIO, *, colour: bool) -> TerminalView:
    """A view on a terminal of 20 columns."""
    return TerminalView(
        Console(file=output, force_terminal=True, color_system="standard", no_color=not colour, width=20)
    )


def test_pipe_gets_samples_under_headings() -> None:
    """One after the other, and the figures of each in the notes."""
    output, notes = io.StringIO(), io.StringIO()
    show_two_samples(PlainView(output, notes))
    assert output.getvalue() == f"[Sample 1 of 2]\n{TEXT}\n[Sample 2 of 2]\n{TEXT}\n"
    assert [line[-7:] for line in notes.getvalue().splitlines()] == ["seed 11", "seed 12"]


def test_terminal_gets_samples_under_headings() -> None:
    """The prompt stands once above them."""
    output = io.StringIO()
    show_two_samples(terminal(output, colour=False))
    text = output.getvalue()
    assert text.count("Ask: ") == 1
    assert text.index("Sample 1 of 2") < text.index("seed 11") < text.index("Sample 2 of 2") < text.index("seed 12")


def test_log_probabilities_are_a_table_behind_the_text() -> None:
    """On the terminal and in the notes; the text itself stays as it is, and no control character gets into a table."""
    screen, output, notes = io.StringIO(), io.StringIO(), io.StringIO()
    shown(TerminalView(Console(file=screen, force_terminal=True, no_color=True, width=80)), NUMBERED)
    shown(PlainView(output, notes), NUMBERED)
    assert output.getvalue() == "Once\n\x1b time\n"
    for told in (screen.getvalue(), notes.getvalue()):
        assert "'Ask'" in told
        assert "'Once\\n'" in told
        assert "5 -0.250  6 -2.000" in told
        assert "'␛'" in told
        assert told.index("most probable") < told.index("'Ask'") < told.index("'␛'") < told.index("seed 11")


def test_numbers_of_one_sample_do_not_show_up_under_the_next() -> None:
    """The table of each sample has its tokens only, and the prompt's stand once."""
    output, notes = io.StringIO(), io.StringIO()
    view = PlainView(output, notes)
    view.begin("Ask: ", RequestOptions(sample_count=2))
    for index in range(2):
        view.show(replace(NUMBERED[0], sample_index=index, prompt=() if index else NUMBERED[0].prompt))
        view.finish(RESULT)
    first, second = notes.getvalue().split("seed 11")[:2]
    assert first.count("'Once\\n'") == second.count("'Once\\n'") == 1
    assert ("'Ask'" in first, "'Ask'" in second) == (True, False)


def test_pipe_gets_the_text_alone() -> None:
    """Nothing but the text and a newline goes to the output; the figures go to the notes."""
    output, notes = io.StringIO(), io.StringIO()
    shown(PlainView(output, notes))
    assert output.getvalue() == TEXT + "\n"
    assert notes.getvalue() == figures(RESULT, RequestOptions()) + "\n"


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
    shown(terminal(output, colour=True), (Round((GeneratedToken(1, Origin.BONUS, "x"),), "held back x"),))
    assert "\x1b[0mheld back x time" in output.getvalue()


def test_control_characters_become_pictures() -> None:
    """Escape sequences in the output of a model do not reach the terminal."""
    output = io.StringIO()
    text = "a\x1b[2Jb\rc\x9bd\te"
    shown(terminal(output, colour=True), (Round((GeneratedToken(1, Origin.PLAIN, text),), text),))
    assert "a␛[2Jb␍c\N{REPLACEMENT CHARACTER}d\te" in output.getvalue().replace("      ", "\t")


def test_rejected_guesses_are_struck_through() -> None:
    """Before what the target said instead, else after the tokens; the legend names them, a pipe never sees them."""
    screen, output = io.StringIO(), io.StringIO()
    shown(terminal(screen, colour=True), REJECTED, rejected=True)
    struck = "\x1b[2;9;31m"
    legend, text = screen.getvalue().split("\n\n", 1)
    assert f"{struck}rejected guess" in legend
    assert f"{struck} the\x1b[0m{struck} fox\x1b[0m\x1b[4;91m a\x1b[0m" in text
    assert text.index(" é") < text.index(" ␛")
    shown(PlainView(output, io.StringIO()), REJECTED, rejected=True)
    assert output.getvalue() == TEXT + "\n"


def test_guesses_that_branch_are_drawn_as_a_tree() -> None:
    """Below the text: the kept path, who guessed each row and its value, and what the target said in others' place."""
    screen = io.StringIO()
    view = TerminalView(Console(file=screen, force_terminal=True, color_system="standard", width=100))
    shown(view, BRANCHED, rejected=True)
    drawn = CONTROL_SEQUENCES.sub("", screen.getvalue())
    assert drawn[drawn.index("round 1") : drawn.index("5 tokens")].splitlines() == [
        "round 1: 1 of 5 guesses kept (● kept, \N{MULTIPLICATION SIGN} not kept, ○ not looked at)",
        "├── \N{MULTIPLICATION SIGN} ' in'  model 0.50",
        "└── ● ' upon'  lookup",
        "    ├── \N{MULTIPLICATION SIGN} ' the'  lookup",
        "    │   └── ○ ' fox'  lookup",
        "    ├── \N{MULTIPLICATION SIGN} ' ␛'  model 0.12",
        "    └──   ' a'  target",
    ]
    assert "\x1b[1;32m' upon'" in screen.getvalue()
    assert drawn.count("round ") == 1


def test_in_the_text_only_guesses_in_the_place_of_the_correction_are_struck_through() -> None:
    """Those on other branches would read as if they had stood in a row."""
    output, notes = io.StringIO(), io.StringIO()
    assert styled(BRANCHED[1]).plain == " upon the ␛ a"
    shown(PlainView(output, notes), BRANCHED, rejected=True)
    assert output.getvalue() == TEXT + "\n"
    assert "● ' upon'  lookup" in notes.getvalue()


def test_guesses_behind_a_stop_string_hang_on_the_last_token_that_is_told() -> None:
    """The row that they hang on was kept, but its token does not exist."""
    facts = RoundFacts(draft_count=4, accepted_count=2, evaluated_count=2)
    tokens = (GeneratedToken(6, Origin.ACCEPTED, " upon", row=2, drafter="model"),)
    rejected = (
        RejectedToken(70, " in", row=1, parent=0, drafter="model"),
        RejectedToken(71, " the", row=4, parent=3, drafter="model"),
    )
    [tree] = trees((Round(tokens, " upon", rejected=rejected, facts=facts),))
    [first, second] = tree.children
    assert (first.label.plain, second.label.plain) == ("\N{MULTIPLICATION SIGN} ' in'  model", "● ' upon'  model")
    assert [child.label.plain for child in second.children] == ["\N{MULTIPLICATION SIGN} ' the'  model"]


def test_chains_are_not_drawn_as_trees() -> None:
    """With rows reported or not, their guesses are struck through in the text, and nothing is below it."""
    token = GeneratedToken(6, Origin.ACCEPTED, " upon", row=1, drafter="model")
    chained = Round((token,), " upon", rejected=(RejectedToken(70, " in", row=2, parent=1, drafter="model"),))
    assert list(trees((*REJECTED, chained))) == []
    assert styled(chained).plain == " upon in"


def test_json_is_one_object() -> None:
    """Text with what was held back, all token ids, and the sections by their names."""
    output = io.StringIO()
    shown(JsonView(output))
    [line] = output.getvalue().splitlines()
    [answer] = json.loads(line)["samples"]
    assert answer["text"] == TEXT
    assert answer["token_ids"] == [5, 6, 7, 8, 9]
    assert answer["finish_reason"] == "length"
    assert answer["seed"] == 11
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "cached_prompt_tokens": 2,
        "completion_tokens": 5,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert answer["speculation"]["acceptance_rate"] == 0.5
    assert answer["timings"] == {"queue_us": 50, "first_token_us": 1_000, "total_us": 100_000}


def test_json_tells_log_probabilities() -> None:
    """Those of the prompt beside the samples, those of the output token by token, with the most probable ones."""
    output = io.StringIO()
    shown(JsonView(output), NUMBERED)
    told = json.loads(output.getvalue())
    [first, second] = told["prompt"]
    assert first == {"token_id": 3, "text": "Ask", "logprob": None, "most_probable": []}
    assert second["logprob"] == -3.0
    [sample] = told["samples"]
    assert [token["logprob"] for token in sample["tokens"]] == [-0.25, -1.5]
    [token_id, other] = sample["tokens"][1]["most_probable"]
    assert (token_id, other) == ({"token_id": 6, "logprob": -1.5}, {"token_id": 8, "logprob": -1.625})


def test_without_log_probabilities_json_has_no_tokens() -> None:
    """Token ids say it all."""
    output = io.StringIO()
    shown(JsonView(output))
    told = json.loads(output.getvalue())
    assert list(told) == ["samples"]
    assert "tokens" not in told["samples"][0]


def test_json_lists_samples_in_order() -> None:
    """Each with its own tokens and figures, and the rule that decided."""
    output = io.StringIO()
    show_two_samples(JsonView(output))
    samples = json.loads(output.getvalue())["samples"]
    assert [(sample["text"], sample["seed"]) for sample in samples] == [(TEXT, 11), (TEXT, 12)]
    assert {(sample["rule"], sample["follows_target"]) for sample in samples} == {("match", True)}


def test_json_tells_rounds_when_they_are_wanted() -> None:
    """Who said each token first, what was not kept, and how it came about."""
    output = io.StringIO()
    shown(JsonView(output), REJECTED, rejected=True)
    [sample] = json.loads(output.getvalue())["samples"]
    first, second, _ = sample["rounds"]
    nobody = {"draft_logprob": None, "row": 0, "drafter": "", "value": None}
    assert first["tokens"] == [{"token_id": 5, "text": "Once", "origin": "plain", **nobody}]
    place = {"row": 0, "parent": 0, "drafter": "", "value": None}
    assert second["rejected"][0] == {"token_id": 70, "text": " the", "draft_logprob": -0.5, **place}
    assert second["facts"]["draft_count"] == 3


def test_figures_name_speed_acceptance_and_seed() -> None:
    """The last line has the figures that the user needs to compare and to replay."""
    assert figures(RESULT, RequestOptions()) == (
        "5 tokens, 50 tokens/s, 2 rounds, acceptance rate 0.50, mean acceptance length 2.00, 1 fallback round, seed 11"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RequestOptions(), "no guesses (auto expected none to pay)"),
        (RequestOptions(draft_count="auto"), "no guesses (auto expected none to pay)"),
        (RequestOptions(draft_count="3"), "no guesses (nobody had one)"),
        (RequestOptions(draft_count="0"), "no guesses, as asked"),
        (RequestOptions(no_speculation=True), "no guesses, as asked"),
    ],
)
def test_figures_say_why_nothing_was_guessed(options: RequestOptions, words: str) -> None:
    """Instead of an acceptance rate of nothing."""
    output, notes = io.StringIO(), io.StringIO()
    view = PlainView(output, notes)
    view.begin("Ask: ", options)
    view.finish(replace(RESULT, speculation=SpeculationFigures(rounds=5)))
    assert notes.getvalue() == f"5 tokens, 50 tokens/s, 5 rounds, {words}, 0 fallback rounds, seed 11\n"


def test_figures_name_drafters_where_there_are_several() -> None:
    """What each of them guessed and what of it was kept; a single one has no part of its own."""
    parts = (DrafterFigures("lookup", 8, 3), DrafterFigures("", 4, 1))
    options, several = RequestOptions(), replace(RESULT, speculation=replace(RESULT.speculation, drafters=parts))
    assert "lookup 3 of 8 guesses kept, draft 1 of 4 guesses kept" in figures(several, options)
    one = replace(RESULT, speculation=replace(RESULT.speculation, drafters=parts[:1]))
    assert figures(one, options) == figures(RESULT, options)


def test_one_is_no_plural() -> None:
    """Neither of tokens nor of rounds."""
    speculation = replace(RESULT.speculation, rounds=1, fallback_rounds=1)
    line = figures(replace(RESULT, speculation=speculation, completion_tokens=1), RequestOptions())
    assert line.startswith("1 token, ")
    assert ", 1 round, " in line
    assert ", 1 fallback round, " in line


def test_figures_say_what_the_request_survived() -> None:
    """A request that was opened again says so, and so does one that another kind of target went on with."""
    survived = replace(RESULT, target_reopens=2)
    assert figures(survived, RequestOptions()).endswith("seed 11, 2 times opened again on a target")
    moved = replace(survived, numerics_ids=("cpu-a", "cuda-b"))
    assert figures(moved, RequestOptions()).endswith(", moved between the numerics cpu-a and cuda-b")


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
    assert figures(replace(RESULT, acceptance=acceptance), RequestOptions()).endswith(f"seed 11, {told}")
    assert "rule" not in figures(RESULT, RequestOptions())
