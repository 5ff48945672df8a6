"""The client of draft services for engines that verify by themselves: many sequences in one exchange, under a deadline.

An engine never waits for a connection, nor for a draft that reads a long prompt, fails, or hangs: it gets no guesses.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from outrider.drafting.peer import ENGINE, DraftInfo, DraftLate, DraftLink, DraftPeer
from outrider.drafting.sequence import MAX_ID, DraftSequence, Guesses
from outrider.errors import InvalidRequest, OutriderError, Overloaded, PeerLost, PromptTooLong, ProtocolViolation
from outrider.model_files.digests import VocabularyDigests
from outrider.v1 import draft_service_pb2 as pb

WAIT_TOKENS = 64
SILENCE_S = 5.0  # without any answer, while some are due, a draft hangs

Asks = Sequence[tuple[DraftSequence, int]]
"""Sequences, no one twice, and how many guesses are wanted after each; 0 only gives the draft its tokens."""


class _Exchange:
    """Requests that were made together; `done` when nothing of them is waited for any more."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.errors: dict[bytes, OutriderError] = {}
        self.began_s = time.monotonic()
        self.waiting: set[bytes] = set()
        self.asked: set[DraftPeer] = set()
        self.answered: set[DraftPeer] = set()

    def remove(self, session_id: bytes) -> bool:
        """Returns whether the session was waited for."""
        was_waiting = session_id in self.waiting
        self.waiting.discard(session_id)
        if not self.waiting and not self.done.done():
            self.done.set_result(None)
        return was_waiting


