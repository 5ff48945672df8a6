"""What `outrider up` says while it runs: plain lines, or a JSON object for each event. Starts and stops nothing."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from outrider.cli.model_facts import ModelFacts
from outrider.cli.running import note
from outrider.cli.services import RESTARTED, Services, event_of
from outrider.cli.stack import Addresses
from outrider.cli.tables import model_line
from outrider.supervisor import Change, State


class Display(Protocol):
    """Shows what becomes of a stack."""

    def observe(self, change: Change) -> None:
        """A process has come into another state."""

    def report(self, sentence: str) -> None:
        """The supervisor has something to say about a death or a restart."""

    def log(self, name: str, line: str) -> None:
        """A line of a service's log."""

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Everything is up, for the first time."""

    async def run(self) -> None:
        """Keeps what is shown up to date until it is cancelled."""

    def close(self) -> None:
        """Comes at the very end, when all processes have stopped, whatever happened."""


def page_of(rest: str | None) -> str | None:
    """Where a browser finds the page, by the address of REST."""
    return f"http://{rest}/" if rest else None


def gateway_lines(addresses: Addresses) -> list[str]:
    """Where the gateway has its metrics, and where it answers."""
    metrics = addresses.metrics.get("gateway")
    told = [f"The gateway's metrics are on {metrics}, with REST."]
    return [*(told if metrics else []), f"The gateway answers on {addresses.gateway}."]


class LinesDisplay:
    """The models and addresses once on stdout; everything that happens later is a line on stderr."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def observe(self, change: Change) -> None:
        """The supervisor's sentences say it."""

    def report(self, sentence: str) -> None:
        """Passes it on."""
        note(sentence)

    def log(self, name: str, line: str) -> None:
        """Passes it on."""
        note(f"{name}: {line}")

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Writes what a newcomer opens first, the models, and where the gateway answers."""
        page = page_of(addresses.rest)
        models = [model_line(fact, addresses.metrics.get(fact.role)) for fact in facts]
        for line in [*([f"The page: {page}"] if page else []), *models, *gateway_lines(addresses)]:
            self._output.write(f"{line}\n")
        self._output.flush()

    async def run(self) -> None:
        """Says how to end it, and has nothing to draw again."""
        note("Serving until Ctrl-C.")
        await asyncio.Event().wait()

    def close(self) -> None:
        """Everything is written already."""


class JsonDisplay:
    """One JSON object a line on stdout for each event; logs go to stderr as they are."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._services = Services()

    def observe(self, change: Change) -> None:
        """Writes starting, died, restarted and stopped; that all serve for the first time is one event."""
        self._services.apply(change)
        event = event_of(change, is_restart=self._services[change.service].restarts > 0)
        if change.state is not State.SERVING or event["event"] == RESTARTED:
            self._write(event)

    def report(self, sentence: str) -> None:
        """Events say it."""

    def log(self, name: str, line: str) -> None:
        """Passes it on."""
        note(f"{name}: {line}")

    def serving(self, addresses: Addresses, facts: Sequence[ModelFacts]) -> None:
        """Writes all addresses, and who serves them with which model."""
        models = {fact.role: fact.model for fact in facts}
        pids = {view.name: view.pid for view in self._services}
        places = {"page": page_of(addresses.rest), "rest": addresses.rest, "gateway": addresses.gateway}
        services = {"target": addresses.target, "draft": addresses.draft}
        metrics = dict(addresses.metrics)
        self._write({"event": "serving", **places, **services, "metrics": metrics, "models": models, "pids": pids})

    async def run(self) -> None:
        """Has nothing to draw again."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Everything is written already."""

    def _write(self, event: dict[str, Any]) -> None:
        self._output.write(json.dumps(event) + "\n")
        self._output.flush()
