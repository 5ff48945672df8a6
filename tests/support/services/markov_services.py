"""The twelve-word model in real gRPC servers that speak the protocol, and that misbehave on request.

The whole gateway over gRPC, in front of the services of the tiny model, whose twelve words a tokenizer knows.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import grpc
from support.services.markov import EOS, NUM_TOKENS, MarkovModel, branching_tree
from support.services.silences import DraftSilence
from tokenizers import Tokenizer, models, pre_tokenizers

from gateway.server import RunningGateway, start
from gateway.sessions.peer import ServicePeer
from gateway.settings import GatewaySettings
from outrider.errors import CacheFull, InvalidRequest, OutriderError, PeerLost
from outrider.model_files.vocabulary import Vocabulary
from outrider.rpc import channels
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from, session_error
from outrider.rpc.fencing import PROTOCOL_VERSION
from outrider.rpc.messages.tree import tree_from
from outrider.rpc.tls import TlsFiles
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import draft_service_pb2_grpc, model_service_pb2_grpc, target_service_pb2_grpc, types_pb2
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub


class Mischief(Enum):
    """One way to answer a request wrongly."""

    LATE = auto()  # not before a rollback
    FROZEN = auto()  # never, and rollbacks are not answered either
    SILENT = auto()  # never
    LOST = auto()  # the service says that the session is lost
    BROKEN = auto()  # the whole link breaks, without a word of the service's own
    FULL = auto()  # no cache blocks
    UNWANTED = auto()  # the drafter that the open names is not offered
    FORGET = auto()  # the session is unknown
    TOO_MANY = auto()
    OUTSIDE = auto()  # token ids past the vocabulary
    BAD_PARENTS = auto()
    FUTURE = auto()  # an answer to a message that was never sent
    STALE_FIRST = auto()  # an answer of an older epoch before the right one
    TWICE = auto()  # the right answer two times
    FLOOD = auto()  # the right answer, and the one of an older epoch, without end


SILENCES = (Mischief.LATE, Mischief.FROZEN, Mischief.SILENT)
GARBAGE = (Mischief.TOO_MANY, Mischief.OUTSIDE, Mischief.BAD_PARENTS, Mischief.FUTURE)


def refuse(mischief: Mischief | None) -> None:
    """Ends the session with an error that the service states, for the kinds of mischief that are one."""
    match mischief:
        case Mischief.LOST:
            raise PeerLost("gone")
        case Mischief.FULL:
            raise CacheFull("no blocks")
        case Mischief.UNWANTED:
            raise InvalidRequest("open.drafter", "oracle", "one of model, or empty")


def spoil(answer: draft_pb.ProposeResponse, mischief: Mischief | None) -> None:
    """Makes a right answer wrong, for the kinds of mischief that are one."""
    match mischief:
        case Mischief.FORGET:
            answer.tokens_wanted.known_len = 0
        case Mischief.TOO_MANY:
            answer.proposal.token_ids.extend([1] * (len(answer.proposal.token_ids) + 1))
        case Mischief.OUTSIDE:
            answer.proposal.token_ids[:] = [NUM_TOKENS]
        case Mischief.BAD_PARENTS:
            answer.proposal.parents[:] = [1] * len(answer.proposal.token_ids)
        case Mischief.FUTURE:
            answer.fence.base_len += 1


class Broken(Exception):
    """Ends the link of the session that raises it."""


def stale(right: draft_pb.ProposeResponse) -> draft_pb.ProposeResponse:
    """An answer of the epoch before, with other guesses."""
    answer = draft_pb.ProposeResponse()
    answer.CopyFrom(right)
    answer.fence.epoch -= 1
    answer.proposal.token_ids[:] = [1] * len(right.proposal.token_ids)
    return answer


MODEL = model_pb.DrafterOffer(name="model", rules=[types_pb2.ACCEPTANCE_RULE_MATCH])


TURNS_OF_A_FORWARD = 20  # of the event loop, in which a message may come; a device takes its time too
MAX_UNSENT = 64  # answers of one link; more have to wait for it
Request = draft_pb.ProposeRequest | target_pb.VerifyRequest
Response = draft_pb.ProposeResponse | target_pb.VerifyResponse


class Taking(ABC):
    """A session as its link sees it."""

    has_next: Callable[[], bool]
    """Whether the next message has come."""

    @abstractmethod
    def take(self, request: Any) -> AsyncIterator[Response]:
        """Answers a message; raises an OutriderError that ends the session, or Broken."""


@dataclass
class Running:
    """A session of a link."""

    epoch: int
    inbox: "asyncio.Queue[Request]"
    task: "asyncio.Task[None]"


class MarkovLink:
    """One link: a task for each session, and what all of them have to say."""

    def __init__(self, service: "Service") -> None:
        self.unsent: asyncio.Queue[Response | Exception | None] = asyncio.Queue(MAX_UNSENT)
        self._service = service
        self._sessions: dict[bytes, Running] = {}
        self._parts: dict[bytes, list[int]] = {}

    async def read(self, frames: AsyncIterator[Any]) -> None:
        """Gives messages to their sessions until the gateway ends the link."""
        try:
            async for frame in frames:
                if frame.requests:
                    self._service.frames.append(frame)
                else:
                    self._service.greetings += 1
                for request in frame.requests:
                    await self._take(request)
                await self._service.reading.wait()
        except Exception as error:  # noqa: BLE001 - whatever the gateway did wrong must end the link
            await self.unsent.put(error)
        await self.unsent.put(None)

    def end(self) -> None:
        """Ends all sessions."""
        for session_id in list(self._sessions):
            self._drop(session_id)

    async def _take(self, request: Request) -> None:
        service, session_id, epoch = self._service, request.fence.session_id, request.fence.epoch
        running, action = self._sessions.get(session_id), request.WhichOneof("action")
        if action == "part":
            known = self._parts.setdefault(session_id, [])
            assert request.part.start == len(known)
            known += request.part.token_ids
        elif action == "close":
            self._parts.pop(session_id, None)
            if running is not None and epoch >= running.epoch:
                self._drop(session_id)
                service.closed += 1
                service.last_closed_epoch = epoch
        elif action == "open":
            request = self._whole(request)
            if running is None or epoch > running.epoch:
                self._drop(session_id)
                service.opens.append(request.open.session)
                service.sessions += 1
                inbox: asyncio.Queue[Request] = asyncio.Queue()
                running = Running(epoch, inbox, asyncio.create_task(self._run(session_id, inbox)))
                self._sessions[session_id] = running
            running.inbox.put_nowait(request)
        elif running is None:
            wanted = types_pb2.TokensWanted(known_len=0)
            await self.unsent.put(service.response(fence=request.fence, tokens_wanted=wanted))
        elif epoch >= running.epoch:
            running.epoch = epoch
            running.inbox.put_nowait(request)

    def _whole(self, request: Request) -> Request:
        """An open with the tokens of its parts."""
        whole = type(request)()
        whole.CopyFrom(request)  # type: ignore[arg-type]
        earlier = self._parts.pop(request.fence.session_id, [])
        assert whole.open.session.part_len == len(earlier)
        whole.open.session.token_ids[:] = [*earlier, *whole.open.session.token_ids]
        return whole

    async def _run(self, session_id: bytes, inbox: asyncio.Queue[Request]) -> None:
        session = self._service.session()
        session.has_next = lambda: not inbox.empty()
        try:
            while True:
                request = await inbox.get()
                async for response in session.take(request):
                    await self.unsent.put(response)
        except OutriderError as error:
            self._drop(session_id, cancel=False)
            await self.unsent.put(self._service.response(fence=request.fence, error=session_error(error)))
        except Exception as error:  # noqa: BLE001 - Broken, or what the gateway did wrong
            await self.unsent.put(error)

    def _drop(self, session_id: bytes, *, cancel: bool = True) -> None:
        running = self._sessions.pop(session_id, None)
        if running is not None:
            self._service.sessions -= 1
            if cancel:
                running.task.cancel()


@dataclass
class Service(model_service_pb2_grpc.ModelServiceServicer, ABC):
    """What both services know about themselves.

    `sessions` and `open_links` count those that are open, `opens` and `links` have all that ever were; `frames` has all
    that came with messages, `greetings` counts those without, and while `reading` is not set no more are taken than
    one; `link` is the newest.
    """

    role: "model_pb.ServiceRole.ValueType"
    model: MarkovModel
    digests: tuple[int, ...] = (7,)
    instance_id: int = 1
    context_len: int = 512
    block_count: int = 64
    protocol_version: int = PROTOCOL_VERSION
    vocabulary_size: int = NUM_TOKENS
    max_draft_count: int = 8
    mischief: dict[int, Mischief] = field(default_factory=dict)
    answers: int = 0
    sessions: int = 0
    links: int = 0
    open_links: int = 0
    opens: list[types_pb2.OpenSession] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    greetings: int = 0
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    link: MarkovLink | None = None
    drafters_wanted: list[str] = field(default_factory=list)
    closed: int = 0
    last_closed_epoch: int = 0
    rollbacks: list[int] = field(default_factory=list)
    rolled_back: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    max_acknowledged: int = 0
    stalled_us: int = 0
    grammar_engine: str = ""
    model_hash: str = "hash"
    numerics_id: str = "markov"
    drift: int = 0

    def __post_init__(self) -> None:
        self.reading.set()

    @abstractmethod
    def session(self) -> Taking:
        """A session that has not been opened yet."""

    @abstractmethod
    def response(self, **fields: Any) -> Response:
        """A message to the gateway about one session."""

    @abstractmethod
    def frame(self, responses: list[Response]) -> Any:
        """What one message on the link is made of."""

    async def Link(self, frames: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        """Carries all sessions of a gateway; each of them ends with it."""
        self.links += 1
        self.open_links += 1
        link = self.link = MarkovLink(self)
        reading = asyncio.create_task(link.read(frames))
        try:
            while True:
                said = [await link.unsent.get()]
                while not link.unsent.empty():
                    said.append(link.unsent.get_nowait())
                responses = [each for each in said if isinstance(each, Response)]
                if responses:
                    await context.write(self.frame(responses))
                ends = [each for each in said if isinstance(each, Exception)]
                if any(isinstance(each, Broken) for each in ends):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed (recvmsg:...)")
                if ends:
                    raise ends[0]
                if None in said:
                    return
        finally:
            self.open_links -= 1
            reading.cancel()
            link.end()

    async def GetModelInfo(  # noqa: N802
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        """Describes the model."""
        return model_pb.GetModelInfoResponse(
            protocol_version=self.protocol_version,
            role=self.role,
            instance_id=self.instance_id,
            model_name="markov",
            model_hash=self.model_hash,
            numerics_id=self.numerics_id,
            stalled_us=self.stalled_us,
            context_len=self.context_len,
            vocabulary_size=self.vocabulary_size,
            vocabulary_digests=self.digests,
            eos_token_ids=[EOS],
            max_draft_count=self.max_draft_count,
            unacknowledged_window=16,
            block_size=16,
            block_count=self.block_count,
            grammar_engine=self.grammar_engine,
            drafter_offers=[MODEL] if self.role == model_pb.SERVICE_ROLE_DRAFT else [],
        )

    async def Rollback(  # noqa: N802
        self, request: model_pb.RollbackRequest, context: object
    ) -> model_pb.RollbackResponse:
        """Notes the epoch and lets a late answer go on."""
        if self.frozen:
            await asyncio.Event().wait()
        self.rollbacks.append(request.fence.epoch)
        self.rolled_back.set()
        return model_pb.RollbackResponse(fence=request.fence, cached_len=request.fence.base_len, job_stopped=True)

    @property
    def goes_silent(self) -> bool:
        """Whether what it is asked next gets no answer by itself."""
        return self.frozen or self.mischief.get(self.answers + 1) in SILENCES

    def next_mischief(self) -> Mischief | None:
        """What to do wrong with the answer that is due."""
        self.answers += 1
        return self.mischief.get(self.answers)

    def fence(self, request: types_pb2.Fence, base_len: int) -> types_pb2.Fence:
        """The fence of an answer."""
        return types_pb2.Fence(session_id=request.session_id, epoch=request.epoch, base_len=base_len)


@dataclass
class DraftServicer(Service, draft_service_pb2_grpc.DraftServiceServicer):  # type: ignore[misc]
    """Guesses with its own model and the shared noise.

    With `branching` it proposes trees with values: before each of its guesses a wrong sibling, as the first of the two.
    """

    branching: bool = False

    def session(self) -> Taking:
        return MarkovDraftSession(self)

    def response(self, **fields: Any) -> draft_pb.ProposeResponse:
        return draft_pb.ProposeResponse(**fields)

    def frame(self, responses: list[Response]) -> draft_pb.DraftServiceLinkResponse:
        return draft_pb.DraftServiceLinkResponse(
            responses=responses,  # type: ignore[arg-type]
            instance_id=self.instance_id,
            numerics_id=self.numerics_id,
        )

    async def answer(
        self, fence: types_pb2.Fence, token_ids: list[int], seed: int, count: int
    ) -> AsyncIterator[draft_pb.ProposeResponse]:
        """The answer, or what mischief makes of it."""
        mischief = self.next_mischief()
        refuse(mischief)
        if mischief is Mischief.LATE:
            await self.rolled_back.wait()
        if mischief in {Mischief.FROZEN, Mischief.SILENT}:
            self.frozen = mischief is Mischief.FROZEN
            await asyncio.Event().wait()
        answer = self.right_answer(fence, token_ids, seed, count)
        if mischief is Mischief.STALE_FIRST:
            yield stale(answer)
        spoil(answer, mischief)
        if mischief is Mischief.TWICE:
            yield answer
        yield answer

    def right_answer(
        self, fence: types_pb2.Fence, token_ids: list[int], seed: int, count: int
    ) -> draft_pb.ProposeResponse:
        """Response with so many guesses after the tokens."""
        prefix = list(token_ids)
        for _ in range(count // 2 if self.branching else count):
            prefix.append(self.model.draw(prefix, seed))
        proposal = types_pb2.TokenTree(token_ids=prefix[len(token_ids) :])
        if self.branching:
            tree = branching_tree(prefix[len(token_ids) :])
            proposal = types_pb2.TokenTree(token_ids=tree.token_ids, parents=tree.parents, values=tree.values)
        return draft_pb.ProposeResponse(
            fence=self.fence(fence, len(token_ids)),
            proposal=proposal,
            cached_len=len(token_ids) - self.drift,
            times=types_pb2.ComputeTimes(compute_us=10 * count),
        )


class MarkovDraftSession(Taking):
    """A draft session: the committed tokens."""

    def __init__(self, service: DraftServicer) -> None:
        self.service = service
        self.token_ids: list[int] = []
        self.seed = 0

    async def take(self, request: draft_pb.ProposeRequest) -> AsyncIterator[draft_pb.ProposeResponse]:
        """Answers with guesses after the tokens."""
        assert request.fence.base_len <= self.service.context_len
        if request.HasField("open"):
            self.service.drafters_wanted.append(request.open.drafter)
            self.token_ids, self.seed = list(request.open.session.token_ids), request.open.session.seed
            count = request.open.draft_count
        else:
            start = request.fence.base_len - len(request.advance.token_ids)
            assert start <= len(self.token_ids)
            self.token_ids[start:] = request.advance.token_ids
            count = request.advance.draft_count
        assert len(self.token_ids) == request.fence.base_len
        async for response in self.service.answer(request.fence, self.token_ids, self.seed, count):
            yield response


@dataclass
class TargetServicer(Service, target_service_pb2_grpc.TargetServiceServicer):  # type: ignore[misc]
    """Decides with its own draws, and goes on alone within its budget; with `numbered` it sends log-probabilities."""

    numbered: bool = False
    halted: int = 0

    def session(self) -> Taking:
        return MarkovSession(self)

    def response(self, **fields: Any) -> target_pb.VerifyResponse:
        return target_pb.VerifyResponse(**fields)

    def frame(self, responses: list[Response]) -> target_pb.TargetServiceLinkResponse:
        return target_pb.TargetServiceLinkResponse(
            responses=responses,  # type: ignore[arg-type]
            instance_id=self.instance_id,
            numerics_id=self.numerics_id,
        )


class MarkovSession(Taking):
    """A target session: the committed tokens and what has not been acknowledged yet."""

    def __init__(self, service: TargetServicer) -> None:
        self.service = service
        self.token_ids: list[int] = []
        self.session = types_pb2.OpenSession()
        self.limit = 0  # length up to which it goes on unasked
        self.finished = False
        self.forgotten = False
        self.asked: target_pb.VerifyRequest | None = None
        self.given: deque[target_pb.VerifyResponse] = deque(maxlen=MAX_UNSENT)
        self.unasked: dict[int, target_pb.VerifyResponse] = {}

    async def take(self, request: target_pb.VerifyRequest) -> AsyncIterator[target_pb.VerifyResponse]:
        """Answers a message: a verdict, and unasked ones until the next message comes; a repetition with the same."""
        if request == self.asked:
            for response in self.given:
                yield response
        else:
            self.asked = request
            self.given.clear()
            async for response in self._answers(request):
                self.given.append(response)
                yield response
        while len(self.token_ids) < self.limit and not self.finished and not self.forgotten:
            async for response in self.verdict(request.fence, types_pb2.TokenTree()):
                self.unasked[response.fence.base_len] = response
                self.given.append(response)
                yield response
            for _ in range(TURNS_OF_A_FORWARD):
                await asyncio.sleep(0)
            if self.has_next():
                return

    async def _answers(self, request: target_pb.VerifyRequest) -> AsyncIterator[target_pb.VerifyResponse]:
        action, base_len = request.WhichOneof("action"), request.fence.base_len
        self.unasked = {length: response for length, response in self.unasked.items() if length >= base_len}
        if action == "acknowledge":
            self.service.max_acknowledged = max(self.service.max_acknowledged, base_len)
            budget = request.acknowledge.plain_budget
            self.limit = base_len + 1 + min(budget, 15) if budget else base_len
            return
        step = request.open.step if action == "open" else request.step
        if action == "open":
            self.session = request.open.session
            self.token_ids = list(self.session.token_ids)
        self.limit = base_len + 1 + min(step.plain_budget, 15)
        if len(self.token_ids) > base_len:
            # It went on unasked before it was asked not to.
            self.service.halted += 1
            for response in self.unasked.values():
                yield response
            return
        assert len(self.token_ids) == base_len
        async for response in self.verdict(request.fence, step.proposal):
            yield response

    async def verdict(
        self, fence: types_pb2.Fence, proposal: types_pb2.TokenTree
    ) -> AsyncIterator[target_pb.VerifyResponse]:
        """Follows the tree along the target's draws, as far as they agree."""
        base_len, mischief, model = len(self.token_ids), self.service.next_mischief(), self.service.model
        response = target_pb.VerifyResponse(fence=self.service.fence(fence, base_len))
        if mischief is Mischief.FORGET:
            self.forgotten = True
            response.tokens_wanted.known_len = 0
            yield response
            return
        refuse(mischief)
        if mischief is Mischief.BROKEN:
            raise Broken
        if mischief is Mischief.FROZEN:
            await asyncio.Event().wait()
        rows: list[int] = []
        tree = tree_from(proposal, self.service.vocabulary_size, len(proposal.token_ids))
        while not self.finished:
            token_id = model.draw(self.token_ids, self.session.seed)
            if self.service.numbered:
                response.verdict.logprobs.add(logprob=model.logprob(self.token_ids[-1], token_id))
            self.token_ids.append(token_id)
            self.finished = token_id == EOS or len(self.token_ids) == self.session.max_len
            children = tree.children(rows[-1] if rows else 0)
            response.verdict.evaluated_count += bool(children)
            hits = [child for child in children if tree.token_ids[child - 1] == token_id]
            if not hits:
                response.verdict.next_token_id = token_id
                break
            rows.append(hits[0])
        response.verdict.accepted_rows[:] = rows
        response.cached_len = len(self.token_ids) - 1 - self.service.drift
        if self.finished:
            ended_by_eos = self.token_ids[-1] == EOS
            response.verdict.finish_reason = (
                types_pb2.FINISH_REASON_EOS if ended_by_eos else types_pb2.FINISH_REASON_LENGTH
            )
        yield response
        if mischief is Mischief.TWICE:
            yield response
        if mischief is Mischief.FLOOD:
            old = target_pb.VerifyResponse()
            old.CopyFrom(response)
            old.fence.epoch -= 1
            while True:
                yield old
                # Other sessions of the service have their turns.
                await asyncio.sleep(0)


