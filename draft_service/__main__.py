"""`python -m draft_service`: see --help."""

from outrider.process.imports import poll_inline, uncollected

poll_inline()

with uncollected():
    from draft_service.server import DraftSettings, start
    from outrider.process.options import grouped, run_app, service_app
    from outrider.process.run import run_service

app = service_app()


@app.command(help="Runs the draft service.")
@grouped
def serve(*, settings: DraftSettings) -> None:
    """Serves until a signal stops it."""
    run_service("draft", start, settings)


if __name__ == "__main__":
    run_app(app)
