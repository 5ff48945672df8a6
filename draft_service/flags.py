"""The command line of `python -m draft_service`: that of any service with a model, and the size of laws."""

from functools import partial
from typing import Annotated

import typer

from draft_service.server import start
from outrider.command_line import between, service_app
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, MAX_TOP_N
from outrider.model_service_flags import Listen, Model, ServiceFlags
from outrider.option_groups import grouped

TopN = Annotated[
    int,
    typer.Option(
        callback=between(1, MAX_TOP_N),
        envvar="OUTRIDER_TOP_N",
        help="Tokens of the law that a guess is drawn from and sent with, where a rule needs it.",
    ),
]


def draft_service_app() -> typer.Typer:
    """As outrider.model_service_flags.model_service_app, with a flag more."""
    app = service_app()

    @app.command(help="Runs the draft service.")
    @grouped
    def serve(
        *, model: Model, listen: Listen = "127.0.0.1:50051", top_n: TopN = DEFAULT_TOP_N, flags: ServiceFlags
    ) -> None:
        flags.run("draft", model, listen, partial(start, top_n=top_n))

    return app
