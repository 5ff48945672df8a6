"""`outrider datastore`: texts to look up in, in a process of its own, because building needs numpy.

The options are declared in `gateway.lookup.datastore.command`; here they only pass through.
"""

import typer

from outrider.cli.bench.command import PASSING_ON
from outrider.cli.modules import Extra, run_module

COMMAND = "gateway.lookup.datastore.command"

app = typer.Typer(help="Makes datastores to look up in, and shows what is in them.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Makes datastores to look up in, and shows what is in them."""


@app.command(context_settings=PASSING_ON, add_help_option=False)
def build(context: typer.Context) -> None:
    """Builds a datastore from text files, .jsonl or standard input, for the tokens of one model."""
    run_module(COMMAND, ["build", *context.args], Extra.GATEWAY)


@app.command(context_settings=PASSING_ON, add_help_option=False)
def inspect(context: typer.Context) -> None:
    """Shows what a datastore holds, whether it is whole, and what it would propose after a text."""
    run_module(COMMAND, ["inspect", *context.args], Extra.GATEWAY)
