"""`python -m gateway`: see --help. Never imports torch."""

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.process.options import grouped, run_app, service_app
from outrider.process.run import run_service

app = service_app()


@app.command(help="Runs the gateway.")
@grouped
def serve(*, settings: GatewaySettings) -> None:
    """Serves until it is told to stop."""
    run_service("gateway", start, settings)


if __name__ == "__main__":
    run_app(app)
