"""The command line of the gateway in groups, and the settings in it. Flags have variables OUTRIDER_*; the flag wins."""

from dataclasses import dataclass
from typing import Annotated

import typer

from gateway.settings import GatewaySettings, listed
from gateway.sites import Sites
from outrider.command_line import above, between
from outrider.process import DrainFlag, LogLevel, LogLevelFlag, StopWithStdinFlag
from outrider.rpc.channels import DRAIN_S

Target = Annotated[
    str, typer.Option(envvar="OUTRIDER_TARGET", help="HOST:PORT of the target; several with commas, the best first.")
]
Tokenizer = Annotated[str, typer.Option(envvar="OUTRIDER_TOKENIZER", help="Folder or hub id of the target's model.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services behind the gateway, and how long it has patience with them."""

    draft: Annotated[
        str, typer.Option(envvar="OUTRIDER_DRAFT", help="HOST:PORT of the draft, or several, or empty.")
    ] = ""
    target_wait_seconds: Annotated[
        float,
        typer.Option(
            callback=between(0), envvar="OUTRIDER_TARGET_WAIT_SECONDS", help="How long to wait for the target at start."
        ),
    ] = 300.0
    draft_wait_seconds: Annotated[
        float,
        typer.Option(
            callback=between(0), envvar="OUTRIDER_DRAFT_WAIT_SECONDS", help="How long to wait for the draft at start."
        ),
    ] = 5.0
    target_stall_seconds: Annotated[
        float,
        typer.Option(
            callback=between(0.1),
            envvar="OUTRIDER_TARGET_STALL_SECONDS",
            help="How long a target's device may finish nothing before the target counts as hung.",
        ),
    ] = 30.0
    rebuild_budget_seconds: Annotated[
        float,
        typer.Option(
            callback=between(0),
            envvar="OUTRIDER_REBUILD_BUDGET_SECONDS",
            help="How long a request waits for a target that is away before it ends with UNAVAILABLE.",
        ),
    ] = 30.0
    audit_fraction: Annotated[
        float,
        typer.Option(
            callback=between(0, 1),
            envvar="OUTRIDER_AUDIT_FRACTION",
            help="Share of the requests under `match` that are decoded again, plainly, and compared.",
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surfaces:
    """Where the gateway answers, and under which names."""

    listen: Annotated[
        str, typer.Option(envvar="OUTRIDER_LISTEN", help="HOST:PORT for gRPC; port 0 takes a free one.")
    ] = "127.0.0.1:50050"
    rest_listen: Annotated[
        str,
        typer.Option(
            envvar="OUTRIDER_REST_LISTEN", help="HOST:PORT for REST and the page; port 0 takes a free one. Empty: none."
        ),
    ] = "127.0.0.1:8080"
    reflection: Annotated[
        bool,
        typer.Option("--reflection", envvar="OUTRIDER_REFLECTION", help="Describe the gRPC services to whoever asks."),
    ] = False
    metrics_listen: Annotated[
        str,
        typer.Option(
            envvar="OUTRIDER_METRICS_LISTEN",
            help="HOST:PORT for Prometheus alone, beside REST's /metrics; port 0 takes a free one. Empty: none.",
        ),
    ] = ""
    served_model_name: Annotated[
        str,
        typer.Option(envvar="OUTRIDER_SERVED_MODEL_NAME", help="Name of the model to clients. Empty: the target's."),
    ] = ""
    cors_origins: Annotated[
        str,
        typer.Option(
            envvar="OUTRIDER_CORS_ORIGINS", help="Origins whose pages may call REST, with commas, or *. Empty: none."
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        typer.Option(
            envvar="OUTRIDER_ALLOWED_HOSTS",
            help="Names with a dot by which browsers call this gateway, with commas, *.DOMAIN, or *.",
        ),
    ] = ""
    vllm_metric_names: Annotated[
        bool,
        typer.Option("--vllm-metric-names", envvar="OUTRIDER_VLLM_METRIC_NAMES", help="Metrics also as `vllm:` names."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much the gateway takes on, and how long it waits for clients."""

    max_requests: Annotated[
        int, typer.Option(callback=between(1), envvar="OUTRIDER_MAX_REQUESTS", help="Samples that run at a time.")
    ] = 256
    max_queue: Annotated[
        int,
        typer.Option(
            callback=between(0),
            envvar="OUTRIDER_MAX_QUEUE",
            help="Requests that may wait; more are turned away at once.",
        ),
    ] = 64
    client_stall_seconds: Annotated[
        float,
        typer.Option(
            callback=between(0.1),
            envvar="OUTRIDER_CLIENT_STALL_SECONDS",
            help="How long a client may read nothing before its request ends.",
        ),
    ] = 30.0
    keep_alive_seconds: Annotated[
        float,
        typer.Option(
            callback=above(0),
            envvar="OUTRIDER_KEEP_ALIVE_SECONDS",
            help="Silence on a REST stream after which a comment is sent.",
        ),
    ] = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFlags:
    """What every service process has."""

    drain_seconds: DrainFlag = DRAIN_S
    log_level: LogLevelFlag = LogLevel.INFO
    stop_with_stdin: StopWithStdinFlag = False


def settings_from(
    target: str, tokenizer: str, services: Services, surfaces: Surfaces, bounds: Bounds
) -> GatewaySettings:
    """The settings of a command line. Raises InvalidRequest about an address that is not HOST:PORT."""
    return GatewaySettings(
        target=target,
        tokenizer=tokenizer,
        draft=services.draft,
        listen=surfaces.listen,
        max_requests=bounds.max_requests,
        target_wait_s=services.target_wait_seconds,
        draft_wait_s=services.draft_wait_seconds,
        stall_s=services.target_stall_seconds,
        rebuild_budget_s=services.rebuild_budget_seconds,
        client_stall_s=bounds.client_stall_seconds,
        audit_fraction=services.audit_fraction,
        metrics_listen=surfaces.metrics_listen,
        rest_listen=surfaces.rest_listen,
        reflection=surfaces.reflection,
        queue_len=bounds.max_queue,
        served_model_name=surfaces.served_model_name,
        sites=Sites(listed(surfaces.cors_origins), listed(surfaces.allowed_hosts)),
        vllm_metric_names=surfaces.vllm_metric_names,
        keep_alive_s=bounds.keep_alive_seconds,
    )
