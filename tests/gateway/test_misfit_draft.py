"""A gateway in front of a draft that does not fit serves plainly, says so, and takes one that fits when it comes."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from support.basics import eventually
from support.services.markov import NUM_TOKENS, MarkovModel
from support.services.markov_services import DraftServicer, TargetServicer, request, serving, write_tokenizer

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.errors import VocabularyMismatch
from outrider.model_files.vocabulary import Vocabulary
from outrider.rpc.channels import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

MISFITS: dict[str, tuple[str, Any]] = {
    "other tokens": ("digests", (7,)),
    "fewer tokens": ("vocabulary_size", NUM_TOKENS - 1),
    "a target": ("role", model_pb.SERVICE_ROLE_TARGET),
    "another version": ("protocol_version", 1),
    "no context": ("context_len", -1),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return write_tokenizer(tmp_path)


@pytest.fixture
async def life() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def gateway(
    life: AsyncExitStack, tokenizer: str, *drafts: DraftServicer
) -> tuple[Callable[[pb.GenerateRequest], Any], Callable[[], Any]]:
    """What asks a gateway in front of these drafts, and what reads its /ready."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(tokenizer).digests)
    address = await life.enter_async_context(serving(target))
    places = [await life.enter_async_context(serving(draft)) for draft in drafts]
    named = ",".join([places[0], *(f"draft{number}={place}" for number, place in enumerate(places[1:], start=2))])
    running = await start(
        GatewaySettings(address, tokenizer, named, listen="127.0.0.1:0", rest_listen="127.0.0.1:0", lookup=False)
    )
    life.push_async_callback(running.stop, 0)
    calls = GenerationServiceStub(await life.enter_async_context(open_channel(running.address)))
    http = await life.enter_async_context(httpx.AsyncClient(trust_env=False))

    async def ask(asked: pb.GenerateRequest) -> tuple[list[int], pb.Completion]:
        answers = [each async for each in calls.Generate(asked)]
        return [token.token_id for each in answers[:-1] for token in each.round.tokens], answers[-1].completion

    async def ready() -> dict[str, Any]:
        reply = await http.get(f"http://{running.rest_address}/ready")
        assert reply.status_code == 200
        found: dict[str, Any] = reply.json()
        return found

    return ask, ready


def draft_of(tokenizer: str) -> DraftServicer:
    """A draft that fits."""
    return DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), Vocabulary.read(tokenizer).digests)


@pytest.mark.slow
@pytest.mark.parametrize("misfit", MISFITS)
async def test_a_misfit_draft_is_no_reason_not_to_serve(
    misfit: str, life: AsyncExitStack, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that names its drafter or K has plain decoding; one warning says why, until a fitting one is there."""
    monkeypatch.setattr("gateway.sessions.peer.MISFIT_LOOK_S", 0.01)
    draft = draft_of(tokenizer)
    (name, wrong), right = MISFITS[misfit], getattr(draft, MISFITS[misfit][0])
    setattr(draft, name, wrong)
    with structlog.testing.capture_logs() as logged:
        ask, ready = await gateway(life, tokenizer, draft)
        assert (await ready())["draft"] == "misfit"
        plain, _ = await ask(request(draft_count=0))
        for fields in ({"draft_count": 4}, {"draft_count": None}):
            said, completion = await ask(request(**fields))  # type: ignore[arg-type]
            assert said == plain
            assert completion.speculation.draft_tokens == 0
        named = request()
        named.speculation.drafter = "model"
        assert (await ask(named))[0] == plain
        assert draft.answers == 0
        warnings = [entry["reason"] for entry in logged if entry["event"] == "service does not fit"]
        assert len(warnings) == 1, warnings
        setattr(draft, name, right)

        async def is_present() -> bool:
            return bool((await ready())["draft"] == "present")

        await eventually(is_present)
    said, completion = await ask(request())
    assert said == plain
    assert completion.speculation.draft_tokens > 0


async def test_one_misfit_of_several_drafts_leaves_the_others(life: AsyncExitStack, tokenizer: str) -> None:
    """The first guesses as it does alone, and readiness names each."""
    good, bad = draft_of(tokenizer), draft_of(tokenizer)
    bad.digests = (7,)
    ask, ready = await gateway(life, tokenizer, good, bad)
    assert await ready() | {"draft": "present", "further_drafts": {"draft2": "misfit"}} == await ready()
    plain, _ = await ask(request(draft_count=0))
    for drafters in (["draft2"], ["model", "draft2"]):
        both = request()
        both.speculation.drafters.extend(drafters)
        assert (await ask(both))[0] == plain
    assert good.answers > 0
    assert bad.answers == 0


async def test_a_misfit_target_still_keeps_the_gateway_from_starting(tokenizer: str) -> None:
    """Nothing can be served with it."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), (7,))
    async with serving(target) as address:
        with pytest.raises(VocabularyMismatch):
            await start(GatewaySettings(address, tokenizer, "", listen="127.0.0.1:0", rest_listen=""))


async def test_a_running_gateway_does_without_a_draft_that_comes_back_as_another(
    life: AsyncExitStack, tokenizer: str
) -> None:
    """Restarted with another model at its address, it is a misfit, and costs no request anything."""
    draft = draft_of(tokenizer)
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(tokenizer).digests)
    target_address = await life.enter_async_context(serving(target))
    first = await life.enter_async_context(AsyncExitStack())
    address = await first.enter_async_context(serving(draft))
    running = await start(GatewaySettings(target_address, tokenizer, address, listen="127.0.0.1:0", rest_listen=""))
    life.push_async_callback(running.stop, 0)
    assert running.backend.draft is not None
    peer = running.backend.draft.peers[0]
    calls = GenerationServiceStub(await life.enter_async_context(open_channel(running.address)))
    before = [each async for each in calls.Generate(request())]
    await first.aclose()
    other = draft_of(tokenizer)
    other.digests, other.instance_id = (7,), 2
    await life.enter_async_context(serving(other, address))
    await eventually(lambda: peer.mismatch is not None)
    after = [each async for each in calls.Generate(request())]
    assert [t.token_id for each in after for t in each.round.tokens] == [
        t.token_id for each in before for t in each.round.tokens
    ]
    assert other.answers == 0
