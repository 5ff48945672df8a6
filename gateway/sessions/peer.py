"""The gateway's tie to one service: who is there, whether it fits, and the link that carries its sessions.

A peer makes a handshake with its service until it answers, opens the link that carries all sessions, watches it, and
begins again when it was away, because the next incarnation may be another model. A service that answers but does not
fit is treated as absent, says why once in the log, and is looked at again now and then. A handshake cannot show whether
a service works, because a process whose device hangs still says who it is; see `breaker`.
"""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import structlog

from gateway.sessions.link import Frame, Link
from gateway.sessions.placement import LinkBook, LinkFigures, PlaceWish
from gateway.sessions.probe import ServiceProbe
from outrider.errors import InvalidRequest, OutriderError, PeerLost, ProtocolViolation, shown
from outrider.estimates.timing import ServiceLoad
from outrider.model_files.generation_defaults import OperatorDefaults
from outrider.parameters import GenerationDefaults, Rule
from outrider.process import telemetry
from outrider.process.metrics import Tally
from outrider.process.upkeep import Upkeep
from outrider.rpc.breaker import BREAKERS, CircuitBreaker
from outrider.rpc.channels import open_link_channel
from outrider.rpc.errors import error_from
from outrider.rpc.fencing import PROTOCOL_VERSION
from outrider.rpc.messages.round import load_from, news_from
from outrider.rpc.messages.rules import rules_from
from outrider.rpc.messages.session import defaults_from
from outrider.rpc.tls import ClientRefused, TlsFailed, TlsFiles, refusal
from outrider.rpc.wire import FRAME_BYTES, MAX_MESSAGE_BYTES
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
# What begins a call of each role on a channel, and its first frame.
CALLS: Mapping[str, tuple[Callable[[grpc.aio.Channel], Any], Frame]] = {
    "draft": (lambda channel: DraftServiceStub(channel).Link(), DraftServiceLinkRequest(reads_load=True)),
    "target": (
        lambda channel: TargetServiceStub(channel).Link(),
        TargetServiceLinkRequest(reads_load=True, wants_prefixes=True),
    ),
}
HANDSHAKE_TIMEOUT_S = 5.0
ROLLBACK_TIMEOUT_S = 5.0
BACKOFF_S = (0.1, 2.0)
# Most bytes of a message. A draft's answer has up to 32 rows, each with a distribution of 256 entries: 70 KB.
MAX_BYTES = {"draft": 2 * FRAME_BYTES, "target": MAX_MESSAGE_BYTES}
# A draft answers what it is asked. How far a target may go on unasked, its sessions know.
MAX_UNASKED = {"draft": 64.0, "target": math.inf}
TRIAL_S = 30.0  # in which other places are better than one that hung; then a session tries whether it works again
LOAD_S = 3.0  # after which a load is not believed any more; there are about three in this time
SILENT_S = 1.5  # without a frame, of a service that says its load each second
MISFIT_LOOK_S = 5.0  # between two looks at a service that does not fit: at one address another may come
MAX_NAME_LEN, MAX_OFFERS = 1024, 64  # of a model, and drafters
MAX_ROW_COSTS = 64  # numbers of rows of which a service says what they cost
DRAFTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

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
    block_size: int = 1  # tokens of a block of the cache
    tree_drafters: frozenset[str] = frozenset()  # those that make trees
    branch_drafters: frozenset[str] = frozenset()  # those that make branches
    grammar_engine: str = ""  # what compiles grammars there; empty where none is served
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)  # its own, under those of the operator
    row_costs: Mapping[int, int] = field(default_factory=dict)  # microseconds of its forwards, by their rows
    drafter_costs: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # of its drafters' models
    address: str = ""

    def makes_branches(self, drafter: str, rule: Rule) -> bool:
        """Whether a drafter, or with an empty name the usual one of a rule, makes branches under it."""
        usual = next((name for name, rules in self.drafters.items() if rule in rules), "")
        return rule.runs_ahead and (drafter or usual) in self.branch_drafters


@dataclass(slots=True)
class Rollbacks:
    """Calls of Rollback: their seconds, and the tokens that caches lost by them."""

    seconds: Tally = field(default_factory=partial(Tally, ROLLBACK_S))
    num_tokens: int = 0


