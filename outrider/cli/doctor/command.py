"""The options of `outrider doctor`, and from them to checks. Knows nothing about how a check is carried out."""

import sys
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version

from rich.console import Console

from outrider.cli.doctor.checkup import Checks, Machine, check_gateway, check_machine, examining
from outrider.cli.doctor.findings import Finding
from outrider.cli.doctor.report import JsonReport, PlainReport, Report, TerminalReport
from outrider.cli.output import is_rich
from outrider.cli.running import Interrupts, run


def choose_report(*, as_json: bool) -> Report:
    """JSON when asked for; otherwise a table in a terminal, and lines into a pipe or file."""
    if as_json:
        return JsonReport(sys.stdout, version("outrider"))
    if is_rich(sys.stdout):
        return TerminalReport(Console(highlight=False))
    return PlainReport(sys.stdout)


def examine_machine(machine: Machine, *, as_json: bool) -> int:
    """Runs the checks of this machine and returns the exit code."""
    return _examine(partial(check_machine, machine), as_json=as_json)


def examine_gateway(address: str, rest_address: str | None, *, as_json: bool) -> int:
    """Runs the checks of a gateway and returns the exit code."""

    def checks(_: Interrupts, report: Report) -> AsyncIterator[Finding]:
        return check_gateway(address, rest_address, version("outrider"), report)

    return _examine(checks, as_json=as_json)


def _examine(checks: Checks, *, as_json: bool) -> int:
    codes: list[int] = []
    run(examining(checks, choose_report(as_json=as_json), codes))
    return codes[0]
