"""The table of `outrider up`, drawn again and again. Computes nothing and asks nobody."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.doctor.report import gibibytes
from outrider.cli.services import ServiceView, memory_bytes
from outrider.supervisor import State

# The word tells it, the colour only helps.
STYLES = {State.SERVING: "green", State.STARTING: "yellow", State.DIED: "bold red", State.STOPPED: "dim"}


def status_table(services: Iterable[ServiceView], lines: Sequence[str], page: str | None) -> RenderableType:
    """One row a process, and below it the lines and how to end it, unless it has ended. Fits into 80 columns."""
    table = Table("service", "state", "address", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("pid", "restarts", "memory"):
        table.add_column(name, justify="right")
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=16)
    shown = list(services)
    for each in shown:
        table.add_row(*_cells(each))
    if all(each.state is State.STOPPED for each in shown):
        return table
    below = [Text(line, overflow="ellipsis") for line in lines]
    hint = f"Ctrl-C stops it. The page: {page}" if page else "Ctrl-C stops it."
    return Group(table, *below, Text(hint, "dim"))


def _cells(view: ServiceView) -> tuple[Text | str, ...]:
    used = memory_bytes(view.pid)
    return (
        view.name,
        Text(view.state, STYLES[view.state]),
        view.address,
        str(view.pid or ""),
        str(view.restarts),
        gibibytes(used) if used else "",
        Text(view.model),
    )