class ServicePeer:
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
        name: str = "",
    ) -> None:
        """Takes "draft" or "target", and a check that raises an OutriderError when the service does not fit. `defaults`
        count over those of its model.

        The link closes its channel, which is made from the address unless one is given, and again when the files of
        `tls` have been replaced and the service is away. `name` is what certificates must say where that is not the
        host of the address.
        """
        self.role = role
        self.address = address
        self.mismatch: OutriderError | None = None
        self.refusal: TlsFailed | ClientRefused | None = None
        """Reason why there is no connection to a service that is there."""
        self.breaker = CircuitBreaker(*BREAKERS[role])
        self.rollbacks = Rollbacks()
        self.model_hash = ""
        """Model hash of the service when it was there last and did fit; empty before."""
        self.faults = 0  # of what it sent, that no service may send
        self.book = LinkBook(asyncio.get_running_loop().time())
        self.is_draining = False
        """Whether it said last, however long ago, that it opens no sessions any more; those that it has go on."""
        self.said: ServiceLoad | None = None
        """What it said of its load last, where that could be."""
        # Figures are scraped on other threads than the loop's.
        self._clock_s = asyncio.get_running_loop().time
        self._info: ModelInfo | None = None
        self._instance_id = 0
        self._link: Link | None = None
        self._former_links: list[Link] = []
        self._check = check
        self._defaults = defaults or OperatorDefaults()
        self._tls = tls
        self._name = name
        # A channel that was given need not lead to the address, so no handshake is tried there.
        self._has_address = channel is None
        self._use(channel or open_link_channel(address, tls, MAX_BYTES[role], name))
        self.probe = ServiceProbe(lambda: self._models.GetModelInfo(pb.GetModelInfoRequest()), str(self))
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        watching = (upkeep or Upkeep()).keep(f"{role} link {address}", self._watch)
        self._monitor = asyncio.create_task(watching, name=f"{role} link")

    def __str__(self) -> str:
        return f"The {self.role} service at {self.address}"

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the service; None while it is away or does not fit."""
        return self._info if self._link is not None and self._link.end is None else None

    @property
    def load(self) -> ServiceLoad | None:
        """How busy it is, as it said last; None where it has said nothing that can be, or not for some seconds."""
        load = self.said
        return load if load is not None and self._clock_s() - load.came_s <= LOAD_S and self.info is not None else None

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

    def link(self) -> Link:
        """The call that carries sessions; raises as `present`."""
        self.present()
        if self._link is None:
            raise self.lost()
        return self._link

    def figures(self, wish: PlaceWish, *, has_failed: bool = False, is_there: bool = False) -> LinkFigures:
        """What is known of it as a place for a session, which it has just lost or has not; or which is there already,
        and does not count itself.
        """
        now_s, link = asyncio.get_running_loop().time(), self._link
        info, load = self.info, self.load
        others = link.other_sessions if link is not None and now_s - link.spoke_s < LOAD_S else 0
        found = self.book.figures(self.address, wish, now_s, others - is_there)
        if info is not None and load is not None:
            found = found.heard(load, info.kv_tokens, info.block_size)
        return replace(
            found,
            numerics_id=self._info.numerics_id if self._info is not None else "",
            is_failing=self.breaker.is_open and self.breaker.rested_s() < TRIAL_S,
            is_silent=self.is_silent,
            has_failed=has_failed,
        )

    @property
    def is_silent(self) -> bool:
        """Whether it says nothing where one that works would: no load each second, if it says loads, and no answer to
        a question.
        """
        link = self._link if self.said is not None else None
        return self.probe.is_silent or (link is not None and self._clock_s() - link.spoke_s > SILENT_S)

    @property
    def has_sessions(self) -> bool:
        """Whether sessions are there, as far as they know."""
        return any(link.has_sessions for link in (*self._former_links, *filter(None, [self._link])))

    @property
    def is_settled(self) -> bool:
        """Whether the service has answered, fitting or not, and was not lost since."""
        return self._settled.is_set()

    def report_lost(self, link: Link) -> None:
        """Takes a session's report that it lost its service there; it counts as away until the next handshake."""
        if link is self._link:
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
            self.rollbacks.seconds.add(clock_s() - started_s)
        # None is how grpc.aio says that a message could not be parsed.
        if response is None or not 0 <= response.cached_len <= response.fence.base_len <= fence.base_len:
            raise ProtocolViolation(f"{self} says after a Rollback to {fence.base_len} tokens what cannot be left")
        self.rollbacks.num_tokens += max(0, cached_len - response.cached_len)
        return response

    async def close(self) -> None:
        """Ends the watch, lets sessions that are ending say so, and closes the channel."""
        self._monitor.cancel()
        await asyncio.wait({self._monitor})
        await self.probe.close()
        if self._link is not None:
            await self._link.close()
        await self.channel.close()

    async def _watch(self) -> None:
        """Watches for ever: a handshake, tried ever more slowly and not in step with other gateways, and then a wait
        until a session reports a loss, or the link ends, or without one the connection.
        """
        loop, (first_s, longest_s) = asyncio.get_running_loop(), BACKOFF_S
        link_delay_s = 0.0
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
            ends: list[Awaitable[object]] = [self._lost.wait()]
            if self._info is not None and self._link is not None:
                # A service that drains gives its connection up, perhaps before it says so; its link goes on.
                ends.append(self._link.ended.wait())
            else:
                ends.append(self.channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
                ends.append(asyncio.sleep(MISFIT_LOOK_S))
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
                self.faults += self._link is not None and self._link.is_at_fault
            if loop.time() - began_s > longest_s:
                link_delay_s = 0.0
            elif self._link is not None and self._link.end is not None:
                # A stream that breaks is opened again at once, but not for ever where each ends as soon as it begins.
                await asyncio.sleep(link_delay_s * random.uniform(0.5, 1.0))
                link_delay_s = min(max(2 * link_delay_s, first_s), longest_s)

    async def _handshake(self) -> bool:
        """Makes one handshake; returns whether the service answered, fitting or not."""
        try:
            info = self._read(await self._models.GetModelInfo(pb.GetModelInfoRequest(), timeout=HANDSHAKE_TIMEOUT_S))
            self._check(info)
        except grpc.aio.AioRpcError as error:
            log.debug("service not reachable", service=self.role, address=self.address, status=error.code().name)
            tls = None if self._tls is None else self._tls.tls
            refused = await refusal(error, self.address, tls, self._name) if self._has_address else None
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
            self.book = LinkBook(asyncio.get_running_loop().time(), info.kv_tokens, info.block_size)
        link = self._link
        if link is None or link.end is not None or link.instance_id != info.instance_id:
            # One that works already is kept, with the sessions that it carries.
            if link is not None:
                self._former_links = [each for each in (*self._former_links, link) if each.has_sessions]
                await link.close()
            self.said, self.is_draining = None, False
            hear, max_unasked = partial(_hear, self, info), MAX_UNASKED[self.role]
            self._link = Link(self._begin(), self._first, str(self), info.instance_id, max_unasked, hear)
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
        begin, self._first = CALLS[self.role]
        self._begin = partial(begin, channel)

    async def _renew(self) -> None:
        """A channel with the certificate as it is now, unless the one before still carries sessions."""
        is_carrying = self._link is not None and self._link.end is None
        if self._tls is None or is_carrying or not self._tls.renew():
            return
        before = self.channel
        self._use(open_link_channel(self.address, self._tls, MAX_BYTES[self.role], self._name))
        # Calls that have begun there end within their own time.
        await before.close(ROLLBACK_TIMEOUT_S)

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
            block_size=answer.block_size,
            drafters={offer.name: rules_from(offer.rules) for offer in answer.drafter_offers},
            tree_drafters=frozenset(offer.name for offer in answer.drafter_offers if offer.makes_trees),
            branch_drafters=frozenset(offer.name for offer in answer.drafter_offers if offer.makes_branches),
            grammar_engine=answer.grammar_engine,
            defaults=self._defaults.over(own),
            row_costs=_row_costs(answer.row_costs),
            drafter_costs={offer.name: _row_costs(offer.row_costs) for offer in answer.drafter_offers},
            address=self.address,
        )


