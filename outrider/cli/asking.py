"""What a request can ask for, as groups of options; None leaves a field to the gateway. Knows no protobuf.

Each group is what the command line is parsed into; `chat` takes all of them but the last.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from outrider.cli.parsing import INT32_MAX, INT64_MAX, INT64_MIN, each, text, texts
from outrider.parameters import MAX_LOGPROB_COUNT, MAX_SAMPLES, Rule
from outrider.process.options import between

SystemMessage = Annotated[
    str,
    typer.Option("--system", help="System message of the conversation.", metavar="TEXT", callback=text),
]
JsonTurns = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object a turn instead of the text.", rich_help_panel="What is shown"),
]

# Each has a place of its own in the help.
_answer = partial(typer.Option, rich_help_panel="The answer")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_report = partial(typer.Option, rich_help_panel="What is shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How long the answer may be, what ends it, what it must not say, and what makes it this one."""

    max_tokens: Annotated[
        int | None,
        _answer(
            help="Most tokens to generate. Default: 128, or what the context leaves.",
            metavar="N",
            callback=between(1, INT32_MAX),
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        _answer(help="No end before this many tokens. Default: 0.", metavar="N", callback=between(0, INT32_MAX)),
    ] = None
    ignore_eos: Annotated[bool, _answer("--ignore-eos", help="Take the end of sequence for an ordinary token.")] = False
    stop: Annotated[
        list[str] | None,
        _answer(
            help="Text that ends the output, without being part of it. At most 8 times.",
            metavar="TEXT",
            callback=texts,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _answer(
            "--stop-token-id",
            help="Token that ends the output, and is its last. At most 64 times.",
            metavar="ID",
            callback=each(between(0, INT32_MAX)),
        ),
    ] = None
    banned_words: Annotated[
        list[str] | None,
        _answer(
            "--ban",
            help="Word that must not occur, with or without a space before it. At most 64 times.",
            metavar="WORD",
            callback=texts,
        ),
    ] = None
    seed: Annotated[
        int | None,
        _answer(
            help="Seed of the noise. Default: a random one, named at the end.",
            metavar="N",
            callback=between(INT64_MIN, INT64_MAX),
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        _answer(
            help="Only requests with the same salt share what is cached of equal beginnings. Default: none.",
            metavar="TEXT",
            callback=text,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How logits become a distribution."""

    temperature: Annotated[
        float | None,
        _sampling(help="Divisor of the logits, 0 to 100; 0 takes the most probable token. Default: 1.", metavar="X"),
    ] = None
    top_k: Annotated[
        int | None,
        _sampling(
            help="Number of most probable tokens kept; 0 keeps all. Default: 0.",
            metavar="N",
            callback=between(0, INT32_MAX),
        ),
    ] = None
    top_p: Annotated[
        float | None, _sampling(help="Probability mass kept, above 0 and up to 1. Default: 1.", metavar="X")
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(help="Least probability kept, as a share of the largest one, 0 to 1. Default: 0.", metavar="X"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling(help="Divides the logits of tokens that occurred, above 0 and up to 100. Default: 1.", metavar="X"),
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling(help="Lowers the logits of tokens in the output, -2 to 2. Default: 0.", metavar="X")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling(help="The same for each time that the token occurred, -2 to 2. Default: 0.", metavar="X"),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling(help="Added to the logit of a token, -100 to 100. At most 300 times.", metavar="ID=BIAS"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether the draft guesses, how, and which guesses are kept."""

    no_speculation: Annotated[
        bool, _speculation("--no-speculation", help="Decode plainly; with match the tokens are the same.")
    ] = False
    draft_count: Annotated[
        str | None, _speculation(help="Draft tokens a round. Default: auto, the gateway chooses.", metavar="N|auto")
    ] = None
    rule: Annotated[
        Rule | None,
        _speculation(
            help="How the target accepts: match gives the tokens of plain decoding, ratio and block follow its "
            "distribution, lenient and typical do not. Default: match.",
            metavar="RULE",
        ),
    ] = None
    lenience: Annotated[
        float | None,
        _speculation(
            help="lenient: factor of the draft's probabilities, above 0 and up to 1. Default: 0.5.", metavar="X"
        ),
    ] = None
    typical_epsilon: Annotated[
        float | None,
        _speculation(help="typical: probability that suffices, above 0 and up to 1. Default: 0.09.", metavar="X"),
    ] = None
    typical_delta: Annotated[
        float | None,
        _speculation(
            help="typical: share of exp(-entropy) that suffices, above 0 and up to 1. Default: 0.3.", metavar="X"
        ),
    ] = None
    drafter: Annotated[
        str | None,
        _speculation(
            help="How the draft guesses: model, coupled or sampled. Default: its own choice.",
            metavar="NAME",
            callback=text,
        ),
    ] = None
    show_rejected: Annotated[
        bool | None,
        _speculation(
            "--show-rejected",
            help="Also the guesses that were not kept: struck through in a terminal, and each round with --json.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How many answers there are, and what comes with them."""

    samples: Annotated[
        int | None,
        _answer(
            "--samples",
            "-n",
            help="Number of answers, 1 to 8, each with a seed of its own. Default: 1.",
            metavar="N",
            callback=between(1, MAX_SAMPLES),
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        _report(
            help="Each token's log-probability, and those of the N most probable ones there, 0 to 20.",
            metavar="N",
            callback=between(0, MAX_LOGPROB_COUNT),
        ),
    ] = None
    echo: Annotated[bool, _report("--echo", help="The same of the prompt's tokens; needs --logprobs.")] = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: str
    answer: Answer = field(default_factory=Answer)
    sampling: Sampling = field(default_factory=Sampling)
    speculation: Speculation = field(default_factory=Speculation)
    report: Report = field(default_factory=Report)

    @property
    def sample_count(self) -> int:
        """Answers that will come."""
        return self.report.samples or 1
