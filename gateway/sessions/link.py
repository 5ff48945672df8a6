"""The one call to a service that carries the messages of all sessions, and a session's part in it.

What the sessions say in one turn of the loop leaves in one frame, and so does what comes while a frame is on its way:
batching never waits. Nor does a service wait for all that follows from a large frame: a turn handles a part of it.
An open with many tokens is cut, and a frame takes one piece of one open at a time, so that no session waits for a
prompt. Cancelling a read or a write of grpc.aio cancels the whole call, so both happen in tasks of the link's own, and
a session that leaves only takes its mailbox away.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Generic, TypeVar

import grpc
import structlog

from gateway.rounds.round import TokenLog
from outrider.errors import PeerLost, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.rpc.errors import error_from, is_too_large, said_by_peer
from outrider.rpc.messages.session import open_message
from outrider.rpc.wire import FRAME_BYTES, MAX_OF_SESSION
from outrider.v1 import draft_service_pb2, target_service_pb2, types_pb2

CLOSE_TIMEOUT_S = 2.0
# What gRPC itself says of a call whose connection or process is gone, by the version and by what lies between.
LOST_STATUSES = frozenset({"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"})
LONGEST_SILENCE_S = 15.0  # as long as gRPC takes to notice that its pings get no answer
MAX_UNREAD = 1024  # answers of one session that may wait here; no service may send more before it is asked again
PART_TOKENS = 4096  # tokens of an open that are sent at a time
TURN_ANSWERS = 16  # of one frame that a turn of the loop handles
LOADS_A_S = 2.0  # frames a second that say nothing but how busy a service is: twice as many as there are

log = structlog.get_logger()

Request = draft_service_pb2.ProposeRequest | target_service_pb2.VerifyRequest
Frame = draft_service_pb2.DraftServiceLinkRequest | target_service_pb2.TargetServiceLinkRequest
Received = TypeVar("Received", draft_service_pb2.ProposeResponse, target_service_pb2.VerifyResponse)


class Link:
    """The call to one incarnation of a service. `end` says why nothing comes any more, None while it works."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, Any]",
        first: Frame,
        service: str,
        instance_id: int,
        max_unasked: float = math.inf,
        on_load: Callable[[types_pb2.ServiceLoad], bool] = lambda load: False,
    ) -> None:
        """Takes a call that has just begun, its first frame, and how the service is called in errors.

        max_unasked is how many frames and answers may come beyond two for each message that was sent: its answer, and
        what ends its session later. on_load gets what it says of its load, which may come unasked about once a second,
        and returns whether the first frame is to be sent again.
        """
        self.instance_id = instance_id
        self.is_at_fault = False  # the service ended the stream by what none may say
        self.numerics_id = ""
        self.session_count = 0  # on the service, as it said last
        self.other_sessions = 0  # of these, those that are not this link's
        self.end: PeerLost | None = None
        self._clock_s = asyncio.get_running_loop().time
        self.heard_s = self.spoke_s = self._clock_s()  # when an answer came last, and any frame
        self.ended = asyncio.Event()
        self._call = call
        self._answers_due = self._max_unasked = max_unasked
        self._on_load = on_load
        # Frames with nothing but a load, of which LOADS_A_S leave the account each second.
        self._num_loads, self._load_s = 0.0, self.heard_s
        self._first, self._is_first_due = first, True
        self._service = service
        self._mailboxes: dict[bytes, Mailbox[Any]] = {}
        # By session, and their bytes.
        self._outgoing: deque[tuple[bytes, Request, int]] = deque()
        # Sessions whose opens are long, in the order of these, and what each has to say from then on.
        self._long: dict[bytes, deque[Request]] = {}
        self._wanted: asyncio.Future[None] | None = None
        self._is_closing = False
        self._has_left = False  # a frame reached a connection
        self._reading = asyncio.create_task(self._read(), name="link reader")
        self._writing = asyncio.create_task(self._write(), name="link writer")

    @property
    def has_sessions(self) -> bool:
        """Whether sessions are on it, or were when it ended and have not noticed."""
        return bool(self._mailboxes)

    def attach(self, session_id: bytes, mailbox: "Mailbox[Any]") -> None:
        """Answers of a session go into a mailbox from now on."""
        self._mailboxes[session_id] = mailbox

    def send(self, session_id: bytes, messages: Sequence[Request]) -> int:
        """Puts messages of a session on their way, in order; more than one for a long open. Returns their bytes."""
        self._answers_due += 2 * len(messages)
        sizes = [message.ByteSize() for message in messages]
        if session_id in self._long or len(sizes) > 1:
            self._long.setdefault(session_id, deque()).extend(messages)
        else:
            self._outgoing.append((session_id, messages[0], sizes[0]))
        self._wake()
        return sum(sizes)

    def detach(self, session_id: bytes, mailbox: "Mailbox[Any]", close: Request) -> None:
        """Ends a session: its answers go nowhere, and what it still had to say is not said."""
        if self._mailboxes.get(session_id) is mailbox:
            del self._mailboxes[session_id]
            self._long.pop(session_id, None)
            self.send(session_id, [close])

    def suspect(self, since_s: float) -> None:
        """The service works, and yet a session has waited in vain since then; a stream long silent is given up."""
        silent_s = self._clock_s() - self.heard_s
        if self.heard_s < since_s and silent_s > LONGEST_SILENCE_S and self.end is None:
            log.warning("link silent", service=self._service)
            self._call.cancel()

    async def close(self) -> None:
        """Sends what is on its way, and waits a little for the other end to end the call."""
        self._is_closing = True
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.ended.wait()
        self._call.cancel()
        for task in (self._reading, self._writing):
            task.cancel()
        await asyncio.wait({self._reading, self._writing})

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def _write(self) -> None:
        # Whatever ends the call here is what the reader raises.
        with suppress(grpc.aio.AioRpcError), self._own_fault(), suppress(asyncio.InvalidStateError):
            # A link that says nothing at first is not kept, and requests may come late.
            while True:
                if self._is_first_due:
                    self._is_first_due = False
                    await self._call.write(self._first)
                elif self._outgoing or self._long:
                    await self._call.write(self._frame())
                    self._has_left = True
                elif self._is_closing:
                    await self._call.done_writing()
                    return
                else:
                    self._wanted = asyncio.get_running_loop().create_future()
                    await self._wanted

    def _frame(self) -> object:
        """The next messages, of a long open one piece, and no more of a session than its service takes at a time.

        A gateway that was held up for a moment has that many acknowledgements for a session that needs no answers.
        """
        messages: list[Request] = []
        num_bytes, counts = 0, dict[bytes, int]()
        while self._outgoing:
            session_id, message, size = self._outgoing[0]
            count = counts.get(session_id, 0)
            if count == MAX_OF_SESSION or (messages and num_bytes + size > FRAME_BYTES):
                break
            self._outgoing.popleft()
            messages.append(message)
            counts[session_id], num_bytes = count + 1, num_bytes + size
        if self._long:
            session_id, pieces = next(iter(self._long.items()))
            messages.append(pieces.popleft())
            if not pieces:
                del self._long[session_id]
        return type(self._first)(requests=messages)  # type: ignore[arg-type]

    async def _read(self) -> None:
        """Gives answers to their sessions until the call ends."""
        try:
            with self._own_fault():
                while True:
                    frame: Any = await self._call.read()
                    if frame is grpc.aio.EOF:
                        raise PeerLost(f"{self._service} ended the link")
                    if frame is None:
                        # This is how grpc.aio says that a message could not be parsed.
                        self.is_at_fault = True
                        raise PeerLost(f"{self._service} sent a message that is not valid")
                    if frame.instance_id != self.instance_id:
                        raise PeerLost(f"{self._service} is another one than the handshake was made with")
                    self.spoke_s = self._clock_s()
                    self._count(frame)
                    if frame.HasField("load") and self._on_load(frame.load):
                        self._is_first_due = True
                        self._wake()
                    await self._hand_out(frame)
        except PeerLost as error:
            self.end = error
            self._call.cancel()
        except grpc.aio.AioRpcError as error:
            self.end = self._failure(error)
        except asyncio.CancelledError:
            self.end = self.end or PeerLost(f"the link with {self._service} was cancelled on this side")
            if not self._call.cancelled():
                raise
        finally:
            self.ended.set()
            # A write into a call that is not read any more may never end.
            self._writing.cancel()
            for mailbox in self._mailboxes.values():
                mailbox.wake()

    def _count(self, frame: Any) -> None:  # noqa: ANN401 - of either service
        """Raises PeerLost about more frames than may come unasked."""
        if frame.HasField("load") and not frame.responses:
            self._num_loads = max(0.0, self._num_loads - LOADS_A_S * (self.spoke_s - self._load_s)) + 1
            self._load_s = self.spoke_s
        else:
            self._answers_due -= max(1, len(frame.responses))
        if self._answers_due < 0 or self._num_loads > self._max_unasked:
            self.is_at_fault = True
            raise PeerLost(f"{self._service} went on answering without being asked")

    @contextmanager
    def _own_fault(self) -> Iterator[None]:
        """Ends the link with a fault of this side, so that another is begun; sessions are opened there again."""
        try:
            yield
        except (PeerLost, grpc.aio.AioRpcError):
            raise
        except Exception as error:
            log.exception("link failed", service=self._service)
            self.end = PeerLost(f"the link with {self._service} failed on this side: {type(error).__name__}")
            self._call.cancel()

    async def _hand_out(self, frame: Any) -> None:  # noqa: ANN401 - of either service
        if frame.responses:
            # A load does not show that what was sent has arrived.
            self.heard_s = self.spoke_s
        self.numerics_id, self.session_count = frame.numerics_id, frame.session_count
        self.other_sessions = max(0, frame.session_count - len(self._mailboxes))
        for number, response in enumerate(frame.responses):
            if number and number % TURN_ANSWERS == 0:
                # What these sessions say now leaves before the others hear anything, so that the services work
                # meanwhile.
                await asyncio.sleep(0)
            mailbox = self._mailboxes.get(response.fence.session_id)
            # An answer to a session that has ended is late.
            if mailbox is not None:
                mailbox.put(response)

    def _failure(self, error: grpc.aio.AioRpcError) -> PeerLost:
        """A loss whatever it is, because no session is at fault, in a sentence that names the peer and what it said."""
        status = error.code().name
        log.info("link lost", service=self._service, status=status, details=error.details())
        self.is_at_fault = is_too_large(error)
        if said_by_peer(error) or status not in LOST_STATUSES:
            what = f"ended the link: {error_from(error).message}"
        else:
            what = "was lost in the middle of the request" if self._has_left else "cannot be reached"
        return PeerLost(f"{self._service} {what}", status=status)


