"""Settings of a service with a model, and its command line; the same for draft and target. Knows no torch.

Every flag has a variable OUTRIDER_*, and the flag wins.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from outrider.process import LogLevel, LogLevelFlag, Service, StopWithStdinFlag, run_service

DEFAULT_LEASE_S = 60.0


def available_cpus() -> int:
    """CPUs that this process may use, at least 1."""
    return len(os.sched_getaffinity(0))


class Dtype(StrEnum):
    """Types of the weights in memory."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class ModelServiceSettings:
    """What an operator can set. kv_tokens None leaves the size of the cache to the engine."""

    model: str
    listen: str = "127.0.0.1:0"
    device: str = "cpu"
    dtype: str = Dtype.BFLOAT16.value
    threads: int = 1
    kv_tokens: int | None = None
    lease_s: float = DEFAULT_LEASE_S


Model = Annotated[str, typer.Option(envvar="OUTRIDER_MODEL", help="Folder or hub id of the model.")]
Listen = Annotated[str, typer.Option(envvar="OUTRIDER_LISTEN", help="HOST:PORT; port 0 takes a free one.")]
Device = Annotated[str, typer.Option(envvar="OUTRIDER_DEVICE", help="cpu or cuda:N.")]
DtypeFlag = Annotated[Dtype, typer.Option(envvar="OUTRIDER_DTYPE", help="Type of the weights in memory.")]
Threads = Annotated[int, typer.Option(min=1, envvar="OUTRIDER_THREADS", help="Compute threads.")]
KvTokens = Annotated[
    int | None, typer.Option(min=1, envvar="OUTRIDER_KV_TOKENS", help="Tokens that the cache holds; default 512 MiB.")
]
LeaseSeconds = Annotated[
    float,
    typer.Option(min=0.0, envvar="OUTRIDER_LEASE_SECONDS", help="How long a session outlives a broken stream."),
]


def model_service_app(role: str, port: int, start: Callable[[ModelServiceSettings], Awaitable[Service]]) -> typer.Typer:
    """The command line of `python -m {role}_service`, which runs what `start` starts."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=f"Runs the {role} service.")
    def serve(  # noqa: PLR0913 - one parameter for each flag
        *,
        model: Model,
        listen: Listen = f"127.0.0.1:{port}",
        device: Device = "cpu",
        dtype: DtypeFlag = Dtype.BFLOAT16,
        threads: Threads = available_cpus(),  # noqa: B008 - does not change while the process runs
        kv_tokens: KvTokens = None,
        lease_seconds: LeaseSeconds = DEFAULT_LEASE_S,
        log_level: LogLevelFlag = LogLevel.INFO,
        stop_with_stdin: StopWithStdinFlag = False,
    ) -> None:
        settings = ModelServiceSettings(model, listen, device, dtype.value, threads, kv_tokens, lease_seconds)
        run_service(role, lambda: start(settings), log_level=log_level.value, stop_with_stdin=stop_with_stdin)

    return app
