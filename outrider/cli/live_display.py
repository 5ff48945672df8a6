"""What `outrider up` shows in a terminal: a table of the processes, drawn every second. Starts and stops nothing."""

import asyncio
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outrider.cli.display import Display, JsonDisplay, LinesDisplay, gateway_lines, page_of
from outrider.cli.doctor.checks import rest_text
from outrider.cli.gateway_counts import GatewayCounts, parse_counts, work_line
from outrider.cli.model_facts import ModelFacts, model_facts
from outrider.cli.running import note
from outrider.cli.services import Services
from outrider.cli.stack import Addresses
from outrider.cli.status_table import status_table
from outrider.cli.tables import model_table
from outrider.cli.terminal import is_rich
from outrider.errors import OutriderError
from outrider.supervisor import Change

REFRESH_S = 1.0
MAX_METRICS_BYTES = 1 << 20


def choose_display(*, as_json: bool) -> Display:
    """JSON when asked for; otherwise a table in a terminal, and lines into a pipe or file."""
    if as_json:
        return JsonDisplay(sys.stdout)
    if is_rich(sys.stdout):
        return TableDisplay(Console(highlight=False))
    return LinesDisplay(sys.stdout)


class TableDisplay:
    """A table of the processes that is drawn again every second, and the gateway's work below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._services = Services()
        self._addresses: Addresses | None = None
        self._counts: GatewayCounts | None = None
        self._counted_s = 0.0
        self._lines: list[str] = []
        self._live: Live | None = None

    def observe(self, change: Change) -> None:
        """Draws it at once."""
        self._services.apply(change)
        self._draw()

    def report(self, sentence: str) -> None:
        """Prints it above the table, or where stderr goes."""
        self._say(sentence)

    def log(self, name: str, line: str) -> None:
        """Prints it above the table, or where stderr goes."""
        self._say(f"{name}: {line}")

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Prints models and addresses."""
        self._addresses = addresses
        for fact in facts:
            self._services[fact.role].model = fact.model
        page = page_of(addresses.rest)
        if page:
            self._console.print(Text(f"The page: {page}\n"), soft_wrap=True)
        self._console.print(model_table(facts, addresses.metrics))
        self._console.print(Text("\n".join(gateway_lines(addresses)) + "\n"), soft_wrap=True)

    async def run(self) -> None:
        """Draws the table until it is cancelled; what changes after that is still drawn, until it is closed."""
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        try:
            while True:
                self._lines = await self._work()
                self._draw()
                await asyncio.sleep(REFRESH_S)
        finally:
            # Nobody will ask again, so they would grow old.
            self._lines = []

    def close(self) -> None:
        """Leaves the last state in the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        if self._live is not None and self._addresses is not None:
            page = page_of(self._services["gateway"].addresses.get("rest"))
            self._live.update(status_table(self._services, self._lines, page), refresh=True)

    async def _work(self) -> list[str]:
        """What the gateway does, where its metrics tell; else what the services hold."""
        if self._addresses is None:
            return []
        rest = self._services["gateway"].addresses.get("rest")
        text = await asyncio.to_thread(rest_text, rest, "/metrics", MAX_METRICS_BYTES) if rest else None
        counts = parse_counts(text) if text else None
        if counts is None:
            return await self._held(self._addresses)
        before, before_s = self._counts, self._counted_s
        self._counts, self._counted_s = counts, time.monotonic()
        return [f"gateway: {work_line(before, counts, self._counted_s - before_s)}"]

    @staticmethod
    async def _held(addresses: Addresses) -> list[str]:
        served = [address for address in (addresses.target, addresses.draft) if address]
        answers = await asyncio.gather(*(model_facts(address) for address in served), return_exceptions=True)
        faults = [each for each in answers if isinstance(each, BaseException) and not isinstance(each, OutriderError)]
        if faults:
            raise faults[0]
        return [
            f"{each.role}: {each.sessions} sessions, {each.blocks - each.free_blocks:,} of {each.blocks:,} blocks held"
            for each in answers
            if isinstance(each, ModelFacts)
        ]

    def _say(self, sentence: str) -> None:
        if sys.stderr.isatty():
            self._console.print(Text(sentence), soft_wrap=True)
        else:
            note(sentence)
