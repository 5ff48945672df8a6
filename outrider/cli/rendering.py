"""How answers look: tokens in the style of their origin, or bare text. Knows no gRPC."""

from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from outrider.cli.asking import Ask
from outrider.cli.tables import CONTROL_PICTURES, figures, logprob_table
from outrider.client import GeneratedToken, Origin, PromptToken, Result, Round

# Never by colour alone: with NO_COLOR, or to eyes that see colours otherwise, the attributes still tell them apart.
STYLES = {
    Origin.ACCEPTED: "bold green",
    Origin.CORRECTION: "underline bright_red",
    Origin.BONUS: "italic yellow",
    Origin.PLAIN: "",
}
REJECTED_STYLE = "strike dim red"
MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.CORRECTION: "the target's correction",
    Origin.BONUS: "bonus behind an accepted draft",
    Origin.PLAIN: "plain",
}


# Into a file or pipe a table is as wide as it needs to be.
PLAIN_WIDTH = 160


def console_for(file: TextIO) -> Console:
    """A console that has the width of a terminal, and much room elsewhere."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=PLAIN_WIDTH)


def legend(*, rejected: bool) -> Text:
    """What the styles mean; that of rejected guesses only where they are shown."""
    parts = [Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items()]
    return Text("  ").join([*parts, Text("rejected guess", REJECTED_STYLE)] if rejected else parts)


def styled(event: Round) -> Text:
    """A round's text in the styles of its tokens' origins, rejected guesses before what the target said instead.

    When the tokens' shares do not make up the round's text, the text goes without styles.
    """
    if "".join(token.text for token in event.tokens) != event.text:
        return Text(event.text.translate(CONTROL_PICTURES))
    rejected = [Text(each.text.translate(CONTROL_PICTURES), REJECTED_STYLE) for each in event.rejected]
    shares = [Text(token.text.translate(CONTROL_PICTURES), STYLES[token.origin]) for token in event.tokens]
    corrected = bool(event.tokens) and event.tokens[-1].origin is Origin.CORRECTION
    place = len(shares) - corrected
    return Text().join([*shares[:place], *rejected, *shares[place:]])


class View(Protocol):
    """Shows the answers to one request, event by event, one sample behind the other."""

    def begin(self, ask: Ask) -> None:
        """Comes before the first event."""

    def show(self, event: Round) -> None:
        """Shows what a round committed."""

    def finish(self, result: Result) -> None:
        """Shows the result of a sample."""

    def end(self) -> None:
        """Comes behind the last event."""

    def interrupt(self) -> None:
        """Comes instead of the end, before whatever is said about that."""


class Headings:
    """The line above each of several samples."""

    def __init__(self) -> None:
        self._count = 1
        self._shown = -1

    def begin(self, count: int) -> None:
        """Takes how many samples there will be."""
        self._count = count

    def above(self, event: Round) -> str:
        """The heading where a sample begins, and nothing within one or above the only one."""
        if self._count == 1 or event.sample_index == self._shown:
            return ""
        self._shown = event.sample_index
        return f"Sample {event.sample_index + 1} of {self._count}"


class Numbers:
    """The tokens of one sample that have a log-probability to show, and the prompt's."""

    def __init__(self) -> None:
        self._prompt: list[PromptToken] = []
        self._tokens: list[GeneratedToken] = []

    def add(self, event: Round) -> None:
        """Keeps what has a log-probability."""
        self._prompt += event.prompt
        self._tokens += [token for token in event.tokens if token.logprob]

    def print_to(self, console: Console) -> None:
        """Prints a table if there is anything to tell, and forgets it."""
        if self._prompt or self._tokens:
            console.print(logprob_table(self._prompt, self._tokens))
        self._prompt, self._tokens = [], []


class TerminalView:
    """Streams tokens in the style of their origin, with a legend before and the figures behind."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._headings = Headings()
        self._numbers = Numbers()

    def begin(self, ask: Ask) -> None:
        """Prints the legend, and what is to be continued."""
        rejected = bool(ask.speculation.show_rejected)
        self._console.print(legend(rejected=rejected), end="\n\n", soft_wrap=True)
        self._put(Text(ask.prompt.translate(CONTROL_PICTURES), "dim"))
        self._headings.begin(ask.sample_count)

    def show(self, event: Round) -> None:
        """Prints the tokens."""
        heading = self._headings.above(event)
        if heading:
            self._put(Text(f"\n\n{heading}\n", "bold"))
        self._numbers.add(event)
        self._put(styled(event))

    def finish(self, result: Result) -> None:
        """Prints what was held back, the log-probabilities and the figures."""
        self._put(Text(result.rest.translate(CONTROL_PICTURES) + "\n\n"))
        self._numbers.print_to(self._console)
        self._console.print(Text(figures(result), "dim"), soft_wrap=True)

    def end(self) -> None:
        """Everything is shown already."""

    def interrupt(self) -> None:
        """Ends the line, on which an error would stand otherwise."""
        self._put(Text("\n"))

    def _put(self, text: Text) -> None:
        # Soft wrap leaves breaking lines to the terminal: a piece does not know in which column it begins.
        self._console.print(text, end="", soft_wrap=True)


class PlainView:
    """The text alone, as it comes, and a newline behind it; log-probabilities and figures go elsewhere."""

    def __init__(self, output: TextIO, notes: TextIO) -> None:
        self._output = output
        self._notes = console_for(notes)
        self._headings = Headings()
        self._numbers = Numbers()

    def begin(self, ask: Ask) -> None:
        """Shows nothing."""
        self._headings.begin(ask.sample_count)

    def show(self, event: Round) -> None:
        """Writes the round's text."""
        heading = self._headings.above(event)
        self._write((f"[{heading}]\n" if heading else "") + event.text)
        self._numbers.add(event)

    def finish(self, result: Result) -> None:
        """Writes what was held back, and everything else to the notes."""
        self._write(result.rest + "\n")
        self._numbers.print_to(self._notes)
        self._notes.print(Text(figures(result)), soft_wrap=True)

    def end(self) -> None:
        """Everything is written already."""

    def interrupt(self) -> None:
        """Writes nothing, because the text is all that there is."""

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
