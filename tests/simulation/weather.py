"""What goes wrong in a simulated world, and when: faults of single messages and of whole processes.

A fault strikes at a frame, counted for each process and direction, so that "before its reply" and "after its reply"
are places that a search can find; it strikes the whole frame, or one message of it. Nothing here makes up a token, but
for branches, which are no more than guesses: a copy is a true copy of a message of the same session, and a message from
the future differs from a true one only in the length that it claims to build on.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from simulation.calls import Call
from simulation.pipes import Delivery

from outrider.v1 import draft_service_pb2, target_service_pb2

LATENCIES_S = (0.0, 0.0002, 0.0002, 0.001, 0.01)
NOTICES_S = (0.0, 0.001, 0.3, 15.0)
HISTORY_LEN = 40
TARGET_LINK = "/outrider.v1.TargetService/Link"
FORGED_IDS = 16  # small ids, which the models of these worlds say often
# Frames up and down, by method; the messages are in the field that is named.
FRAMES: dict[str, dict[bool, tuple[Any, str]]] = {
    f"/outrider.v1.{name}/Link": {
        True: (getattr(module, f"{name}LinkRequest"), "requests"),
        False: (getattr(module, f"{name}LinkResponse"), "responses"),
    }
    for name, module in (("TargetService", target_service_pb2), ("DraftService", draft_service_pb2))
}


class Kind(Enum):
    """What goes wrong."""

    LOSE = "the message is lost"
    TWICE = "it comes twice"
    LATE = "it comes late, and what is behind it with it"
    OVERTAKEN = "it comes late, and others overtake it"
    STALE = "earlier messages of its sessions come again, behind it"
    FUTURE = "it is followed by a copy that builds on a greater length"
    FORGED = "it is followed by branches that no draft has made"
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
    _history: dict[tuple[object, bytes], list[bytes]] = field(default_factory=dict)

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
        is_link = call.method in FRAMES
        earlier = self._remember(call, data, is_up=is_up) if is_link else []
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
        elif kind is Kind.LATE:
            yield Delivery(fault.duration_s, data)
        elif not is_link:
            # Calls of one message have no room for another, and are only there with it.
            yield on_time
        else:
            struck, others = self._split(call, data, is_up=is_up)
            if others is not None:
                yield Delivery(on_time.delay_s, others)
            yield from self._struck(call, Delivery(on_time.delay_s, struck), fault, earlier, is_up=is_up)

    def _split(self, call: Call, data: bytes, *, is_up: bool) -> tuple[bytes, bytes | None]:
        """What a fault strikes of a frame, and the rest of it: all or one message."""
        frame_type, field_name = FRAMES[call.method][is_up]
        frame = frame_type.FromString(data)
        messages = getattr(frame, field_name)
        if len(messages) < 2 or self.dice.random() < 0.5:
            return data, None
        others = frame_type.FromString(data)
        index = self.dice.randrange(len(messages))
        del getattr(others, field_name)[index]
        struck = frame_type.FromString(data)
        del getattr(struck, field_name)[index + 1 :]
        del getattr(struck, field_name)[:index]
        return struck.SerializeToString(), others.SerializeToString()

    def _struck(
        self, call: Call, on_time: Delivery, fault: Fault, earlier: Sequence[bytes], *, is_up: bool
    ) -> Iterator[Delivery]:
        data = on_time.data
        if fault.kind is Kind.LOSE:
            return
        if fault.kind is Kind.OVERTAKEN:
            yield Delivery(fault.duration_s, data, in_order=False)
            return
        yield on_time
        delay_s = self.latency_s(call.address) + self.dice.choice((0.0, fault.duration_s))
        if fault.kind is Kind.TWICE:
            yield Delivery(delay_s, data, in_order=False)
        elif fault.kind is Kind.STALE:
            for copy in self.dice.sample(list(earlier), min(3, len(earlier))):
                yield Delivery(delay_s, copy, in_order=self.dice.random() < 0.5)
        elif fault.kind is Kind.FUTURE and is_up and data is not None:
            yield Delivery(delay_s, self._from_the_future(call, data), in_order=False)
        elif fault.kind is Kind.FORGED and is_up and call.method == TARGET_LINK:
            yield Delivery(delay_s, self._forged(data), in_order=False)

    def _forged(self, data: bytes) -> bytes:
        """Branches for each session of a frame to a target: any outcomes, lengths and guesses, with laws or without."""
        dice, frame = self.dice, target_service_pb2.TargetServiceLinkRequest()
        for message in target_service_pb2.TargetServiceLinkRequest.FromString(data).requests:
            forged = frame.requests.add(fence=message.fence)
            forged.branches.plain_on_miss = dice.random() < 0.5
            has_laws = dice.random() < 0.5
            for _ in range(dice.randint(0, 16)):
                branch = forged.branches.branches.add(accepted_count=dice.randrange(4))
                branch.next_token_id = dice.randrange(FORGED_IDS)
                branch.token_ids.extend(dice.randrange(FORGED_IDS) for _ in range(dice.randint(1, 3)))
                for token_id in branch.token_ids if has_laws else ():
                    branch.distributions.add(token_ids=[token_id], weights=[dice.randint(1, 9)])
        return bytes(frame.SerializeToString())

    def _from_the_future(self, call: Call, data: bytes) -> bytes:
        frame = FRAMES[call.method][True][0].FromString(data)
        # Opens and their parts bring all tokens, so one from the future would need tokens that were not said.
        known = [message for message in frame.requests if message.WhichOneof("action") not in {"open", "part"}]
        del frame.requests[:]
        for message in known:
            message.fence.base_len += self.dice.randint(1, 9)
            if message.WhichOneof("action") == "step":
                message.step.ClearField("proposal")
            frame.requests.append(message)
        return bytes(frame.SerializeToString())

    def _remember(self, call: Call, data: bytes, *, is_up: bool) -> list[bytes]:
        """The earlier messages of the sessions of a frame, each as a frame of its own.

        Requests may come again on any call to this process; answers only on their own, because they name who gave them.
        """
        frame_type, field_name = FRAMES[call.method][is_up]
        place: object = (call.address, is_up) if is_up else call
        earlier = []
        for message in getattr(frame_type.FromString(data), field_name):
            history = self._history.setdefault((place, message.fence.session_id), [])
            earlier += history
            if not is_up or message.WhichOneof("action") != "close":
                alone = frame_type.FromString(data)
                del getattr(alone, field_name)[:]
                getattr(alone, field_name).append(message)
                history.append(alone.SerializeToString())
                del history[:-HISTORY_LEN]
        return earlier
