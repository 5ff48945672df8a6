"""The processes of a stack as `up` shows them: what became of each, by the supervisor's word. Asks nobody itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cli.stack import metrics_address
from outrider.supervisor import Change, State

PROC = Path("/proc")
RESTARTED = "restarted"


@dataclass(slots=True)
class ServiceView:
    """One process: its current incarnation, and how often it had to be started again."""

    name: str
    state: State = State.STARTING
    pid: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    model: str = ""
    ending: str = ""
    """How the last incarnation ended."""

    @property
    def address(self) -> str:
        """Where it answers gRPC, empty until it has served once."""
        return self.addresses.get("address", "")


class Services:
    """All processes of a stack in the order of their start."""

    def __init__(self) -> None:
        self._views: dict[str, ServiceView] = {}

    def __iter__(self) -> Iterator[ServiceView]:
        return iter(self._views.values())

    def __getitem__(self, name: str) -> ServiceView:
        return self._views[name]

    def apply(self, change: Change) -> None:
        """Takes what the supervisor says."""
        view = self._views.setdefault(change.service, ServiceView(change.service))
        # Who has an address already has served before.
        view.restarts += change.state is State.SERVING and bool(view.addresses)
        view.state, view.pid = change.state, change.pid
        view.addresses = change.addresses or view.addresses
        view.ending = change.ending or view.ending


def event_of(change: Change, *, is_restart: bool) -> dict[str, Any]:
    """A change as the object that `outrider up --json` prints."""
    name = RESTARTED if change.state is State.SERVING and is_restart else change.state.value
    event: dict[str, Any] = {"event": name, "service": change.service}
    if change.state is State.SERVING:
        event |= {"pid": change.pid, "address": change.addresses.get("address", "")}
        event |= {"rest": change.addresses["rest"]} if "rest" in change.addresses else {}
        metrics = metrics_address(change.addresses)
        event |= {"metrics": metrics} if metrics else {}
    if change.state is State.DIED:
        event |= {"ending": change.ending, "again_in_s": change.delay_s}
    return event


def memory_bytes(pid: int | None) -> int | None:
    """Memory that a process has in use, None when it is gone or the system does not tell."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    line = next((each for each in text.splitlines() if each.startswith("VmRSS:")), "")
    words = line.split()
    return int(words[1]) * 1024 if len(words) == 3 and words[1].isdecimal() else None