@asynccontextmanager
async def serving(service: Service, listen: str = "127.0.0.1:0", tls: TlsFiles | None = None) -> AsyncIterator[str]:
    """Serves one of the two on a free port; yields its address. Leaving the context kills it at once."""
    add: dict[str, Callable[[grpc.aio.Server], None]] = {
        "outrider.v1.ModelService": lambda server: model_service_pb2_grpc.add_ModelServiceServicer_to_server(
            service, server
        )
    }
    if isinstance(service, DraftServicer):
        add["outrider.v1.DraftService"] = lambda server: draft_service_pb2_grpc.add_DraftServiceServicer_to_server(
            service, server
        )
    if isinstance(service, TargetServicer):
        add["outrider.v1.TargetService"] = lambda server: target_service_pb2_grpc.add_TargetServiceServicer_to_server(
            service, server
        )
    running = await channels.serve(listen, add, tls=tls)
    try:
        yield running.address
    finally:
        await running.stop(grace_s=0)


@asynccontextmanager
async def linked(service: Service) -> AsyncIterator[ServicePeer]:
    """A link to a served service that fits, after its handshake."""
    async with serving(service) as address:
        link = ServicePeer("target" if isinstance(service, TargetServicer) else "draft", address, lambda info: None)
        assert await link.settled(5)
        try:
            yield link
        finally:
            await link.close()


