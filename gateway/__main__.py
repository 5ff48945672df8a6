"""`python -m gateway`: the command line. Every flag has a variable OUTRIDER_*; the flag wins. Never imports torch."""

from typing import Annotated

import typer

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.command_line import between, run_app, service_app
from outrider.process import DrainFlag, LogLevel, LogLevelFlag, StopWithStdinFlag, run_service
from outrider.rpc import DRAIN_S

Target = Annotated[
    str, typer.Option(envvar="OUTRIDER_TARGET", help="HOST:PORT of the target; several with commas, the best first.")
]
Tokenizer = Annotated[str, typer.Option(envvar="OUTRIDER_TOKENIZER", help="Folder or hub id of the target's model.")]
Draft = Annotated[str, typer.Option(envvar="OUTRIDER_DRAFT", help="HOST:PORT of the draft, or several, or empty.")]
Listen = Annotated[str, typer.Option(envvar="OUTRIDER_LISTEN", help="HOST:PORT; port 0 takes a free one.")]
MaxRequests = Annotated[
    int,
    typer.Option(
        callback=between(1), envvar="OUTRIDER_MAX_REQUESTS", help="Requests at a time; more are turned away at once."
    ),
]
TargetWait = Annotated[
    float,
    typer.Option(
        callback=between(0), envvar="OUTRIDER_TARGET_WAIT_SECONDS", help="How long to wait for the target at start."
    ),
]
DraftWait = Annotated[
    float,
    typer.Option(
        callback=between(0), envvar="OUTRIDER_DRAFT_WAIT_SECONDS", help="How long to wait for the draft at start."
    ),
]
TargetStall = Annotated[
    float,
    typer.Option(
        callback=between(0.1),
        envvar="OUTRIDER_TARGET_STALL_SECONDS",
        help="How long a target's device may finish nothing before the target counts as hung.",
    ),
]
RebuildBudget = Annotated[
    float,
    typer.Option(
        callback=between(0),
        envvar="OUTRIDER_REBUILD_BUDGET_SECONDS",
        help="How long a request waits for a target that is away before it ends with UNAVAILABLE.",
    ),
]
ClientStall = Annotated[
    float,
    typer.Option(
        callback=between(0.1),
        envvar="OUTRIDER_CLIENT_STALL_SECONDS",
        help="How long a client may read nothing before its request ends.",
    ),
]
AuditFraction = Annotated[
    float,
    typer.Option(
        callback=between(0, 1),
        envvar="OUTRIDER_AUDIT_FRACTION",
        help="Share of the requests under `match` that are decoded again, plainly, and compared.",
    ),
]
MetricsListen = Annotated[
    str,
    typer.Option(
        envvar="OUTRIDER_METRICS_LISTEN", help="HOST:PORT for Prometheus metrics; port 0 takes a free one. Empty: none."
    ),
]

app = service_app()


@app.command(help="Runs the gateway.")
def serve(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    target: Target,
    tokenizer: Tokenizer,
    draft: Draft = "",
    listen: Listen = "127.0.0.1:50050",
    max_requests: MaxRequests = 256,
    target_wait_seconds: TargetWait = 300.0,
    draft_wait_seconds: DraftWait = 5.0,
    target_stall_seconds: TargetStall = 30.0,
    rebuild_budget_seconds: RebuildBudget = 30.0,
    client_stall_seconds: ClientStall = 30.0,
    audit_fraction: AuditFraction = 0.0,
    metrics_listen: MetricsListen = "",
    drain_seconds: DrainFlag = DRAIN_S,
    log_level: LogLevelFlag = LogLevel.INFO,
    stop_with_stdin: StopWithStdinFlag = False,
) -> None:
    """Serves until it is told to stop."""
    settings = GatewaySettings(
        target=target,
        tokenizer=tokenizer,
        draft=draft,
        listen=listen,
        max_requests=max_requests,
        target_wait_s=target_wait_seconds,
        draft_wait_s=draft_wait_seconds,
        stall_s=target_stall_seconds,
        rebuild_budget_s=rebuild_budget_seconds,
        client_stall_s=client_stall_seconds,
        audit_fraction=audit_fraction,
        metrics_listen=metrics_listen,
    )
    run_service(
        "gateway",
        lambda: start(settings),
        log_level=log_level.value,
        stop_with_stdin=stop_with_stdin,
        drain_s=drain_seconds,
    )


if __name__ == "__main__":
    run_app(app)
