"""A whole stack in this process: real draft and target services, a gateway in front, all on free ports.

Many requests at a time run through it, and transformers says what the target alone would say.
"""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
import torch
import transformers

from draft_service.server import DraftSettings
from draft_service.server import start as start_draft
from gateway.server import RunningGateway
from gateway.server import start as start_gateway
from gateway.sessions.placement import LinkBook, LinkFigures, PlaceWish
from gateway.settings import GatewaySettings
from outrider.client import AsyncClient
from outrider.errors import NotReady
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.rpc.tls import TlsFiles
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from support.basics import eventually
from support.certificates import shown_by, tls_settings, trusting
from support.models.model_cases import logits_and_reach
from target_service.server import TargetSettings
from target_service.server import start as start_target

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
PATIENCE_S = 120.0
SAMPLING = frozenset(types_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
SPECULATION = frozenset(pb.SpeculationSettings.DESCRIPTOR.fields_by_name)


class ModelService(Protocol):
    """What a model service's `start` returns, as far as tests need it."""

    @property
    def address(self) -> str:
        """Where it answers."""

    async def stop(self, grace_s: float = ...) -> None:
        """Ends the process or server."""


@dataclass(frozen=True)
class Answer:
    """What came back to one request."""

    rounds: tuple[pb.Round, ...]
    completion: pb.Completion

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output's tokens."""
        return tuple(token.token_id for each in self.rounds for token in each.tokens)

    @property
    def text(self) -> str:
        """The output's text."""
        return "".join(each.text_delta for each in self.rounds) + self.completion.text_delta


def request_of(**fields: Any) -> pb.GenerateRequest:
    """A request from the fields of GenerateRequest, SamplingParameters and SpeculationSettings, all in one row.

    `token_ids` is a prompt of token ids; `draft_count=None` lets the gateway choose.
    """
    if "token_ids" in fields:
        fields["token_ids"] = types_pb2.TokenIds(token_ids=fields["token_ids"])
    sampling = types_pb2.SamplingParameters(**{name: fields.pop(name) for name in SAMPLING & set(fields)})
    speculation = pb.SpeculationSettings(**{name: fields.pop(name) for name in SPECULATION & set(fields)})
    return pb.GenerateRequest(sampling=sampling, speculation=speculation, **fields)


@dataclass
class RunningStack:
    """A running stack; `target` and `draft` are what the services' own `start` returned, for a look inside."""

    target_settings: TargetSettings
    draft_settings: DraftSettings | None
    target: Any = None
    draft: Any = None
    gateway: RunningGateway | None = None
    further_drafts: dict[str, Any] = field(default_factory=dict)
    further_targets: list[Any] = field(default_factory=list)
    certificates: Path | None = None
    """Folder of `support.certificates`, for gateway, target, draft and client; None for plaintext."""
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    clients: list[AsyncClient] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where the gateway answers over gRPC."""
        assert self.gateway is not None
        return self.gateway.address

    @property
    def targets(self) -> list[Any]:
        """All targets, of which `target` is the first."""
        return [self.target, *self.further_targets]

    @property
    def client(self) -> AsyncClient:
        """A client of the gateway, as users have one; closed with the stack."""
        if not self.clients:
            tls = None if self.certificates is None else trusting(self.certificates, "client")
            self.clients.append(AsyncClient(self.address, tls=tls))
        return self.clients[0]

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel that is closed with the stack."""
        if address not in self.channels:
            tls = None if self.certificates is None else TlsFiles(shown_by(self.certificates, "gateway"))
            self.channels[address] = open_channel(address, tls)
        return self.channels[address]

    def call(self, request: pb.GenerateRequest) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        """Begins a request, for tests that cancel it or look at its messages one by one."""
        assert self.gateway is not None
        return GenerationServiceStub(self.channel(self.gateway.address)).Generate(request)

    async def generate(self, **fields: Any) -> Answer:
        """Runs a request to its end; raises the OutriderError that the gateway answered."""
        call = self.call(request_of(**fields))
        try:
            responses = [response async for response in call]
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        assert responses[-1].HasField("completion")
        return Answer(tuple(response.round for response in responses[:-1]), responses[-1].completion)

    async def info(self, service: ModelService) -> model_pb.GetModelInfoResponse:
        """What a service says about itself now."""
        return await ModelServiceStub(self.channel(service.address)).GetModelInfo(model_pb.GetModelInfoRequest())

    async def quiet(self) -> None:
        """Waits until no service that is running holds a session or a block, and checks that their pools are whole."""
        for service in filter(None, (self.draft, *self.targets, *self.further_drafts.values())):
            await until_quiet(self.channel(service.address))
            pool = service.runner.pool
            await service.worker.call(pool.check_integrity)
            assert pool.num_free == pool.num_blocks

    async def stop_draft(self) -> None:
        """Ends the draft service at once; its sessions are lost."""
        await self.draft.stop(0)
        self.draft = None

    async def start_draft(self) -> None:
        """Starts the draft service, on its old port when it had one, and waits until the gateway has found it."""
        assert self.draft_settings is not None
        self.draft = await start_draft(self.draft_settings)
        self.draft_settings = replace(self.draft_settings, listen=self.draft.address)
        if self.gateway is not None and self.gateway.backend.draft is not None:
            assert await self.gateway.backend.draft.settled(PATIENCE_S)

    async def restart_target(self, number: int = 0) -> None:
        """Ends one of the targets at once, its sessions with it, and starts it again on its port."""
        ended = self.targets[number]
        await ended.stop(0)
        begun = await start_target(replace(self.target_settings, listen=ended.address))
        if number:
            self.further_targets[number - 1] = begun
        else:
            self.target = begun

    async def close(self) -> None:
        """Ends everything, the gateway first."""
        for open_one in (*self.channels.values(), *self.clients):
            await open_one.close()
        for running in filter(None, (self.gateway, self.draft, *self.targets, *self.further_drafts.values())):
            await running.stop(0)


async def until_quiet(channel: grpc.aio.Channel) -> None:
    """Waits until the service that a channel leads to holds no session and no block."""
    stub = ModelServiceStub(channel)

    async def is_quiet() -> bool:
        info = await stub.GetModelInfo(model_pb.GetModelInfoRequest())
        return info.session_count == 0 and info.free_block_count == info.block_count > 0

    await eventually(is_quiet)


# Of a gateway whose draft is never too late: what a machine does that others hold up for a moment is no part of a test.
PATIENT = {"draft_deadline_min_s": 60.0, "draft_deadline_max_s": 60.0}


@asynccontextmanager
async def running_stack(
    target: str = TARGET,
    draft: str | None = DRAFT,
    *,
    dtype: str = "bfloat16",
    threads: int = 1,
    kv_tokens: int = 32_768,
    gateway: Mapping[str, Any] | None = None,
    draft_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    further_drafts: Mapping[str, str] | None = None,
    further_targets: int = 0,
    certificates: Path | None = None,
) -> AsyncIterator[RunningStack]:
    """Starts a stack and stops it again. The options override settings of the one process each; further drafts are
    models by the names that the gateway gives their services, and further targets are like the first one. With
    certificates everybody speaks TLS, and the services with the gateway alone.

    At the end of a test that has not failed, both services must have come to rest, with nothing held and pools whole.
    """
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "dtype": dtype, "threads": threads, "kv_tokens": kv_tokens}
    secured = {"target": {}, "draft": {}, "gateway": {}} if certificates is None else tls_settings(certificates)
    stack = RunningStack(
        TargetSettings(target, **common | secured["target"] | dict(target_options or {})),
        DraftSettings(draft, **common | secured["draft"] | dict(draft_options or {})) if draft is not None else None,
        certificates=certificates,
    )
    try:
        stack.target = await start_target(stack.target_settings)
        for _ in range(further_targets):
            stack.further_targets.append(await start_target(stack.target_settings))
        if draft is not None:
            await stack.start_draft()
        for name, model in (further_drafts or {}).items():
            stack.further_drafts[name] = await start_draft(DraftSettings(model, **common))
        named = [f"{name}={each.address}" for name, each in stack.further_drafts.items()]
        address = ",".join([*([stack.draft.address] if stack.draft else []), *named])
        settings = GatewaySettings(
            ",".join(each.address for each in stack.targets), target, address, listen="127.0.0.1:0", rest_listen=""
        )
        stack.gateway = await start_gateway(replace(settings, **secured["gateway"] | dict(gateway or {})))
        yield stack
        await stack.quiet()
    finally:
        await stack.close()


