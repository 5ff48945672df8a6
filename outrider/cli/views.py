"""Output of commands: answers as text, in a terminal or as JSON, and figures about them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.options import RequestOptions, parse_draft_count
from outrider.cli.output import console_for, write
from outrider.cli.rounds import CONTROL_PICTURES, legend, styled, trees
from outrider.client import GeneratedToken, PromptToken, Result, Round, Sample
from outrider.parameters import Acceptance, Rule
from outrider.process.streams import finish_streams


class View:
    """Shows the answers to one request, event by event, one sample after the other."""

    def begin(self, prompt: str, options: RequestOptions) -> None:
        """Comes before the first event, with the request."""

    def show(self, event: Round) -> None:
        """Shows the tokens that a round committed."""

    def finish(self, result: Result) -> None:
        """Shows the result of a sample."""

    def end(self) -> None:
        """Comes after the last event."""

    def interrupt(self) -> None:
        """Comes instead of the end, before whatever is said about that."""


class _TextView(View):
    """Streams the text of each sample: a heading above it; trees of guesses, log-probabilities and figures below."""

    def __init__(self) -> None:
        self._options = RequestOptions()
        self._index = -1
        self._rounds: list[Round] = []

    def begin(self, prompt: str, options: RequestOptions) -> None:
        self._options = options

    def _heading(self, event: Round) -> str:
        """Takes a round; returns the heading where a sample begins, and nothing within one or above the only one."""
        self._rounds.append(event)
        begins, self._index = event.sample_index != self._index, event.sample_index
        count = self._options.sample_count or 1
        return f"Sample {event.sample_index + 1} of {count}" if begins and count > 1 else ""

    def _print_below(self, console: Console, result: Result, style: str = "") -> None:
        for tree in trees(self._rounds):
            console.print(tree)
        prompt = [token for event in self._rounds for token in event.prompt]
        tokens = [token for event in self._rounds for token in event.tokens if token.logprob]
        if prompt or tokens:
            console.print(logprob_table(prompt, tokens))
        self._rounds = []
        console.print(Text(figures(result, self._options), style), soft_wrap=True)


class TerminalView(_TextView):
    """Tokens in the style of their origin, with a legend before them."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def begin(self, prompt: str, options: RequestOptions) -> None:
        super().begin(prompt, options)
        self._console.print(legend(rejected=bool(options.show_rejected)), end="\n\n", soft_wrap=True)
        self._put(Text(prompt.translate(CONTROL_PICTURES), "dim"))

    def show(self, event: Round) -> None:
        if heading := self._heading(event):
            self._put(Text(f"\n\n{heading}\n", "bold"))
        self._put(styled(event))

    def finish(self, result: Result) -> None:
        self._put(Text(result.rest.translate(CONTROL_PICTURES) + "\n\n"))
        self._print_below(self._console, result, "dim")

    def interrupt(self) -> None:
        """Ends the line, on which an error would stand otherwise."""
        self._put(Text("\n"))

    def _put(self, text: Text) -> None:
        # Soft wrap leaves breaking lines to the terminal: a piece does not know in which column it begins.
        self._console.print(text, end="", soft_wrap=True)


class PlainView(_TextView):
    """The text alone, as it comes, and a newline after it; log-probabilities and figures go to the notes."""

    def __init__(self, output: TextIO, notes: TextIO) -> None:
        super().__init__()
        self._output = output
        self._notes = console_for(notes)

    def show(self, event: Round) -> None:
        heading = self._heading(event)
        write(self._output, (f"[{heading}]\n" if heading else "") + event.text)

    def finish(self, result: Result) -> None:
        write(self._output, result.rest + "\n")
        # Each stream has a writer of its own, and both may be one terminal.
        finish_streams()
        self._print_below(self._notes, result)


