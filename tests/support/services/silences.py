"""Deadlines that pass where a service of the tiny model will not answer, and nowhere else, however slow a machine."""

from typing import Protocol

from support.basics import PATIENCE_S, eventually

from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_WISH, PlaceWish
from gateway.sessions.replicas import Need, Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline

SOON_S = 0.2


class Foreseen(Protocol):
    """A service of which it is known what it will do."""

    @property
    def goes_silent(self) -> bool:
        """Whether what it is asked next gets no answer by itself."""


def _seconds(service: Foreseen) -> float:
    return SOON_S if service.goes_silent else PATIENCE_S


class DraftSilence(DraftDeadline):
    """The deadline of a draft that is asked by one session at a time."""

    def __init__(self, draft: Foreseen) -> None:
        super().__init__()
        self._draft = draft

    def seconds(self, catch_up_count: int) -> float:
        """Time to wait for the answer that is asked for now."""
        return _seconds(self._draft)


class TargetSilence(RoundDeadline):
    """The same of a target."""

    def __init__(self, target: Foreseen) -> None:
        super().__init__()
        self._target = target

    def seconds(self) -> float:
        """Time to wait for the verdict that is asked for now."""
        return _seconds(self._target)


class Patient(Replicas):
    """Replicas whose link is open whenever a session looks for one, however busy the machine is."""

    async def wait(
        self,
        session: object,
        need: Need,
        until_s: float,
        failed: ServicePeer | None = None,
        wish: PlaceWish = NO_WISH,
        *,
        placing: Placing,
    ) -> ServicePeer:
        """Waits as always."""
        await eventually(lambda: self.info is not None)
        return await super().wait(session, need, until_s, failed, wish, placing=placing)
