"""`python -m target_service`: see --help."""

from outrider.process.imports import poll_inline, uncollected

poll_inline()

with uncollected():
    from outrider.process.options import grouped, run_app, service_app
    from outrider.process.run import run_service
    from target_service.server import TargetSettings, start

app = service_app()


@app.command(help="Runs the target service.")
@grouped
def serve(*, settings: TargetSettings) -> None:
    """Serves until a signal stops it."""
    run_service("target", start, settings)


if __name__ == "__main__":
    run_app(app)