WORDS = ["<end>", "king", "queen", "fox", "ring", "sea", "wolf", "gold", "tower", "dwarf", "apple", "moon"]
SEED = 9


@dataclass
class MarkovStack:
    """A running gateway and its services."""

    gateway: RunningGateway
    target: TargetServicer
    draft: DraftServicer
    generate: Callable[..., "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"]

    async def run(self, request: pb.GenerateRequest) -> tuple[list[pb.Round], pb.Completion]:
        """All rounds and the completion, which must be the last message; raises what the gateway answered."""
        try:
            responses = [response async for response in self.generate(request)]
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        assert [response.WhichOneof("event") for response in responses[:-1]] == ["round"] * (len(responses) - 1)
        assert responses[-1].HasField("completion")
        return [response.round for response in responses[:-1]], responses[-1].completion


def write_tokenizer(folder: Path) -> str:
    """Writes a tokenizer of the twelve words into a folder, and gives the folder's name."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@asynccontextmanager
async def markov_stack(tokenizer: str, **changes: object) -> AsyncIterator[MarkovStack]:
    """Target, draft and gateway on free ports."""
    digests = Vocabulary.read(tokenizer).digests
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), digests)
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), digests)
    async with serving(target) as target_address, serving(draft) as draft_address:
        settings = GatewaySettings(target_address, tokenizer, draft_address, listen="127.0.0.1:0", rest_listen="")
        gateway = await start(replace(settings, **changes))  # type: ignore[arg-type]
        if "draft_deadline_max_s" not in changes:
            # Who is asked by one request at a time is waited for, unless it goes silent.
            object.__setattr__(gateway.backend, "draft_deadline", DraftSilence(draft))
        try:
            async with open_channel(gateway.address) as channel:
                yield MarkovStack(gateway, target, draft, GenerationServiceStub(channel).Generate)
        finally:
            await gateway.stop(0)


def request(max_tokens: int = 40, draft_count: int | None = 4, **fields: object) -> pb.GenerateRequest:
    """A request of two words with the test's seed."""
    speculation = pb.SpeculationSettings(draft_count=draft_count)
    fields = {"text": "fox sea", "seed": SEED, **fields}
    return pb.GenerateRequest(max_tokens=max_tokens, speculation=speculation, **fields)  # type: ignore[arg-type]
