"""`python -m gateway.worker_process`: one of several gateways on the same addresses, as `supervisor` starts it."""

from dataclasses import replace
from typing import Annotated

import typer

from outrider.process.imports import poll_inline, uncollected

poll_inline()

with uncollected():
    from gateway.server import start
    from gateway.settings import GatewaySettings
    from outrider.process.options import grouped, run_app, service_app
    from outrider.process.run import run_service

app = service_app()


@app.command(help="Runs one worker of a gateway.")
@grouped
def serve(
    *,
    settings: GatewaySettings,
    number: Annotated[int, typer.Option(help="Which worker it is, from 0.")],
    figures: Annotated[str, typer.Option(help="Where the figures of all workers are.")],
    usage: Annotated[str, typer.Option(help="Folder with what all workers used of the keys' limits.")],
) -> None:
    """Serves until a signal stops it."""
    settings = replace(settings, figures_of_all=figures, usage_of_all=usage, worker=number)
    run_service("gateway", start, settings, worker=number)


if __name__ == "__main__":
    run_app(app)
