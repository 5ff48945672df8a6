"""`outrider bench`: measurements, each in a process of its own, because what measures may need torch.

The options of a measurement are declared where it measures; here they only pass through.
"""

import typer

from outrider.cli.modules import Extra, run_module

PASSING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(help="Measures this machine and the whole stack on it.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measures this machine and the whole stack on it."""


@app.command(context_settings=PASSING_ON, add_help_option=False)
def speed(context: typer.Context) -> None:
    """Measures how fast a model reads prompts and answers, with and without speculation, in five lines."""
    run_module("outrider.cli.bench.speed", context.args)


@app.command(context_settings=PASSING_ON, add_help_option=False)
def rounds(context: typer.Context) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    run_module("outrider.cli.bench.rounds", context.args, *Extra)


@app.command(context_settings=PASSING_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Compares a gateway with itself under loads, with numbers of draft tokens by turns: speed, gaps, CPU, answers."""
    run_module("outrider.cli.bench.load", context.args)


@app.command(context_settings=PASSING_ON, add_help_option=False)
def timeline(context: typer.Context) -> None:
    """Draws when draft, wire and target were busy in some rounds of one answer, as lanes."""
    run_module("outrider.cli.bench.timeline", context.args)
