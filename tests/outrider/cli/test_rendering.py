"""What answers look like in a terminal and in a pipe."""

import io
from dataclasses import replace

from rich.console import Console
from support.command_line import NUMBERED, REJECTED, RESULT, TEXT, show_two_samples, shown

from outrider.cli.asking import Ask, Report
from outrider.cli.rendering import STYLES, PlainView, TerminalView
from outrider.cli.tables import figures
from outrider.client import GeneratedToken, Origin, Round


def terminal(output: io.StringIO, *, colour: bool) -> TerminalView:
    """A view on a terminal of 20 columns."""
    return TerminalView(
        Console(file=output, force_terminal=True, color_system="standard", no_color=not colour, width=20)
    )


def test_pipe_gets_samples_under_headings() -> None:
    """One behind the other, and the figures of each in the notes."""
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
    view.begin(Ask("Ask: ", report=Report(samples=2)))
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
    shown(terminal(output, colour=True), (Round((GeneratedToken(1, Origin.BONUS, "x"),), "held back x"),))
    assert "\x1b[0mheld back x time" in output.getvalue()


def test_control_characters_become_pictures() -> None:
    """Escape sequences in the output of a model do not reach the terminal."""
    output = io.StringIO()
    text = "a\x1b[2Jb\rc\x9bd\te"
    shown(terminal(output, colour=True), (Round((GeneratedToken(1, Origin.PLAIN, text),), text),))
    assert "a␛[2Jb␍c\N{REPLACEMENT CHARACTER}d\te" in output.getvalue().replace("      ", "\t")


def test_rejected_guesses_are_struck_through() -> None:
    """Before what the target said instead, else behind the tokens; the legend tells of them, a pipe never sees them."""
    screen, output = io.StringIO(), io.StringIO()
    shown(terminal(screen, colour=True), REJECTED, rejected=True)
    struck = "\x1b[2;9;31m"
    legend, text = screen.getvalue().split("\n\n", 1)
    assert f"{struck}rejected guess" in legend
    assert f"{struck} the\x1b[0m{struck} fox\x1b[0m\x1b[4;91m a\x1b[0m" in text
    assert text.index(" é") < text.index(" ␛")
    shown(PlainView(output, io.StringIO()), REJECTED, rejected=True)
    assert output.getvalue() == TEXT + "\n"
