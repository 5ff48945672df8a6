"""The gateway's ties to a service and its replicas: who is there, which of them fits, and which a session goes to.

A link makes a handshake with its service until it answers, opens the stream that carries all sessions, watches it, and
begins again when it was away, because the next incarnation may be another model. A service that answers but does not
fit is treated as absent, says why once in the log, and is looked at again now and then. A handshake cannot show whether
a service works, because a process whose device hangs still says who it is. Only real work proves it well again, so a
circuit breaker that all requests share tries work, by one session at a time and ever more seldom.

Of several replicas the first that can be used is taken: this is failover, not balancing, so that the caches of a
service stay warm and the figures that the policy learns are those of one machine. A gateway without any target takes no
new clients, though requests that run wait for one. A missing draft changes nothing, because it only makes answers
slower.
"""

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import grpc
import structlog

from gateway.sessions.stream import Frame, LinkStream
from outrider.errors import OutriderError, PeerLost, ProtocolViolation, shown
from outrider.generation_defaults import OperatorDefaults
from outrider.parameters import GenerationDefaults, Rule
from outrider.process import telemetry
from outrider.process.metrics import Tally
from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import (
    FRAME_BYTES,
    HEALTH_LOOK_S,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    open_link_channel,
)
from outrider.rpc.errors import error_from
from outrider.rpc.messages import defaults_from, rules_from
from outrider.rpc.tls import ClientRefused, TlsFailed, TlsFiles, refusal
from outrider.v1 import model_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.draft_service_pb2 import DraftServiceLinkRequest
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from outrider.v1.target_service_pb2 import TargetServiceLinkRequest
from outrider.v1.target_service_pb2_grpc import TargetServiceStub

# Bounds of the time of a Rollback, which waits for the step that is running; the last is longer than its timeout.
ROLLBACK_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ROLES = {pb.SERVICE_ROLE_DRAFT: "draft", pb.SERVICE_ROLE_TARGET: "target"}
# What begins a call of each role on a channel, and its frames.
CALLS: Mapping[str, tuple[Callable[[grpc.aio.Channel], Any], Frame]] = {
    "draft": (lambda channel: DraftServiceStub(channel).Link(), DraftServiceLinkRequest),
    "target": (lambda channel: TargetServiceStub(channel).Link(), TargetServiceLinkRequest),
}
HANDSHAKE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
ROLLBACK_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
# Failures in a row that open the breaker, and pauses between trials. A draft may be late now and then, and requests do
# without it; a target is late only when it hangs, and then there is nothing else that a request could do.
BREAKERS = {"draft": (2, (0.5, 10.0)), "target": (1, (0.0, 0.0))}
# Most bytes of a message. A draft's answer has up to 32 rows, each with a distribution of 256 entries: 70 KB.
MAX_BYTES = {"draft": 2 * FRAME_BYTES, "target": MAX_MESSAGE_BYTES}
# A draft answers what it is asked. How far a target may go on unasked, its sessions know.
MAX_UNASKED = {"draft": 64.0, "target": math.inf}
MISFIT_LOOK_S = 5.0  # between two looks at a service that does not fit: at one address another may come
MAX_NAME_LEN, MAX_OFFERS = 1024, 64  # of a model, and drafters
DRAFTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TRIAL_COST = 0.05  # share of the time that trials may cost; pauses grow beyond the longest where they are dear
# Links and breakers change with time and in several places, so who waits for them looks now and then.
LOOK_S = 0.02

log = structlog.get_logger()


