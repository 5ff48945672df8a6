"""The command line of `python -m draft_service`: that of any service with a model, and the size of laws."""

from functools import partial
from typing import Annotated

import typer

from draft_service.server import start
from outrider.command_line import between, service_app
from outrider.engine.quantise import DEFAULT_TOP_N, MAX_TOP_N
from outrider.model_service_flags import (
    DEFAULT_LEASE_S,
    DEFAULT_STALL_S,
    Device,
    Dtype,
    DtypeFlag,
    KvTokens,
    LeaseSeconds,
    Listen,
    Model,
    ModelServiceSettings,
    StallSeconds,
    Threads,
    available_cpus,
    check_model,
)
from outrider.process import DrainFlag, LogLevel, LogLevelFlag, StopWithStdinFlag, run_service
from outrider.rpc import DRAIN_S

TopN = Annotated[
    int,
    typer.Option(
        callback=between(1, MAX_TOP_N),
        envvar="OUTRIDER_TOP_N",
        help="Tokens of the law that a guess is drawn from and sent with, where a rule needs it.",
    ),
]


def draft_service_app() -> typer.Typer:
    """As outrider.model_service_flags.model_service_app, whose flags stand here again: typer reads one signature."""
    app = service_app()

    @app.command(help="Runs the draft service.")
    def serve(  # noqa: PLR0913 - one parameter for each flag
        *,
        model: Model,
        listen: Listen = "127.0.0.1:50051",
        device: Device = "cpu",
        dtype: DtypeFlag = Dtype.BFLOAT16,
        threads: Threads = available_cpus(),  # noqa: B008 - does not change while the process runs
        kv_tokens: KvTokens = None,
        top_n: TopN = DEFAULT_TOP_N,
        lease_seconds: LeaseSeconds = DEFAULT_LEASE_S,
        stall_seconds: StallSeconds = DEFAULT_STALL_S,
        drain_seconds: DrainFlag = DRAIN_S,
        log_level: LogLevelFlag = LogLevel.INFO,
        stop_with_stdin: StopWithStdinFlag = False,
    ) -> None:
        settings = ModelServiceSettings(
            check_model("--model", model, "draft"),
            listen,
            device,
            dtype.value,
            threads,
            kv_tokens,
            lease_seconds,
            stall_seconds,
        )
        run_service(
            "draft",
            partial(start, settings, top_n),
            log_level=log_level.value,
            stop_with_stdin=stop_with_stdin,
            drain_s=drain_seconds,
        )

    return app