def _hear(peer: ServicePeer, info: ModelInfo, message: types_pb2.ServiceLoad) -> bool:
    """Takes what a service says of its load; what none can say counts as a fault, and no session ends for it.

    Returns whether it is to say anew what is in its cache.
    """
    begins_anew = message.HasField("prefixes") and not _hear_prefixes(peer, message.prefixes)
    facts = {"service": peer.role, "address": peer.address}
    try:
        said = load_from(message, info.kv_tokens // max(1, info.block_size), asyncio.get_running_loop().time())
    except InvalidRequest as error:
        if not peer.faults:
            log.warning("load not believed", **facts, reason=error.message)
        peer.said, peer.faults = None, peer.faults + 1
        return begins_anew
    if said.is_draining and not peer.is_draining:
        log.info("service is stopping", **facts, left_s=said.drain_left_ms / 1000)
    peer.said, peer.is_draining = said, said.is_draining
    return begins_anew


def _hear_prefixes(peer: ServicePeer, message: types_pb2.PrefixNews) -> bool:
    """Takes what changed in a service's cache; returns False where it got that wrong for once, and so may say it anew.

    One that has never got it right would be asked for ever.
    """
    was_known = peer.book.pushed.is_known
    try:
        peer.book.hear(news_from(message))
    except InvalidRequest as error:
        if not peer.faults:
            log.warning("cached prefixes not believed", service=peer.role, address=peer.address, reason=error.message)
        peer.faults += 1
        return not was_known
    return True


def _row_costs(costs: Iterable[types_pb2.RowCost]) -> dict[int, int]:
    """Costs by rows that can be."""
    return {each.row_count: each.compute_us for each in costs if each.row_count >= 1 and each.compute_us >= 1}


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
    num_costs = max([len(answer.row_costs), *(len(each.row_costs) for each in answer.drafter_offers)])
    if num_costs > MAX_ROW_COSTS:
        return f"it says what {num_costs} numbers of rows cost, and {MAX_ROW_COSTS} at most are of use"
    odd = next((offer.name for offer in answer.drafter_offers if not DRAFTER_NAME.fullmatch(offer.name)), None)
    return "" if odd is None else f"it offers a drafter {shown(odd)}"
