"""`python -m gateway`: the command line. Never imports torch."""

from gateway.flags import Bounds, ProcessFlags, Services, Surfaces, Target, Tokenizer, settings_from
from gateway.server import start
from outrider.command_line import run_app, service_app
from outrider.option_groups import grouped
from outrider.process import run_service

app = service_app()


@app.command(help="Runs the gateway.")
@grouped
def serve(
    *,
    target: Target,
    tokenizer: Tokenizer,
    services: Services,
    surfaces: Surfaces,
    bounds: Bounds,
    process: ProcessFlags,
) -> None:
    """Serves until it is told to stop."""
    settings = settings_from(target, tokenizer, services, surfaces, bounds)
    run_service(
        "gateway",
        lambda: start(settings),
        log_level=process.log_level.value,
        stop_with_stdin=process.stop_with_stdin,
        drain_s=process.drain_seconds,
    )


if __name__ == "__main__":
    run_app(app)
