"""`python -m gateway`: see --help. Never imports torch."""

from pkgutil import resolve_name

from outrider.process.imports import poll_inline, uncollected

poll_inline()

with uncollected():
    from gateway.settings import GatewaySettings
    from gateway.supervisor import Workers
    from outrider.process.options import grouped, run_app, service_app
    from outrider.process.run import run_service

# By its name: the process that only starts workers never loads what they serve with.
GATEWAY = "gateway.server:start"

app = service_app()


@app.command(help="Runs the gateway.")
@grouped
def serve(*, settings: GatewaySettings) -> None:
    """Serves until a signal stops it."""
    if settings.workers == 1:
        with uncollected():
            start = resolve_name(GATEWAY)
        run_service("gateway", start, settings)
    workers = Workers()
    run_service("gateway", workers.start, settings, urgent=workers.kill)


if __name__ == "__main__":
    run_app(app)
