"""The options that are not about a request: models, where they run, ports. Knows nothing about what the commands do."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from outrider.cli import version
from outrider.command_line import between
from outrider.model_service_flags import MAX_THREADS, Dtype
from outrider.rpc.messages import MAX_SUPPORT

REST_PORT, GATEWAY_PORT, DRAFT_PORT, TARGET_PORT = 8080, 50050, 50051, 50052

_models = partial(typer.Option, rich_help_panel="The models")
_machine = partial(typer.Option, rich_help_panel="The machine")

Prompt = Annotated[
    str, typer.Argument(help="Text to continue; - reads it from standard input.", metavar="PROMPT", show_default=False)
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Gateway to call. Default: start one with its services, and stop them again.", metavar="HOST:PORT"
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object at the end instead of the text.", rich_help_panel="What is shown"
    ),
]
GatewayAddress = Annotated[
    str | None,
    typer.Option(help="Gateway to check, instead of this machine.", metavar="HOST:PORT", show_default=False),
]
RestAddress = Annotated[
    str | None,
    typer.Option(help="Where that gateway answers REST, which tells its version.", metavar="HOST:PORT"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Load no model and start no process.")]
JsonReport = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
JsonEvents = Annotated[bool, typer.Option("--json", help="Print one JSON object for each event instead of text.")]
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=version.eager)
]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Start no draft service: plain decoding.")]
Story = Annotated[bool, typer.Option("--story", help="Stream one story when everything is up, as a proof of life.")]
Target = Annotated[
    str | None,
    _models(
        help="Folder or hub id of the model that decides, or sized:PRESET. Default: the embedded one.",
        metavar="MODEL",
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    _models(
        help="Folder or hub id of the model that guesses, or sized:PRESET. Default: the embedded one, if the target is "
        "embedded or sized.",
        metavar="MODEL",
        show_default=False,
    ),
]
DtypeOption = Annotated[Dtype | None, _models("--dtype", help="Type of the weights. Default: bfloat16.")]
Threads = Annotated[
    int | None,
    _machine(
        help="Compute threads of the target. Default: the number of CPUs.",
        metavar="N",
        callback=between(1, MAX_THREADS),
    ),
]
DraftThreads = Annotated[
    int, _machine(help="Compute threads of the draft.", metavar="N", callback=between(1, MAX_THREADS))
]
_port = partial(_machine, metavar="PORT", callback=between(0, 65535))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Which two models are served, and how."""

    target: Target = None
    draft: Draft = None
    dtype: DtypeOption = None
    draft_dtype: Annotated[
        Dtype | None, _models("--draft-dtype", help="Type of the draft's weights. Default: that of the target.")
    ] = None
    top_n: Annotated[
        int | None,
        _models(
            help="Most probable tokens of a draft distribution that travel under ratio, block and lenient. Default: "
            "the draft service's own.",
            metavar="N",
            callback=between(1, MAX_SUPPORT),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What computes, and where the processes answer."""

    device: Annotated[str, _machine(help="Device of the target: cpu or cuda:N.", metavar="DEVICE")] = "cpu"
    draft_device: Annotated[
        str | None,
        _machine(help="Device of the draft. Default: that of the target.", metavar="DEVICE", show_default=False),
    ] = None
    threads: Threads = None
    draft_threads: DraftThreads = 1
    port: Annotated[int, _port(help="Port of the gateway; 0 takes a free one.")] = GATEWAY_PORT
    rest_port: Annotated[int, _port(help="Port of the gateway's REST and page; 0 takes a free one.")] = REST_PORT
    draft_port: Annotated[int, _port(help="Port of the draft service; 0 takes a free one.")] = DRAFT_PORT
    target_port: Annotated[int, _port(help="Port of the target service; 0 takes a free one.")] = TARGET_PORT