class WrongService(OutriderError):
    """The operator must give another address, or another version of the service there."""

    status = "FAILED_PRECONDITION"
    reason = "WRONG_SERVICE"
    exit_code = 78


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a service that the gateway needs; see GetModelInfoResponse."""

    role: str
    instance_id: int
    model_name: str
    model_hash: str
    numerics_id: str
    context_len: int
    vocabulary_size: int
    vocabulary_digests: tuple[int, ...]
    eos_token_ids: frozenset[int]
    max_draft_count: int
    unacknowledged_window: int
    kv_tokens: int  # what the key-value cache holds when no other request is in it
    drafters: Mapping[str, frozenset[Rule]]  # the rules that each can serve
    tree_drafters: frozenset[str] = frozenset()  # those that make trees
    grammar_engine: str = ""  # what compiles grammars there; empty where none is served
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)  # its own, under those of the operator


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of a session: the weights with which it began, and room for its longest sequence."""

    model_hash: str
    max_len: int
    grammar_engine: str = ""
    """Compiler of its grammar; empty for a session without one."""

    def met_by(self, info: ModelInfo) -> bool:
        is_engine = self.grammar_engine in {"", info.grammar_engine}
        return (
            is_engine and info.model_hash == self.model_hash and self.max_len <= min(info.context_len, info.kv_tokens)
        )


