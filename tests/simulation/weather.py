"""What goes wrong in a simulated world, and when: faults of single messages and of whole processes.

A fault strikes at a message, counted for each process and direction, so that "before its reply" and "after its reply"
are places that a search can find. Nothing here makes up a token: a copy is a true copy of a message of the same
session, and a message from the future differs from a true one only in the length that it claims to build on.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from simulation.calls import Call
from simulation.pipes import Delivery

from outrider.v1 import draft_service_pb2, target_service_pb2

LATENCIES_S = (0.0, 0.0002, 0.0002, 0.001, 0.01)
NOTICES_S = (0.0, 0.001, 0.3, 15.0)
HISTORY_LEN = 40
REQUESTS = {
    "/outrider.v1.TargetService/Verify": target_service_pb2.VerifyRequest,
    "/outrider.v1.DraftService/Propose": draft_service_pb2.ProposeRequest,
}


class Kind(Enum):
    """What goes wrong."""

    LOSE = "the message is lost"
    TWICE = "it comes twice"
    LATE = "it comes late, and what is behind it with it"
    OVERTAKEN = "it comes late, and others overtake it"
    STALE = "earlier messages of the session come again, behind it"
    FUTURE = "it is followed by a copy that builds on a greater length"
    BREAK = "the call breaks instead"
    BREAK_AFTER = "the call breaks behind it"
    BLACK_HOLE = "from it on nothing of the call arrives in this direction"
    KILL = "the process dies before it, and another starts"
    KILL_AFTER = "the process dies behind it, and another starts"
    FREEZE = "the process stands still before it"
    HANG = "the device stands still before it"
    DRAIN = "the process takes no new calls, and dies at the end of its grace"
    CUT = "nobody can reach the process, and all connections break"


OF_A_PROCESS = {Kind.KILL, Kind.KILL_AFTER, Kind.FREEZE, Kind.HANG, Kind.DRAIN, Kind.CUT}


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` strikes at message `ordinal` to (`is_up`) or from `place`; duration_s is for what takes time."""

    place: str
    is_up: bool
    ordinal: int
    kind: Kind
    duration_s: float = 0.1


@dataclass(eq=False)
class Weather:
    """Decides about every message; see simulation.calls.Ways."""

    dice: random.Random
    faults: Sequence[Fault]
    storm: float
    """Probability that a message meets a random fault of its own."""
    storm_places: Collection[str]
    storm_kinds: Sequence[Kind]
    durations_s: Sequence[float]
    strike: Callable[[str, Fault], None]
    """Lets a fault of a process happen; called with its place."""
    now_s: Callable[[], float]
    is_calm: bool = True
    """Nothing goes wrong, and no message is counted."""
    spells: list[tuple[float, float, str]] = field(default_factory=list)
    """From when to when something went wrong, and where."""
    _counts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    _history: dict[tuple[str, bool, bytes], list[bytes]] = field(default_factory=dict)

    def latency_s(self, address: str) -> float:
        """How long something takes on the way."""
        return self.dice.choice(LATENCIES_S)

    def notice_s(self, address: str) -> float:
        """How long a server takes to notice that a connection is gone."""
        return self.dice.choice(NOTICES_S)

    def deliveries(self, call: Call, data: bytes, *, is_up: bool) -> Iterable[Delivery]:
        """What arrives of a message."""
        if is_up in call.black_holes:
            return []
        fault = self._fault(call.address, is_up=is_up)
        return list(self._deliveries(call, data, fault, is_up=is_up))

    def _fault(self, place: str, *, is_up: bool) -> Fault | None:
        if self.is_calm:
            return None
        ordinal = self._counts[place, is_up]
        self._counts[place, is_up] += 1
        for fault in self.faults:
            if (fault.place, fault.is_up, fault.ordinal) == (place, is_up, ordinal):
                return fault
        if place in self.storm_places and self.dice.random() < self.storm:
            kind, duration_s = self.dice.choice(self.storm_kinds), self.dice.choice(self.durations_s)
            return Fault(place, is_up, ordinal, kind, duration_s)
        return None

    def _deliveries(self, call: Call, data: bytes, fault: Fault | None, *, is_up: bool) -> Iterator[Delivery]:
        on_time = Delivery(self.latency_s(call.address), data)
        is_session = call.method in REQUESTS
        # A stream's first message cannot be lost or overtaken alone, because the stream is only there with it.
        is_bound = not is_session or (is_up and call.is_new)
        call.is_new = call.is_new and not is_up
        earlier = self._remember(call, data, is_up=is_up) if is_session else []
        if fault is None:
            yield on_time
            return
        kind = fault.kind
        lasting_s = fault.duration_s if kind in OF_A_PROCESS else 0.0
        self.spells.append((self.now_s(), self.now_s() + lasting_s, call.address))
        if kind in OF_A_PROCESS:
            self.strike(call.address, fault)
            yield Delivery(0.0, data) if kind is Kind.KILL_AFTER else on_time
        elif kind is Kind.BREAK:
            call.lose()
        elif kind is Kind.BREAK_AFTER:
            yield on_time
            call.lose(on_time.delay_s)
        elif kind is Kind.BLACK_HOLE:
            call.black_holes.add(is_up)
        elif kind is Kind.LOSE and not is_bound:
            return
        elif kind is Kind.OVERTAKEN and not is_bound:
            yield Delivery(fault.duration_s, data, in_order=False)
        elif kind is Kind.LATE:
            yield Delivery(fault.duration_s, data)
        else:
            yield on_time
            yield from self._copies(call, data, fault, earlier, is_up=is_up)

    def _copies(
        self, call: Call, data: bytes, fault: Fault, earlier: Sequence[bytes], *, is_up: bool
    ) -> Iterator[Delivery]:
        """More messages than were sent; only on a session's streams, because calls of one message have no room."""
        if call.method not in REQUESTS:
            return
        delay_s = self.latency_s(call.address) + self.dice.choice((0.0, fault.duration_s))
        if fault.kind is Kind.TWICE:
            yield Delivery(delay_s, data, in_order=False)
        elif fault.kind is Kind.STALE:
            for copy in self.dice.sample(list(earlier), min(3, len(earlier))):
                yield Delivery(delay_s, copy, in_order=self.dice.random() < 0.5)
        elif fault.kind is Kind.FUTURE and is_up:
            yield Delivery(delay_s, self._from_the_future(call, data), in_order=False)

    def _from_the_future(self, call: Call, data: bytes) -> bytes:
        message = REQUESTS[call.method].FromString(data)
        message.fence.base_len += self.dice.randint(1, 9)
        if message.WhichOneof("action") == "open":
            # An open brings all tokens, so one from the future would need tokens that nobody has said.
            return data
        if message.WhichOneof("action") == "step":
            message.step.ClearField("proposal")
        return message.SerializeToString()

    def _remember(self, call: Call, data: bytes, *, is_up: bool) -> list[bytes]:
        """The earlier messages of the session to this process in this direction."""
        fence = REQUESTS[call.method].FromString(data).fence if is_up else None
        if fence is not None:
            call.session_id = fence.session_id
        history = self._history.setdefault((call.address, is_up, call.session_id), [])
        earlier = list(history)
        if not self._ends(call, data, is_up=is_up):
            history.append(data)
            del history[:-HISTORY_LEN]
        return earlier

    def _ends(self, call: Call, data: bytes, *, is_up: bool) -> bool:
        return is_up and REQUESTS[call.method].FromString(data).WhichOneof("action") == "close"
