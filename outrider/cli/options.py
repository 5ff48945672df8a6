"""The options of all commands: types, ranges, units and help texts. Knows nothing about what the commands do."""

from typing import Annotated

import typer

from outrider.cli.events import AUTO, DraftCount
from outrider.command_line import between
from outrider.errors import InvalidRequest
from outrider.model_service_flags import MAX_THREADS, Dtype

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def parse_draft_count(value: str | None) -> DraftCount:
    """A count, or AUTO; raises InvalidRequest about any other text."""
    if value is None or value == AUTO:
        return AUTO
    if not value.isascii() or not value.isdecimal() or int(value) > INT32_MAX:
        raise InvalidRequest("--draft-count", value, f"a number of tokens, or {AUTO}")
    return int(value)


Prompt = Annotated[
    str, typer.Argument(help="Text to continue; - reads it from standard input.", metavar="PROMPT", show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to generate. Default: 128, or what the context leaves.",
        metavar="N",
        callback=between(1, INT32_MAX),
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Divisor of the logits, 0 to 100; 0 takes the most probable token. Default: 1.", metavar="X"),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Number of most probable tokens kept; 0 keeps all. Default: 0.",
        metavar="N",
        callback=between(0, INT32_MAX),
    ),
]
TopP = Annotated[
    float | None, typer.Option(help="Probability mass kept, above 0 and up to 1. Default: 1.", metavar="X")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Least probability kept, as a share of the largest one, 0 to 1. Default: 0.", metavar="X"),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Divides the logits of tokens that occurred, above 0 and up to 100. Default: 1.", metavar="X"),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of the noise. Default: a random one, named at the end.",
        metavar="N",
        callback=between(INT64_MIN, INT64_MAX),
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the output, without being part of it. At most 8 times.", metavar="TEXT"),
]
DraftCountOption = Annotated[
    str | None,
    typer.Option("--draft-count", help="Draft tokens a round. Default: auto, the gateway chooses.", metavar="N|auto"),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Decode plainly; the tokens are the same.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the model that decides, or sized:PRESET. Default: the embedded one.",
        metavar="MODEL",
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the model that guesses, or sized:PRESET. Default: the embedded one, if the target is "
        "embedded or sized.",
        metavar="MODEL",
        show_default=False,
    ),
]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="Type of the weights. Default: bfloat16.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="Gateway to call. Default: start one with its services, and stop them again.", metavar="HOST:PORT"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Start no draft service: plain decoding.")]
Device = Annotated[str, typer.Option(help="Device of the target: cpu or cuda:N.", metavar="DEVICE")]
DraftDevice = Annotated[
    str | None,
    typer.Option(help="Device of the draft. Default: that of the target.", metavar="DEVICE", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Compute threads of the target. Default: the number of CPUs.",
        metavar="N",
        callback=between(1, MAX_THREADS),
    ),
]
DraftThreads = Annotated[
    int, typer.Option(help="Compute threads of the draft.", metavar="N", callback=between(1, MAX_THREADS))
]
Port = Annotated[
    int, typer.Option(help="Port of the gateway; 0 takes a free one.", metavar="PORT", callback=between(0, 65535))
]
DraftPort = Annotated[
    int, typer.Option(help="Port of the draft service; 0 takes a free one.", metavar="PORT", callback=between(0, 65535))
]
TargetPort = Annotated[
    int,
    typer.Option(help="Port of the target service; 0 takes a free one.", metavar="PORT", callback=between(0, 65535)),
]
Story = Annotated[bool, typer.Option("--story", help="Stream one story when everything is up, as a proof of life.")]