class ServiceLink:
    """Channel, handshake and stream of one service."""

    def __init__(
        self,
        role: str,
        address: str,
        check: Callable[[ModelInfo], None],
        channel: grpc.aio.Channel | None = None,
        tls: TlsFiles | None = None,
        defaults: OperatorDefaults | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        """Takes "draft" or "target", and a check that raises an OutriderError when the service does not fit. `defaults`
        count over those of its model.

        The link closes its channel, which is made from the address unless one is given, and again when the files of
        `tls` have been replaced and the service is away.
        """
        self.role = role
        self.address = address
        self.mismatch: OutriderError | None = None
        self.refusal: TlsFailed | ClientRefused | None = None
        """Reason why there is no connection to a service that is there."""
        self.breaker = CircuitBreaker(*BREAKERS[role])
        self.rollback_seconds = Tally(ROLLBACK_S)
        self.rolled_back_tokens = 0  # that the service's cache lost by Rollback
        self.model_hash = ""
        """Model hash of the service when it was there last and did fit; empty before."""
        self.faults = 0  # of what it sent, that no service may send
        self._info: ModelInfo | None = None
        self._instance_id = 0
        self._stream: LinkStream | None = None
        self._check = check
        self._defaults = defaults or OperatorDefaults()
        self._tls = tls
        # A channel that was given need not lead to the address, so no handshake is tried there.
        self._has_address = channel is None
        self._use(channel or open_link_channel(address, tls, MAX_BYTES[role]))
        self._probe: asyncio.Task[float | None] | None = None
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        watching = (upkeep or Upkeep()).keep(f"{role} link {address}", self._watch)
        self._monitor = asyncio.create_task(watching, name=f"{role} link")

    def __str__(self) -> str:
        return f"The {self.role} service at {self.address}"

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the service; None while it is away or does not fit."""
        return self._info if self._stream is not None and self._stream.end is None else None

    def present(self) -> ModelInfo:
        """Facts like those of `info`; raises PeerLost while the service is away, or the reason why it does not fit."""
        if self.info is None:
            # Raised for many requests; with what it was raised through before it would keep what each of them held.
            raise (self.mismatch or self.lost()).with_traceback(None)
        return self.info

    def lost(self) -> PeerLost:
        """Error that the service is away, with the reason where there is one that an operator has to mend."""
        reason = "" if self.refusal is None else f": {self.refusal.message}"
        return PeerLost(f"{self} cannot be reached{reason}", address=self.address)

    def stream(self) -> LinkStream:
        """The call that carries sessions; raises as `present`."""
        self.present()
        if self._stream is None:
            raise self.lost()
        return self._stream

    def report_lost(self, stream: LinkStream) -> None:
        """Takes a session's report that it lost its service there; it counts as away until the next handshake."""
        if stream is self._stream:
            self._info = None
            self._lost.set()

    async def settled(self, timeout_s: float) -> bool:
        """Waits while the service is away; returns whether it answered in time, fitting or not."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        return self._settled.is_set()

    async def rollback(self, fence: types_pb2.Fence, cached_len: int) -> pb.RollbackResponse:
        """Takes a session back to the fence's length, where so much was cached; raises what the service answered, and
        ProtocolViolation about what cannot be an answer.
        """
        clock_s = asyncio.get_running_loop().time
        started_s = clock_s()
        try:
            with telemetry.span("Rollback", service=self.role, base_len=fence.base_len):
                request, metadata = pb.RollbackRequest(fence=fence), telemetry.carrier()
                response = await self._models.Rollback(request, timeout=ROLLBACK_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from error
        finally:
            self.rollback_seconds.add(clock_s() - started_s)
        # None is how grpc.aio says that a message could not be parsed.
        if response is None or not 0 <= response.cached_len <= response.fence.base_len <= fence.base_len:
            raise ProtocolViolation(f"{self} says after a Rollback to {fence.base_len} tokens what cannot be left")
        self.rolled_back_tokens += max(0, cached_len - response.cached_len)
        return response

    async def stalled_s(self) -> float | None:
        """Seconds for which the device has had work and finished none; no end of them for a service that is not there.

        None when it takes no new calls. It may be draining, and finish what is under way; if it has ended, every stream
        says so itself.
        """
        if self._probe is None or self._probe.done():
            # All sessions that begin to doubt at the same time share one question.
            self._probe = asyncio.create_task(self._stalled_s(), name=f"{self.role} probe")
        return await asyncio.shield(self._probe)

    async def _stalled_s(self) -> float | None:
        try:
            answer = await self._models.GetModelInfo(pb.GetModelInfoRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("service does not answer", service=self.role, address=self.address, status=error.code().name)
            return None if error.code() is grpc.StatusCode.UNAVAILABLE else math.inf
        is_same = answer is not None and answer.instance_id == self._instance_id
        return answer.stalled_us / 1e6 if is_same else math.inf

    async def close(self) -> None:
        """Ends the watch, lets sessions that are ending say so, and closes the channel."""
        ending = {self._monitor, *filter(None, [self._probe])}
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        if self._stream is not None:
            await self._stream.close()
        await self.channel.close()

    async def _watch(self) -> None:
        """Watches for ever: a handshake, tried ever more slowly and not in step with other gateways, and then a wait
        until a session reports a loss, or stream or connection are no longer up.
        """
        loop, (first_s, longest_s) = asyncio.get_running_loop(), BACKOFF_S
        stream_delay_s = 0.0
        while True:
            delay_s = first_s
            while not await self._handshake():
                await self._renew()
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, longest_s)
            began_s = loop.time()
            # What sessions have reported in the meantime is the loss that is over now.
            self._lost.clear()
            self._settled.set()
            ends = [self._lost.wait(), self.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)]
            if self._info is None:
                ends.append(asyncio.sleep(MISFIT_LOOK_S))
            elif self._stream is not None:
                ends.append(self._stream.ended.wait())
            tasks = {asyncio.ensure_future(end) for end in ends}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            misfit, self._info = self.mismatch, None
            await self._renew()
            self._settled.clear()
            if misfit is None:
                log.warning("service lost", service=self.role, address=self.address)
                self.faults += self._stream is not None and self._stream.is_at_fault
            if loop.time() - began_s > longest_s:
                stream_delay_s = 0.0
            elif self._stream is not None and self._stream.end is not None:
                # A stream that breaks is opened again at once, but not for ever where each ends as soon as it begins.
                await asyncio.sleep(stream_delay_s * random.uniform(0.5, 1.0))
                stream_delay_s = min(max(2 * stream_delay_s, first_s), longest_s)

    async def _handshake(self) -> bool:
        """Makes one handshake; returns whether the service answered, fitting or not."""
        try:
            info = self._read(await self._models.GetModelInfo(pb.GetModelInfoRequest(), timeout=HANDSHAKE_TIMEOUT_S))
            self._check(info)
        except grpc.aio.AioRpcError as error:
            log.debug("service not reachable", service=self.role, address=self.address, status=error.code().name)
            tls = None if self._tls is None else self._tls.tls
            refused = await refusal(error, self.address, tls) if self._has_address else None
            if refused is not None and str(refused) != str(self.refusal):
                log.warning("service refused", service=self.role, address=self.address, reason=refused.message)
            self.refusal, self.mismatch = refused, None
            return False
        except OutriderError as error:
            if self.mismatch is None or self.mismatch.message != error.message:
                log.warning("service does not fit", service=self.role, address=self.address, reason=error.message)
            self.mismatch = error
            return True
        if info.instance_id != self._instance_id:
            self._instance_id = info.instance_id
            self.breaker.renew()
        await self._connect(info)
        if self.model_hash not in {"", info.model_hash}:
            hashes = {"before": self.model_hash, "now": info.model_hash}
            log.warning("service has other weights", service=self.role, address=self.address, **hashes)
        self._info, self.model_hash = info, info.model_hash
        self.mismatch = self.refusal = None
        log.info("service present", service=self.role, address=self.address, model=info.model_name)
        return True

    def _use(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._models = ModelServiceStub(channel)
        begin, self._frame_type = CALLS[self.role]
        self._begin = partial(begin, channel)

    async def _renew(self) -> None:
        """A channel with the certificate as it is now, unless the one before still carries sessions."""
        is_carrying = self._stream is not None and self._stream.end is None
        if self._tls is None or is_carrying or not self._tls.renew():
            return
        before = self.channel
        self._use(open_link_channel(self.address, self._tls, MAX_BYTES[self.role]))
        # Calls that have begun there end within their own time.
        await before.close(ROLLBACK_TIMEOUT_S)

    async def _connect(self, info: ModelInfo) -> None:
        """A stream to this incarnation; one that works already is kept, with the sessions that it carries."""
        stream = self._stream
        if stream is not None and stream.end is None and stream.instance_id == info.instance_id:
            return
        if stream is not None:
            await stream.close()
        max_unasked = MAX_UNASKED[self.role]
        self._stream = LinkStream(self._begin(), self._frame_type, str(self), info.instance_id, max_unasked)

    def _read(self, answer: pb.GetModelInfoResponse | None) -> ModelInfo:
        if answer is None:
            # This is how grpc.aio says that a message could not be parsed.
            raise WrongService(f"{self} answered with a message that is not valid", address=self.address)
        version = answer.protocol_version
        if version != PROTOCOL_VERSION:
            message = f"{self} speaks version {version} of the protocol, but version {PROTOCOL_VERSION} is needed"
            raise WrongService(message, address=self.address, protocol_version=version)
        role = ROLES.get(answer.role, "unknown")
        if role != self.role:
            message = f"A {role} service answers at {self.address}, but a {self.role} service is wanted there"
            raise WrongService(message, address=self.address, role=role)
        # What a draft recommends is not used.
        own = GenerationDefaults() if role == "draft" else defaults_from(answer.generation_defaults)
        fault = _fault_of(answer)
        if fault:
            raise WrongService(f"{self} says of itself what cannot be: {fault}", address=self.address)
        return ModelInfo(
            role=role,
            instance_id=answer.instance_id,
            model_name=answer.model_name,
            model_hash=answer.model_hash,
            numerics_id=answer.numerics_id,
            context_len=answer.context_len,
            vocabulary_size=answer.vocabulary_size,
            vocabulary_digests=tuple(answer.vocabulary_digests),
            eos_token_ids=frozenset(answer.eos_token_ids),
            max_draft_count=answer.max_draft_count,
            unacknowledged_window=answer.unacknowledged_window,
            kv_tokens=answer.block_count * answer.block_size,
            drafters={offer.name: rules_from(offer.rules) for offer in answer.drafter_offers},
            tree_drafters=frozenset(offer.name for offer in answer.drafter_offers if offer.makes_trees),
            grammar_engine=answer.grammar_engine,
            defaults=self._defaults.over(own),
        )


def _fault_of(answer: pb.GetModelInfoResponse) -> str:
    """Fault in what a service says of itself, that none can say or that would fill logs and metrics; empty for none."""
    for each, value in answer.ListFields():
        if isinstance(value, str) and len(value) > MAX_NAME_LEN:
            return f"its {each.name} has {len(value)} characters"
    for name in ("context_len", "max_draft_count"):
        if getattr(answer, name) < 1:
            return f"its {name} is {getattr(answer, name)}"
    if len(answer.drafter_offers) > MAX_OFFERS:
        return f"it offers {len(answer.drafter_offers)} drafters"
    odd = next((offer.name for offer in answer.drafter_offers if not DRAFTER_NAME.fullmatch(offer.name)), None)
    return "" if odd is None else f"it offers a drafter {shown(odd)}"


class Replicas:
    """Links of one role, one or more."""

    def __init__(self, links: Sequence[ServiceLink]) -> None:
        self.links = tuple(links)

    def __str__(self) -> str:
        if len(self.links) == 1:
            return str(self.links[0])
        return f"The {self.links[0].role} services at {', '.join(link.address for link in self.links)}"

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the first present service that takes new requests; None while all are away."""
        return next((link.info for link in self.links if self.fits(link)), None)

    def fits(self, link: ServiceLink) -> bool:
        """Whether new requests may go there."""
        return link.info is not None

    @property
    def left_out(self) -> list[str]:
        """About those that are there and get no new requests, a sentence each."""
        return []

    @property
    def mismatch(self) -> OutriderError | None:
        """Reason why the first service that answered but does not fit is not used."""
        return next((link.mismatch for link in self.links if link.mismatch is not None), None)

    @property
    def state(self) -> Literal["present", "absent", "misfit"]:
        """Whether one is there that fits, none, or none that fits."""
        if self.info is not None:
            return "present"
        return "absent" if self.mismatch is None else "misfit"

    @property
    def refusal(self) -> OutriderError | None:
        """Reason why there is no connection to the first service that is there and takes none."""
        return next((link.refusal for link in self.links if link.refusal is not None), None)

    def present(self) -> ModelInfo:
        """Facts like those of `info`; raises PeerLost while all are away, or the reason why none fits."""
        if self.info is None:
            raise (self.mismatch or self.lost()).with_traceback(None)
        return self.info

    def lost(self) -> PeerLost:
        """Error that all are away, with the first reason that an operator has to mend."""
        reason = "" if self.refusal is None else f": {self.refusal.message}"
        return PeerLost(f"{self} cannot be reached{reason}", address=self.links[0].address)

    def pick(self, session: object, need: Need | None = None, failed: ServiceLink | None = None) -> ServiceLink | None:
        """The first link that is present, meets the need, and is not blocked for the session by its breaker.

        The one that has just failed comes last: a service whose device hangs still answers a handshake.
        """
        links = sorted(self._meeting(need), key=lambda link: link is failed)
        return next((link for link in links if not link.breaker.blocks(session)), None)

    async def wait(self, session: object, need: Need, until_s: float, failed: ServiceLink | None = None) -> ServiceLink:
        """Waits for the link that `pick` finds, at most until the loop's clock says so; raises PeerLost then."""
        loop = asyncio.get_running_loop()
        while (link := self.pick(session, need, failed)) is None:
            if loop.time() >= until_s:
                raise self._reason(need)
            await asyncio.sleep(LOOK_S)
        return link

    async def settled(self, timeout_s: float) -> bool:
        """Waits until a service has answered, fitting or not; returns whether one did in time."""
        waits = {asyncio.create_task(link.settled(timeout_s)) for link in self.links}
        try:
            while waits:
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done):
                    return True
            return False
        finally:
            for task in waits:
                task.cancel()

    async def after_handshake(self, timeout_s: float) -> ModelInfo:
        """Facts like those of `present`, after a little wait for handshakes that are under way."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            if self.info or all(link.mismatch for link in self.links) or loop.time() >= until_s:
                return self.present()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links))

    def _meeting(self, need: Need | None) -> list[ServiceLink]:
        return [link for link in self.links if link.info and (need is None or need.met_by(link.info))]

    def _reason(self, need: Need) -> PeerLost:
        """Reason why there is none: all are away, none has the same weights, or room, or those that have hang."""
        if not any(link.info for link in self.links):
            return self.lost()
        if not any(link.info and link.info.model_hash == need.model_hash for link in self.links):
            return PeerLost(f"{self}: none has the model with which the request began", model_hash=need.model_hash)
        if not self._meeting(need):
            return PeerLost(f"{self}: none has room for the {need.max_len} tokens of the request", max_len=need.max_len)
        return PeerLost(f"{self} does not answer requests", address=self.links[0].address)


class Targets(Replicas):
    """Replicas of one model, that of the first in the list which has been there, as it was then.

    So what a seed says does not change when that one is gone. When it comes back with other weights, these count: it
    was replaced by who names it first. Requests that run go on wherever their own weights are.
    """

    @property
    def mismatch(self) -> OutriderError | None:
        """Mismatch of any replicas, and that those which are there have other weights."""
        strangers = self.left_out
        if strangers and self.info is None:
            return PeerLost(f"{self._first} cannot be reached, and {'; '.join(strangers)}", address=self._first.address)
        return super().mismatch

    @property
    def left_out(self) -> list[str]:
        """Sentences about the replicas with other weights."""
        wanted = self._first.model_hash
        return [
            f"{link} has other weights, with which no request begins (model hash {link.info.model_hash}, not {wanted})"
            for link in self.links
            if link.info is not None and not self.fits(link)
        ]

    def fits(self, link: ServiceLink) -> bool:
        """Whether it has the weights of the first one."""
        return link.info is not None and link.info.model_hash == self._first.model_hash

    async def tell_left_out(self) -> None:
        """Logs which of them are left out, when that changes; for ever."""
        told: list[str] = []
        while True:
            found = self.left_out
            for sentence in found:
                if sentence not in told:
                    log.warning("target left out", reason=sentence)
            told = found
            await asyncio.sleep(HEALTH_LOOK_S)

    @property
    def _first(self) -> ServiceLink:
        return next((link for link in self.links if link.model_hash), self.links[0])


class CircuitBreaker:
    """Opens after some failures in a row. While it is open every session is blocked, but now and then one on trial.

    Trials begin a pause after the failure before; pauses_s has the first pause and the longest. A session is known by
    any value that no other session has.
    """

    def __init__(
        self, failures_to_open: int, pauses_s: tuple[float, float], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.cause: type[Exception] | None = None  # what the last failure that counted was
        self._failures_to_open = failures_to_open
        self._clock_s = clock_s
        self._failures = 0
        self._first_s, self._longest_s = pauses_s
        self._pause_s = self._first_s
        self._resume_s = 0.0
        self._on_trial: object = None

    @property
    def is_open(self) -> bool:
        """Whether the service has failed so often that sessions do better without it."""
        return self._failures >= self._failures_to_open

    def blocks(self, session: object) -> bool:
        """Whether a session must leave the service alone now."""
        if not self.is_open or session == self._on_trial:
            return False
        return self._on_trial is not None or self._clock_s() < self._resume_s

    def enter(self, session: object) -> None:
        """A session that is not blocked asks the service for work; while the breaker is open it is on trial."""
        if self.is_open:
            self._on_trial = session

    def failed(self, session: object, cause: Exception, cost_s: float = 0.0) -> None:
        """The service failed a session, which lost cost_s. While open, only the one on trial says anything new."""
        if self.is_open:
            if session != self._on_trial:
                return
            self._pause_s = min(2 * self._pause_s, max(self._longest_s, cost_s / TRIAL_COST))
        self.cause = type(cause)
        self._failures += 1
        self._rest()

    def answered(self) -> None:
        """The service did its work: the breaker closes. Pauses only halve, so that a flapping one rests long."""
        self._failures, self._on_trial = 0, None
        self._pause_s = max(self._pause_s / 2, self._first_s)

    def left(self, session: object) -> None:
        """A session ended; if it was on trial, nothing was learnt, and the next trial comes after a pause."""
        if session == self._on_trial:
            self._rest()

    def renew(self) -> None:
        """Another incarnation of the service is there, which has not failed anybody yet."""
        self._failures, self._on_trial, self._pause_s = 0, None, self._first_s

    def _rest(self) -> None:
        self._on_trial = None
        self._resume_s = self._clock_s() + self._pause_s
