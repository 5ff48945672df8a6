"""Settings of a service with a model, and its command line; the same for draft and target. Knows no torch.

Every flag has a variable OUTRIDER_*, and the flag wins.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.command_line import above, between, service_app
from outrider.errors import ModelRefused
from outrider.model_names import parse
from outrider.option_groups import grouped
from outrider.process import DrainFlag, LogLevel, LogLevelFlag, Service, StopWithStdinFlag, run_service
from outrider.rpc.channels import DRAIN_S, check_address

DEFAULT_LEASE_S = 60.0
# A forward of 512 rows of a large model on a CPU may take a minute.
DEFAULT_STALL_S = 120.0
# As many as the compiled kernels' thread pool takes.
MAX_THREADS = 256


def available_cpus() -> int:
    """CPUs that this process may use, at least 1, and not more than threads can be used."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def check_model(option: str, model: str, role: str = "target") -> str:
    """Returns a model that may be a folder or a hub id, and a sized one of this role by its explicit name.

    Raises ModelRefused about a path that is no folder and an unknown preset. The engine says so too, but knows the
    model only, and not by which option it was named.
    """
    sized = parse(model, role)
    if sized is not None:
        return sized.name
    # Unlike Path.expanduser, this leaves the home of a user that does not exist as it is.
    path = Path(os.path.expanduser(model))
    # And os.path finds nothing under a name that is too long, where Path raises.
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or os.path.exists(path)
    if not model or (looks_like_path and not os.path.isdir(path)):
        raise ModelRefused(f"{option} is {model!r}, but must be a folder or the id of a model on the hub", model=model)
    return model


class Dtype(StrEnum):
    """Types of the weights in memory."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class ModelServiceSettings:
    """What an operator can set. kv_tokens None leaves the size of the cache to the engine.

    Raises InvalidRequest about an address that is not HOST:PORT.
    """

    model: str
    listen: str = "127.0.0.1:0"
    device: str = "cpu"
    dtype: str = Dtype.BFLOAT16.value
    threads: int = 1
    kv_tokens: int | None = None
    lease_s: float = DEFAULT_LEASE_S
    stall_s: float = DEFAULT_STALL_S
    prefix_cache: bool = True
    metrics_listen: str = ""
    """Where metrics are served; empty for nowhere."""
    vllm_metric_names: bool = False

    def __post_init__(self) -> None:
        check_address("listen", self.listen, least_port=0)
        if self.metrics_listen:
            check_address("metrics_listen", self.metrics_listen, least_port=0)


Start = Callable[[ModelServiceSettings], Awaitable[Service]]
Model = Annotated[str, typer.Option(envvar="OUTRIDER_MODEL", help="Folder or hub id of the model, or sized:PRESET.")]
Listen = Annotated[str, typer.Option(envvar="OUTRIDER_LISTEN", help="HOST:PORT; port 0 takes a free one.")]
Device = Annotated[str, typer.Option(envvar="OUTRIDER_DEVICE", help="cpu or cuda:N.")]
DtypeFlag = Annotated[Dtype, typer.Option(envvar="OUTRIDER_DTYPE", help="Type of the weights in memory.")]
Threads = Annotated[
    int, typer.Option(callback=between(1, MAX_THREADS), envvar="OUTRIDER_THREADS", help="Compute threads.")
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        callback=between(1),
        envvar="OUTRIDER_KV_TOKENS",
        help="Tokens that the cache holds; default 512 MiB, or one context.",
    ),
]
LeaseSeconds = Annotated[
    float,
    typer.Option(
        callback=between(0), envvar="OUTRIDER_LEASE_SECONDS", help="How long a session outlives a broken stream."
    ),
]
StallSeconds = Annotated[
    float,
    typer.Option(
        callback=above(0),
        envvar="OUTRIDER_STALL_SECONDS",
        help="A device that has work and finishes none of it for this long is given up, and the process exits with 70.",
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        envvar="OUTRIDER_PREFIX_CACHE",
        help="Keep what is cached of ended sessions for those that begin with the same tokens.",
    ),
]


MetricsListen = Annotated[
    str,
    typer.Option(
        envvar="OUTRIDER_METRICS_LISTEN", help="HOST:PORT for Prometheus metrics; port 0 takes a free one. Empty: none."
    ),
]
VllmMetricNames = Annotated[
    bool,
    typer.Option("--vllm-metric-names", envvar="OUTRIDER_VLLM_METRIC_NAMES", help="Metrics also as `vllm:` names."),
]


@dataclass(frozen=True, slots=True)
class ServiceFlags:
    """The flags that every service with a model has, beside its model and its address."""

    device: Device = "cpu"
    dtype: DtypeFlag = Dtype.BFLOAT16
    threads: Threads = available_cpus()  # noqa: RUF009 - does not change while the process runs
    kv_tokens: KvTokens = None
    lease_seconds: LeaseSeconds = DEFAULT_LEASE_S
    stall_seconds: StallSeconds = DEFAULT_STALL_S
    prefix_cache: PrefixCache = True
    metrics_listen: MetricsListen = ""
    vllm_metric_names: VllmMetricNames = False
    drain_seconds: DrainFlag = DRAIN_S
    log_level: LogLevelFlag = LogLevel.INFO
    stop_with_stdin: StopWithStdinFlag = False

    def run(self, role: str, model: str, listen: str, start: Start) -> None:
        """Runs what `start` starts until it ends; raises ModelRefused, and InvalidRequest about `listen`."""
        settings = ModelServiceSettings(
            check_model("--model", model, role),
            listen,
            self.device,
            self.dtype.value,
            self.threads,
            self.kv_tokens,
            self.lease_seconds,
            self.stall_seconds,
            self.prefix_cache,
            self.metrics_listen,
            self.vllm_metric_names,
        )
        run_service(
            role,
            partial(start, settings),
            log_level=self.log_level.value,
            stop_with_stdin=self.stop_with_stdin,
            drain_s=self.drain_seconds,
        )


def model_service_app(role: str, port: int, start: Start) -> typer.Typer:
    """The command line of `python -m {role}_service`, which runs what `start` starts."""
    app = service_app()

    @app.command(help=f"Runs the {role} service.")
    @grouped
    def serve(*, model: Model, listen: Listen = f"127.0.0.1:{port}", flags: ServiceFlags) -> None:
        flags.run(role, model, listen, start)

    return app
