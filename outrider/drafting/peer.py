"""One draft service as an engine sees it: found, asked who it is, and linked with, by a thread of its own.

The thread makes connections and reads answers, so no caller ever waits for either. When a link ends it makes another.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import grpc

from outrider.errors import OutriderError, PeerLost, ProtocolViolation, VocabularyMismatch, shown
from outrider.model_files.digests import VocabularyDigests
from outrider.rpc.breaker import BREAKERS, CircuitBreaker
from outrider.rpc.fencing import PROTOCOL_VERSION
from outrider.rpc.wire import FRAME_BYTES, channel_options, check_address
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

HANDSHAKE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between attempts to connect
CLOSE_S, JOIN_S = 2.0, 5.0
MAX_UNSENT_FRAMES = 256  # a service that takes in no more hangs
# No answer of a draft needs more.
OPTIONS = (("grpc.max_receive_message_length", 2 * FRAME_BYTES), *channel_options())
ENGINE = "engine"  # who the breaker's trials are made for

log = logging.getLogger("outrider.drafting")


class DraftLate(OutriderError):
    """The draft has not answered within the time that the caller gave it; the caller goes on without guesses."""

    status = "DEADLINE_EXCEEDED"
    reason = "DRAFT_LATE"
    exit_code = 75


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """Facts about a draft service. context_len: tokens of its longest sequence; max_draft_count: of one answer."""

    address: str
    model_name: str
    model_hash: str
    context_len: int
    max_draft_count: int
    vocabulary: VocabularyDigests


class DraftLink:
    """One call to one incarnation of a draft service. Sessions opened on it are gone with it."""

    def __init__(self, stub: DraftServiceStub, instance_id: int) -> None:
        self.instance_id = instance_id
        self._outgoing: SimpleQueue[pb.DraftServiceLinkRequest | None] = SimpleQueue()
        # A link that says nothing at first is not kept.
        self._outgoing.put(pb.DraftServiceLinkRequest())
        self._answers_due = 0
        self.call = stub.Link(iter(self._outgoing.get, None))

    def send(self, messages: Sequence[pb.ProposeRequest]) -> None:
        """Puts messages on their way, in frames; of a session in order, and at most one of it in a frame."""
        self._answers_due += 2 * len(messages)
        frame, ids, size = pb.DraftServiceLinkRequest(), set[bytes](), 0
        for message in messages:
            num_bytes, session_id = message.ByteSize(), message.fence.session_id
            if frame.requests and (session_id in ids or size + num_bytes > FRAME_BYTES):
                self._outgoing.put(frame)
                frame, ids, size = pb.DraftServiceLinkRequest(), set(), 0
            frame.requests.append(message)
            ids.add(session_id)
            size += num_bytes
        self._outgoing.put(frame)
        if self._outgoing.qsize() > MAX_UNSENT_FRAMES:
            self.end()

    def check(self, frame: pb.DraftServiceLinkResponse) -> None:
        """Raises ProtocolViolation about a frame of another process, or one that was not asked for."""
        if frame.instance_id != self.instance_id:
            raise ProtocolViolation("it is another process than said who it is")
        # An answer, and what ends the session later, for each message.
        self._answers_due -= max(1, len(frame.responses))
        if self._answers_due < 0:
            raise ProtocolViolation("it goes on answering without being asked")

    def finish(self) -> None:
        """Says that nothing more will be sent; a service that works ends the call then."""
        self._outgoing.put(None)

    def end(self) -> None:
        """Ends the call, and the thread of gRPC that sends."""
        self._outgoing.put(None)
        self.call.cancel()


class DraftPeer:
    """A draft service at an address; `link` and `info` are None while it cannot be asked, and `reason` says why."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        vocabulary: VocabularyDigests | None,
        on_frame: "Callable[[DraftPeer, DraftLink, pb.DraftServiceLinkResponse], None]",
        on_change: Callable[[], None],
    ) -> None:
        """`on_frame` gets each answer, and raises what it is not believed for; `on_change` is called when a link begins
        or ends. Both on the peer's thread.
        """
        self.address = check_address("address", address)
        self.link: DraftLink | None = None
        self.info: DraftInfo | None = None
        self.reason: OutriderError = PeerLost(f"the draft at {address} is not connected yet", address=address)
        self.breaker = CircuitBreaker(*BREAKERS["draft"])
        self.silent_since_s: float | None = None
        """When the first message after the last answer was sent, on time.monotonic; None while no answer is due."""
        self._credentials = credentials
        self._vocabulary = vocabulary
        self._on_frame = on_frame
        self._on_change = on_change
        self._instance_id = 0
        self._channel: grpc.Channel | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"draft {address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the link, after what is on its way, and the thread."""
        self._closing.set()
        if (link := self.link) is not None:
            link.finish()
            self._thread.join(CLOSE_S)
        if (channel := self._channel) is not None:
            channel.close()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                if self._credentials is None:
                    channel = grpc.insecure_channel(self.address, OPTIONS)
                else:
                    channel = grpc.secure_channel(self.address, self._credentials, OPTIONS)
                with channel:
                    self._channel = channel
                    info = self._handshake(channel)
                    pause_s = FIRST_PAUSE_S
                    self._serve(channel, info)
            except grpc.RpcError as error:
                is_call = isinstance(error, grpc.Call)
                said = f"{error.code().name}: {shown(error.details() or '')}" if is_call else repr(error)
                self._lost(PeerLost(f"the draft at {self.address} cannot be reached: {said}"))
            except OutriderError as error:
                self._lost(error)
            except Exception as error:
                # gRPC raises ValueError of a closed channel; else it is a fault of ours, and the thread goes on.
                if not self._closing.is_set():
                    log.exception("the link with the draft at %s failed on this side", self.address)
                self._lost(PeerLost(f"the link with the draft at {self.address} failed: {type(error).__name__}"))
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _handshake(self, channel: grpc.Channel) -> DraftInfo:
        """Facts about a draft that fits; raises ProtocolViolation, VocabularyMismatch, and RpcError."""
        said = ModelServiceStub(channel).GetModelInfo(model_pb.GetModelInfoRequest(), timeout=HANDSHAKE_S)
        who = f"what answers at {self.address}"
        if said.role != model_pb.SERVICE_ROLE_DRAFT or said.protocol_version != PROTOCOL_VERSION:
            versions = f"protocol {said.protocol_version}, and protocol {PROTOCOL_VERSION} is needed"
            raise ProtocolViolation(f"{who} is no draft service that fits: role {said.role}, {versions}")
        if said.context_len < 1 or said.max_draft_count < 1 or said.vocabulary_size < 1:
            raise ProtocolViolation(f"{who} says that it has no context, guesses nothing, or has no vocabulary")
        vocabulary = VocabularyDigests(said.vocabulary_size, tuple(said.vocabulary_digests))
        difference = self._vocabulary and self._vocabulary.difference(vocabulary)
        if difference:
            raise VocabularyMismatch(f"the draft at {self.address} does not fit the target: {difference}")
        if said.instance_id != self._instance_id:
            self._instance_id = said.instance_id
            self.breaker.renew()
        name, digest = said.model_name[:200], said.model_hash[:200]
        return DraftInfo(self.address, name, digest, said.context_len, said.max_draft_count, vocabulary)

    def _serve(self, channel: grpc.Channel, info: DraftInfo) -> None:
        """Hands answers on until the link ends; raises why."""
        link = DraftLink(DraftServiceStub(channel), self._instance_id)
        self.info, self.link = info, link
        log.info("draft present at %s: %s", self.address, info.model_name)
        self._on_change()
        try:
            for frame in link.call:
                self._on_frame(self, link, frame)
            raise PeerLost(f"the draft at {self.address} ended the link", address=self.address)
        finally:
            self.link = self.info = None
            link.end()

    def _lost(self, reason: OutriderError) -> None:
        if not self._closing.is_set() and reason.message != self.reason.message:
            log.warning("no guesses from the draft at %s: %s", self.address, reason.message)
        # Frames of its traceback would keep a sequence that was closed.
        self.reason = reason.with_traceback(None)
        self._on_change()