class DraftClient:
    """A client of one or more draft services of the same model. The first one that works is used.

    Its methods may be called from any thread, but for one sequence from one at a time; exchanges follow each other.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        vocabulary: VocabularyDigests | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        wait_tokens: int = WAIT_TOKENS,
    ) -> None:
        """Connects in the background to HOST:PORT addresses. Raises InvalidRequest.

        `vocabulary` is the target's: drafts with another one are not used. A draft that has more than wait_tokens to
        read before it guesses is not waited for; its guesses come in a later exchange. `credentials` are for TLS.
        """
        if not addresses:
            raise InvalidRequest("addresses", [], "at least one")
        self._wait_tokens = wait_tokens
        self._lock = threading.Condition()
        self._exchanges = threading.Lock()
        self._exchange = _Exchange()
        self._sequences: dict[bytes, DraftSequence] = {}
        self._peers: list[DraftPeer] = []
        try:
            for address in addresses:
                self._peers.append(DraftPeer(address, credentials, vocabulary, self._on_frame, self._on_change))
        except InvalidRequest:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> DraftInfo | None:
        """Facts about the first draft that is connected; None while none is."""
        return next((info for peer in self._peers if (info := peer.info) is not None), None)

    @property
    def reasons(self) -> list[OutriderError]:
        """Reasons why drafts are not connected, one for each that is not."""
        return [peer.reason for peer in self._peers if peer.info is None]

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return len(self._sequences)

    def wait(self, timeout_s: float) -> DraftInfo:
        """Waits for a draft to be connected; raises the reason why the first one is not, after the time."""
        with self._lock:
            self._lock.wait_for(lambda: self.info is not None, timeout_s)
            if (info := self.info) is None:
                raise self._peers[0].reason.with_traceback(None)
            return info

    def open(self, token_ids: Sequence[int], max_len: int = MAX_ID) -> DraftSequence:
        """Begins a sequence after the target's committed tokens, at least one; nothing is sent before it is asked for.

        No guess is the token at which it has max_len tokens, or lies past it. Raises InvalidRequest.
        """
        sequence = DraftSequence(token_ids, max_len)
        with self._lock:
            self._sequences[sequence.session_id] = sequence
        return sequence

    def close_sequences(self, sequences: Sequence[DraftSequence]) -> None:
        """Ends sequences, and what a draft holds of them."""
        with self._lock:
            closing: dict[DraftLink, list[pb.ProposeRequest]] = {}
            for sequence in sequences:
                if self._sequences.pop(sequence.session_id, None) is None:
                    continue
                if sequence.peer is not None and sequence.link is not None and sequence.peer.link is sequence.link:
                    closing.setdefault(sequence.link, []).append(sequence.closing())
            for link, messages in closing.items():
                link.send(messages)

    def guess(self, asks: Asks, timeout_s: float) -> list[Guesses]:
        """Greedy guesses after each sequence, all asked for at once, in order; waits at most timeout_s.

        Errors are in the answers and touch no other sequence: DraftLate, PeerLost where no draft can be asked,
        PromptTooLong past the draft's context, Overloaded, CacheFull and whatever else a draft refuses a sequence for,
        which then rests for half a second and longer. Raises InvalidRequest for a count below 0 or a closed sequence.
        """
        with self._exchanges:
            exchange = self._begin(asks)
            with suppress(TimeoutError):
                exchange.done.result(timeout_s)
            return self._finish(exchange, asks)

    async def guess_async(self, asks: Asks, timeout_s: float) -> list[Guesses]:
        """Like `guess`, without blocking the event loop; raises RuntimeError while another exchange is under way."""
        if not self._exchanges.acquire(blocking=False):
            raise RuntimeError("another exchange of this client is under way")
        try:
            exchange = self._begin(asks)
            await asyncio.wait({asyncio.wrap_future(exchange.done)}, timeout=timeout_s)
            return self._finish(exchange, asks)
        finally:
            self._exchanges.release()

    def close(self) -> None:
        """Ends all sequences and links."""
        self.close_sequences([*self._sequences.values()])
        for peer in self._peers:
            peer.close()

    def _begin(self, asks: Asks) -> _Exchange:
        with self._lock:
            for sequence, count in asks:
                if count < 0 or sequence.session_id not in self._sequences:
                    raise InvalidRequest("asks", count, "a count of at least 0 for a sequence that is open")
            exchange = self._exchange = _Exchange()
            for peer in self._peers:
                if peer.silent_since_s is not None and exchange.began_s - peer.silent_since_s > SILENCE_S:
                    peer.breaker.failed(ENGINE, DraftLate("no answer for long"))
                    peer.silent_since_s = None
            outgoing: dict[DraftLink, list[pb.ProposeRequest]] = {}
            for sequence, count in asks:
                try:
                    self._ask(sequence, count, exchange, outgoing)
                except OutriderError as error:
                    exchange.errors[sequence.session_id] = error
            for link, messages in outgoing.items():
                link.send(messages)
            if not exchange.waiting:
                exchange.done.set_result(None)
            return exchange

    def _ask(
        self,
        sequence: DraftSequence,
        count: int,
        exchange: _Exchange,
        outgoing: dict[DraftLink, list[pb.ProposeRequest]],
    ) -> None:
        """Puts a sequence's messages together; raises why it is not asked for."""
        sequence.is_awaited = False
        if len(sequence) + 1 >= sequence.max_len:
            return
        if exchange.began_s < sequence.rests_until_s:
            raise Overloaded("the draft has refused the sequence a moment ago")
        peer, link, info = self._place(sequence)
        if len(sequence) >= info.context_len:
            raise PromptTooLong(f"the draft's context has {info.context_len} tokens", limit=info.context_len)
        count, answer = min(count, info.max_draft_count), sequence.answer
        if answer is not None and answer.error is None and sequence.asked_count >= count and sequence.link is link:
            return
        left = sequence.link
        if left not in (None, link) and sequence.peer is not None and sequence.peer.link is left:
            outgoing.setdefault(left, []).append(sequence.closing())
        peer.breaker.enter(ENGINE)
        messages = sequence.requests(peer, link, count)
        if messages:
            outgoing.setdefault(link, []).extend(messages)
            peer.silent_since_s = peer.silent_since_s or exchange.began_s
        if count and sequence.unread_count <= self._wait_tokens:
            sequence.is_awaited = True
            exchange.waiting.add(sequence.session_id)
            exchange.asked.add(peer)

    def _place(self, sequence: DraftSequence) -> tuple[DraftPeer, DraftLink, DraftInfo]:
        """The draft that has the session, or the first one that may be asked; raises PeerLost."""
        peers = [sequence.peer, *self._peers] if sequence.peer is not None else self._peers
        for peer in peers:
            link, info = peer.link, peer.info
            if link is not None and info is not None and not peer.breaker.blocks(ENGINE):
                return peer, link, info
        first = self._peers[0]
        if first.link is None:
            raise PeerLost(first.reason.message, address=first.address)
        raise PeerLost(f"the draft at {first.address} has failed, and is left alone for a while", address=first.address)

    def _finish(self, exchange: _Exchange, asks: Asks) -> list[Guesses]:
        cost_s = time.monotonic() - exchange.began_s
        with self._lock:
            late = DraftLate(f"the draft has not answered within {cost_s:.3f} seconds")
            for peer in exchange.asked:
                if peer in exchange.answered:
                    peer.breaker.answered()
                elif peer.link is not None:
                    peer.breaker.failed(ENGINE, late, cost_s)
            exchange.done.cancel()
            return [self._found(exchange, sequence, count, late) for sequence, count in asks]

    def _found(self, exchange: _Exchange, sequence: DraftSequence, count: int, late: DraftLate) -> Guesses:
        error = exchange.errors.get(sequence.session_id)
        if error is not None:
            return Guesses(error=error)
        if (found := sequence.answer) is not None:
            return Guesses(found.token_ids[:count], found.error)
        return Guesses(error=late) if sequence.is_awaited else Guesses()

    def _on_frame(self, peer: DraftPeer, link: DraftLink, frame: pb.DraftServiceLinkResponse) -> None:
        with self._lock:
            try:
                link.check(frame)
                peer.silent_since_s = None
                for response in frame.responses:
                    sequence = self._sequences.get(response.fence.session_id)
                    info = peer.info
                    if sequence is None or sequence.link is not link or info is None:
                        continue
                    if sequence.take(peer, response, info.vocabulary.size):
                        if self._exchange.remove(sequence.session_id):
                            self._exchange.answered.add(peer)
                        elif not sequence.is_awaited:
                            peer.breaker.answered()
            except ProtocolViolation as error:
                peer.breaker.failed(ENGINE, error)
                raise

    def _on_change(self) -> None:
        """A link has begun or ended: sequences of one that is gone are not waited for."""
        with self._lock:
            for session_id in [*self._exchange.waiting]:
                sequence = self._sequences.get(session_id)
                peer = sequence.peer if sequence is not None else None
                if sequence is None or peer is None or peer.link is not sequence.link:
                    if sequence is not None and peer is not None:
                        sequence.forget(PeerLost(peer.reason.message, address=peer.address))
                    self._exchange.remove(session_id)
            self._lock.notify_all()