class Mailbox(Generic[Received]):
    """Messages that a session sends and receives on a link, within one opening: one epoch and those of Rollbacks."""

    max_unread: ClassVar[int] = MAX_UNREAD

    def __init__(self, link: Link, service: str, session_id: bytes) -> None:
        self.link = link
        self._service = service
        self._session_id = session_id
        self._unread: deque[Received] = deque()
        self._changed: asyncio.Future[None] | None = None
        # Until when a read waits. The timer may be an earlier read's, which is cheaper than a timer for each.
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self._is_flooded = False
        link.attach(session_id, self)

    def send(self, *messages: Request) -> None:
        """Puts messages on their way; it is not waited for, and what cannot be sent, the next read says."""
        self._num_bytes += self.link.send(self._session_id, messages)

    async def read(self, until_s: float) -> Received:
        """Next message; raises TimeoutError when it comes later by the loop's clock, and what ended the link."""
        if not self._unread and self.link.end is None:
            self._changed, self._until_s = asyncio.get_running_loop().create_future(), until_s
            if self._timer is None or until_s < self._timer.when():
                self._set_timer()
            await self._changed
        if self._is_flooded:
            raise ProtocolViolation(f"{self._service} sent {self.max_unread} answers that nobody has asked for")
        if not self._unread:
            # All sessions raise the same end; with what it was raised through before it would keep each of them.
            raise self.link.end.with_traceback(None) if self.link.end else TimeoutError
        return self._next_unread()

    def _next_unread(self) -> Received:
        """The first message that waits here."""
        message = self._unread.popleft()
        self._num_bytes += message.ByteSize()
        return message

    def put(self, message: Received) -> None:
        """Takes an answer in, for the reader."""
        if len(self._unread) < self.max_unread:
            self._unread.append(message)
        else:
            self._is_flooded = True
        self.wake()

    def wake(self) -> None:
        """Lets the reader look again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._until_s, self._time_is_up)

    def _time_is_up(self) -> None:
        """Wakes the reader if its time is up; it may have been an earlier read's time."""
        self._timer = None
        if asyncio.get_running_loop().time() >= self._until_s:
            self.wake()
        elif self._changed is not None and not self._changed.done():
            self._set_timer()

    def take_bytes(self) -> int:
        """Bytes of the messages, both ways, since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def close(self, message: Request) -> None:
        """Sends the session's last message."""
        if self._timer is not None:
            self._timer.cancel()
        self.link.detach(self._session_id, self, message)


def opening_of(spec: SessionSpec, token_log: TokenLog) -> tuple[types_pb2.OpenSession, list[types_pb2.OpenPart]]:
    """Message that opens a session with all tokens of the log, and the parts that go before it when these are many."""
    token_ids = token_log.tokens()
    starts = range(0, len(token_ids) - PART_TOKENS, PART_TOKENS)
    parts = [types_pb2.OpenPart(start=start, token_ids=token_ids[start : start + PART_TOKENS]) for start in starts]
    part_len = PART_TOKENS * len(parts)
    opening = open_message(spec, token_ids[part_len:])
    opening.part_len = part_len
    return opening, parts