def after_the_draft(stack: RunningStack) -> threading.Event:
    """Lets the target begin no step while the draft has something to compute, until the event is set."""
    worker, draft, ended = stack.target.worker, stack.draft, threading.Event()
    advance = worker._advance

    def advance_after(tasks: Sequence[Any]) -> bool:
        with suppress(NotReady):
            while not ended.is_set() and any(not (task.done or task.stopped) for task in draft.worker._active):
                ran = threading.Event()
                draft.worker.post(ran.set)
                ran.wait(0.1)
        return advance(tasks)  # type: ignore[no-any-return]

    worker._advance = advance_after
    return ended


class HaltedTarget:
    """The target makes so many forwards and no further one until it is let go: what it answers is in the middle.

    Jobs run all the same, so that it can be stopped. A target that is started in its place is not halted.
    """

    def __init__(self, stack: RunningStack, num_forwards: int = 0, target: Any = None) -> None:
        """Halts the first of several targets, unless another one is given."""
        self._left, self._is_free = num_forwards, False
        worker = (target or stack.target).worker
        advance = worker._advance

        def advance_unless_halted(tasks: Sequence[Any]) -> bool:
            if self._is_free:
                return advance(tasks)  # type: ignore[no-any-return]
            if not self._left:
                return False
            could_step: bool = advance(tasks)
            self._left -= could_step
            return could_step

        worker._advance = advance_unless_halted

    async def make(self, num_forwards: int = 0) -> None:
        """Lets it make so many further ones, and waits until all that it may make are made."""
        self._left += num_forwards
        await eventually(lambda: not self._left)

    def let_go(self) -> None:
        """It makes as many as it wants from now on."""
        self._is_free = True