class JsonView(View):
    """Keeps the events and writes one line at the end: the list `samples`, and the prompt's tokens where they came."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._prompt: tuple[PromptToken, ...] = ()
        self._rounds: list[Round] = []
        self._with_rounds = False
        self._samples: list[dict[str, Any]] = []

    def begin(self, prompt: str, options: RequestOptions) -> None:
        self._with_rounds = bool(options.show_rejected)

    def show(self, event: Round) -> None:
        self._prompt += event.prompt
        self._rounds.append(event)

    def finish(self, result: Result) -> None:
        self._samples.append(sample_object(self._rounds, result, with_rounds=self._with_rounds))
        self._rounds = []

    def end(self) -> None:
        prompt = {"prompt": [_token(each) for each in self._prompt]} if self._prompt else {}
        write(self._output, json.dumps({**prompt, "samples": self._samples}, ensure_ascii=False) + "\n")


def choose_view(*, as_json: bool) -> View:
    """JSON when wanted; otherwise styles in a terminal, and the bare text into a pipe or file."""
    if as_json:
        return JsonView(sys.stdout)
    if sys.stdout.isatty():
        return TerminalView(Console(highlight=False))
    return PlainView(sys.stdout, sys.stderr)


# Facts of a result in each section of a sample's JSON, in this order.
SECTIONS = {
    "usage": (
        *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
        *("accepted_prediction_tokens", "rejected_prediction_tokens"),
    ),
    "timings": ("queue_us", "first_token_us", "total_us"),
    "survival": ("target_reopens", "drift_repairs"),
}
FIGURES = (
    *("rounds", "draft_tokens", "accepted_tokens", "acceptance_rate", "draft_acceptance_rate"),
    *("mean_acceptance_length", "fallback_rounds", "drafts", "drafters"),
)


def sample_object(rounds: Sequence[Round], result: Result, *, with_rounds: bool = False) -> dict[str, Any]:
    """JSON object of one answer. Its tokens come only with log-probabilities, its rounds only when they are wanted."""
    tokens = [token for event in rounds for token in event.tokens]
    logprobs = {"tokens": [_token(each) for each in tokens]} if any(each.logprob for each in tokens) else {}
    speculation = asdict(result.speculation)
    sections = {name: {field: getattr(result, field) for field in names} for name, names in SECTIONS.items()}
    thought = Sample(tuple(rounds), result).reasoning
    # Of each round who said its tokens first, which guesses were not kept, and how it came about.
    wanted = [
        {
            "tokens": [
                {key: value for key, value in asdict(token).items() if key != "logprob"} for token in event.tokens
            ],
            "rejected": [asdict(each) for each in event.rejected],
            "facts": asdict(event.facts),
        }
        for event in (rounds if with_rounds else ())
    ]
    return {
        "text": "".join(event.text for event in rounds) + result.rest,
        **({"reasoning": thought} if thought else {}),
        "token_ids": [token.token_id for token in tokens],
        **logprobs,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "rule": result.acceptance.rule,
        **result.acceptance.settings,
        "follows_target": result.acceptance.rule.is_exact,
        "sampling": result.sampling.model_dump(),
        **sections,
        "speculation": {name: speculation[name] for name in FIGURES},
        "model_hash": result.model_hash,
        "numerics_id": result.numerics_ids[-1],
        "numerics_ids": result.numerics_ids,
        **({"rounds": wanted} if with_rounds else {}),
    }


def _token(token: PromptToken | GeneratedToken) -> dict[str, Any]:
    """A token with its log-probability, null for the prompt's first, and the most probable ones in its place."""
    found = token.logprob
    alternatives = zip(found.top_token_ids, found.top_logprobs, strict=True) if found else ()
    return {
        "token_id": token.token_id,
        "text": token.text,
        "logprob": found.logprob if found else None,
        "most_probable": [{"token_id": token_id, "logprob": value} for token_id, value in alternatives],
    }


def figures(result: Result, options: RequestOptions) -> str:
    """The last line: how many tokens, how fast, what speculation did, and the seed that replays it."""
    speculation = result.speculation
    if speculation.draft_tokens:
        guesses = f"acceptance rate {speculation.acceptance_rate:.2f}, "
        guesses += f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
    elif options.no_speculation or options.draft_count == "0":
        guesses = "no guesses, as asked"
    elif parse_draft_count(options.draft_count) is None:
        # As far as the client can know.
        guesses = "no guesses (auto expected none to pay)"
    else:
        guesses = "no guesses (nobody had one)"
    parts = [
        _counted(result.completion_tokens, "token"),
        f"{result.tokens_per_second:.0f} tokens/s",
        _counted(speculation.rounds, "round"),
        guesses,
        _counted(speculation.fallback_rounds, "fallback round"),
        *(
            f"{each.drafter or 'draft'} {each.accepted_tokens} of {each.draft_tokens} guesses kept"
            for each in (speculation.drafters if len(speculation.drafters) > 1 else ())
        ),
        f"seed {result.seed}",
        *rule_words(result.acceptance),
    ]
    if result.target_reopens:
        parts.append(f"{result.target_reopens} times opened again on a target")
    if len(result.numerics_ids) > 1:
        # Only then the seed does not repeat the text.
        parts.append(f"moved between the numerics {' and '.join(result.numerics_ids)}")
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def rule_words(acceptance: Acceptance) -> list[str]:
    """The rule that decided, its settings, and whether the answer is another one than the target's; empty for match."""
    if acceptance.rule is Rule.MATCH:
        return []
    settings = " and ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in acceptance.settings.items())
    words = f"rule {acceptance.rule}" + (f" with {settings}" if settings else "")
    return [words if acceptance.rule.is_exact else f"{words}: does not follow the target's distribution"]


def logprob_table(prompt: Sequence[PromptToken], tokens: Sequence[GeneratedToken]) -> Table:
    """Table with a row for each token, the prompt's dim; alternatives are ids, because their texts are not sent."""
    table = Table("token", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", justify="right")
    table.add_column("logprob", justify="right")
    rows: list[PromptToken | GeneratedToken] = [*prompt, *tokens]
    if any(each.logprob and each.logprob.top_token_ids for each in rows):
        table.add_column("most probable")
    for place, each in enumerate(rows):
        found = each.logprob
        number, alternatives = f"{found.logprob:.3f}" if found else "", ""
        if found:
            pairs = zip(found.top_token_ids, found.top_logprobs, strict=True)
            alternatives = "  ".join(f"{token_id} {value:.3f}" for token_id, value in pairs)
        cells = (repr(each.text.translate(CONTROL_PICTURES)), str(each.token_id), number, alternatives)
        table.add_row(*map(Text, cells[: len(table.columns)]), style="dim" if place < len(prompt) else "")
    return table
