"""How a generation looks: tokens in the style of their origin, bare text, or one JSON object. Knows no gRPC."""

import json
from dataclasses import asdict
from typing import Protocol, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.events import ModelFacts, Origin, Result, Round

# Never by colour alone: with NO_COLOR, or to eyes that see colours otherwise, the attributes still tell them apart.
STYLES = {
    Origin.ACCEPTED: "bold green",
    Origin.CORRECTION: "underline bright_red",
    Origin.BONUS: "italic yellow",
    Origin.PLAIN: "",
}
MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.CORRECTION: "the target's correction",
    Origin.BONUS: "bonus behind an accepted draft",
    Origin.PLAIN: "plain",
}
# Control characters but tab and newline become their pictures: a model must not drive the reader's terminal.
CONTROL_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


class View(Protocol):
    """Shows one generation, event by event."""

    def begin(self, prompt: str) -> None:
        """Comes before the first event."""

    def show(self, event: Round) -> None:
        """Shows what a round committed."""

    def finish(self, result: Result) -> None:
        """Shows the result."""


def figures(result: Result) -> str:
    """The last line: how many tokens, how fast, what speculation did, and the seed that replays it."""
    told = result.speculation
    parts = [
        f"{result.completion_tokens} tokens",
        f"{result.tokens_per_second:.0f} tokens/s",
        f"{told.rounds} rounds",
        f"acceptance rate {told.acceptance_rate:.2f}",
        f"mean acceptance length {told.mean_acceptance_length:.2f}",
        f"{told.fallback_rounds} fallback rounds",
        f"seed {result.seed}",
    ]
    if result.target_reopens:
        parts.append(f"{result.target_reopens} times opened again on a target")
    if len(result.numerics_ids) > 1:
        # Only then the seed does not repeat the text.
        parts.append(f"moved between the numerics {' and '.join(result.numerics_ids)}")
    return ", ".join(parts)


class TerminalView:
    """Streams tokens in the style of their origin, with a legend before and the figures behind."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, prompt: str) -> None:
        """Prints the legend, and what is to be continued."""
        legend = Text("  ").join(Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items())
        self._console.print(legend, end="\n\n", soft_wrap=True)
        self._put(Text(prompt.translate(CONTROL_PICTURES), "dim"))

    def show(self, event: Round) -> None:
        """Prints the tokens. When their shares do not make up the round's text, the text goes without styles."""
        if "".join(token.text for token in event.tokens) == event.text:
            shares = [Text(token.text.translate(CONTROL_PICTURES), STYLES[token.origin]) for token in event.tokens]
            self._put(Text().join(shares))
        else:
            self._put(Text(event.text.translate(CONTROL_PICTURES)))

    def finish(self, result: Result) -> None:
        """Prints what was held back, and the figures."""
        self._put(Text(result.rest.translate(CONTROL_PICTURES)))
        self._console.print(Text("\n\n" + figures(result), "dim"), soft_wrap=True)

    def _put(self, text: Text) -> None:
        # Soft wrap leaves breaking lines to the terminal: a piece does not know in which column it begins.
        self._console.print(text, end="", soft_wrap=True)


class PlainView:
    """The text alone, as it comes, and a newline behind it; the figures go elsewhere."""

    def __init__(self, output: TextIO, notes: TextIO) -> None:
        self._output = output
        self._notes = notes

    def begin(self, prompt: str) -> None:
        """Shows nothing."""

    def show(self, event: Round) -> None:
        """Writes the round's text."""
        self._output.write(event.text)
        self._output.flush()

    def finish(self, result: Result) -> None:
        """Writes what was held back, and the figures to the notes."""
        self._output.write(result.rest + "\n")
        self._output.flush()
        self._notes.write(figures(result) + "\n")


class JsonView:
    """One JSON object, when everything is known."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._rounds: list[Round] = []

    def begin(self, prompt: str) -> None:
        """Shows nothing."""

    def show(self, event: Round) -> None:
        """Keeps the round."""
        self._rounds.append(event)

    def finish(self, result: Result) -> None:
        """Writes the object on one line."""
        answer = {
            "text": "".join(event.text for event in self._rounds) + result.rest,
            "token_ids": [token.token_id for event in self._rounds for token in event.tokens],
            "finish_reason": result.finish_reason,
            "seed": result.seed,
            "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens},
            "speculation": asdict(result.speculation),
            "timings": {"first_token_us": result.first_token_us, "total_us": result.total_us},
            "model_hash": result.model_hash,
            "numerics_id": result.numerics_ids[-1],
            "numerics_ids": result.numerics_ids,
            "survival": {"target_reopens": result.target_reopens, "drift_repairs": result.drift_repairs},
        }
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()


def model_table(facts: list[ModelFacts]) -> Table:
    """One column a model, so that the table fits into a narrow terminal."""
    table = Table("role", *(fact.role for fact in facts))
    table.add_row("model", *(fact.model for fact in facts))
    table.add_row("parameters", *(f"{fact.parameters:,}" for fact in facts))
    table.add_row("dtype", *(fact.dtype for fact in facts))
    table.add_row("device", *(fact.device for fact in facts))
    table.add_row("threads", *(str(fact.threads) for fact in facts))
    table.add_row("numerics id", *(fact.numerics_id for fact in facts))
    table.add_row("context", *(f"{fact.context_len:,} tokens" for fact in facts))
    table.add_row("KV blocks", *(f"{fact.blocks:,} of {fact.block_size} tokens" for fact in facts))
    table.add_row("address", *(fact.address for fact in facts))
    return table