AT_A_TIME = 16


async def answers(
    stack: RunningStack, prompts: Sequence[str], at_a_time: int = AT_A_TIME, **fields: Any
) -> list[Answer]:
    """The answers to all prompts, in order; each has its own seed, so that no two share their noise.

    Each call has its own salt: what is compared with another call's answers must not be served from its cached keys.
    """
    fields = {"cache_salt": secrets.token_hex()} | fields
    slots = asyncio.Semaphore(at_a_time)

    async def answer(seed: int, prompt: str) -> Answer:
        async with slots:
            return await stack.generate(text=prompt, seed=seed, **fields)

    return await asyncio.gather(*(answer(seed, prompt) for seed, prompt in enumerate(prompts)))


def token_ids(results: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Token ids of all answers."""
    return [result.token_ids for result in results]


@cache
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The model in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def greedy_reference(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers' own generate says to each prompt, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = reference_model(folder).generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        said.append(tuple(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return said


def first_difference_is_near_tie(folder: Path, prompt: str, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """None for equal tokens; else a description of the near-tie where they part. Fails when it is none: when rounding
    cannot have carried one logit above the other.
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((index for index, (mine, other) in pairs if mine != other), None)
    if place is None:
        assert len(ours) == len(theirs)
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer(prompt)["input_ids"] + list(theirs[:place])
    [logits], limit = logits_and_reach(reference_model(folder), prefix, len(prefix) - 1)
    gap = abs(float(logits[ours[place]] - logits[theirs[place]]))
    assert gap < 2 * limit, f"{prompt!r}: token {place} is {ours[place]} and not {theirs[place]}, {gap:.2e} apart"
    return f"{prompt!r}: token {place}, logits {gap:.1e} apart"


def make_places_as_fast(patch: pytest.MonkeyPatch) -> None:
    """Lets gateways forget what was measured of each place: what a busy machine made slow would not be one of them."""
    figures = LinkBook.figures

    def as_fast(self: LinkBook, address: str, wish: PlaceWish, now_s: float, others: int = 0) -> LinkFigures:
        return replace(figures(self, address, wish, now_s, others), step_us=None, row_us=None, prompt_token_us=None)

    patch.setattr(LinkBook, "figures", as_fast)
