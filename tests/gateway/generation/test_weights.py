"""Targets of one place are replaced one by one: a request begins with the weights of either, and ends with those."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import (
    SEED,
    DraftServicer,
    MarkovStack,
    Mischief,
    TargetServicer,
    serving,
)

from gateway.server import start
from gateway.sessions import replicas
from gateway.sessions.placement import LinkFigures, PlacedFor, Placement, PlaceWish
from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest, PeerLost
from outrider.model_files.vocabulary import Vocabulary
from outrider.rpc.channels import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

HASHES = ("one", "two")
SHORT_LEN = 40
FREE = "127.0.0.1:0"


@dataclass
class Replacing:
    """A gateway of a file that lists a target of the first weights; one of the second ones runs beside it."""

    stack: MarkovStack
    file: Path
    targets: dict[str, TargetServicer]
    addresses: dict[str, str]

    async def list(self, *hashes: str) -> None:
        """Lists the targets of these weights, and waits until the gateway has found them, and no others."""
        wanted = [self.addresses[each] for each in hashes]
        self.file.write_text("\n".join(wanted), encoding="utf-8")
        peers = self.stack.gateway.backend.target
        await eventually(lambda: [peer.address for peer in peers.peers if peer.info is not None] == wanted)

    async def ask(self, number: int, max_tokens: int | None = SHORT_LEN, draft_count: int = 4) -> str:
        """Checks the answer to a prompt of its own, and returns the hash of its weights."""
        prompt = (1 + number % 11, 1 + number // 11)
        asked = pb.GenerateRequest(
            token_ids=types_pb2.TokenIds(token_ids=prompt),
            seed=SEED,
            max_tokens=max_tokens,
            speculation=pb.SpeculationSettings(draft_count=draft_count),
        )
        rounds, completion = await self.stack.run(asked)
        said = prompt + tuple(token.token_id for each in rounds for token in each.tokens)
        target = self.targets[completion.model_hash]
        max_len = target.context_len if max_tokens is None else len(prompt) + max_tokens
        assert said == plain_decoding(target.model, prompt, SEED, max_len)
        return completion.model_hash

    @asynccontextmanager
    async def replaced_before(self, max_tokens: int | None) -> AsyncIterator[asyncio.Task[str]]:
        """A request that came while the first target was there alone, and has its place once there is the second one
        instead; one more place is free then.
        """
        admission = self.stack.gateway.frontend.admission
        async with AsyncExitStack() as places:
            held = [await places.enter_async_context(admission.entry()) for _ in range(admission.places)]
            asking = asyncio.create_task(self.ask(0, max_tokens))
            await eventually(lambda: admission.waiting == 1)
            await self.list("two")
            for each in held[:2]:
                admission.give_back(each)
            yield asking


async def replacing(tokenizer: str, folder: Path, stack: AsyncExitStack, first: str = "") -> Replacing:
    """With "one" as `first` that target is named before the file."""
    digests, file = Vocabulary.read(tokenizer).digests, folder / "targets"
    targets = {
        each: TargetServicer(
            model_pb.SERVICE_ROLE_TARGET, MarkovModel(number), digests, instance_id=number, model_hash=each
        )
        for number, each in enumerate(HASHES, 1)
    }
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), digests, instance_id=9)
    addresses = {each: await stack.enter_async_context(serving(target)) for each, target in targets.items()}
    guessing = await stack.enter_async_context(serving(draft))
    file.write_text(addresses["one"], encoding="utf-8")
    places = ",".join([*([addresses[first]] if first else []), f"file:{file}"])
    settings = GatewaySettings(
        places, tokenizer, guessing, max_requests=16, listen=FREE, rest_listen=FREE, rebuild_budget_seconds=2
    )
    gateway = await start(settings)
    stack.push_async_callback(gateway.stop, 0)
    channel = await stack.enter_async_context(open_channel(gateway.address))
    made = MarkovStack(gateway, targets["one"], draft, GenerationServiceStub(channel).Generate)
    return Replacing(made, file, targets, addresses)


@pytest.fixture
async def here(tokenizer: str, tmp_path: Path) -> AsyncIterator[Replacing]:
    async with AsyncExitStack() as stack:
        yield await replacing(tokenizer, tmp_path, stack)


async def test_both_have_a_share_of_the_requests(here: Replacing) -> None:
    """Each answer has the tokens of the weights that it names. Once the old ones have gone, the new ones have all."""
    targets = here.stack.gateway.backend.target
    await here.list("one", "two")
    assert targets.left_out == []
    for each in here.targets.values():
        each.reading.clear()
    asking = [asyncio.create_task(here.ask(number)) for number in range(12)]
    await eventually(lambda: sum(peer.book.session_count for peer in targets.peers) == len(asking))
    counts = {str(peer.model_hash): peer.book.session_count for peer in targets.peers}
    for each in here.targets.values():
        each.reading.set()
    answers = await asyncio.gather(*asking)
    assert {each: answers.count(each) for each in HASHES} == counts
    assert min(counts.values()) >= 4
    await here.list("two")
    assert {await here.ask(number) for number in range(4)} == {"two"}


async def test_an_answer_of_rest_names_its_own_weights(here: Replacing, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of the target that was there first."""
    await here.list("one", "two")
    monkeypatch.setattr(replicas, "choose", lambda places, wish: Placement(places[-1].address, PlacedFor.LOAD))
    async with httpx.AsyncClient(base_url=f"http://{here.stack.gateway.rest_address}") as http:
        body = {"model": "markov", "prompt": [3, 5], "max_tokens": 4}
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        events = (await http.post("/v1/completions", json=body | {"stream": True})).raise_for_status().text
    assert answer["system_fingerprint"].startswith("fp_two")
    assert events.count('"system_fingerprint":"fp_two') == events.count('"system_fingerprint"') > 0
    assert [len(each.opens) for each in here.targets.values()] == [0, 2]


@pytest.mark.parametrize("max_tokens", [None, 8])
async def test_a_request_that_waits_begins_with_the_weights_that_are_there_then(
    here: Replacing, max_tokens: int | None
) -> None:
    """It came while there were others, which have gone; its limits are those of the ones that it has."""
    here.targets["two"].context_len = SHORT_LEN
    async with here.replaced_before(max_tokens) as asking:
        assert await asking == "two"


async def test_a_request_for_which_there_was_no_room_does_not_go_with_its_weights(
    here: Replacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a target that is full, and has gone before it has room."""

    def full(places: Sequence[LinkFigures], wish: PlaceWish) -> Placement | None:
        if not places:
            return None
        return Placement(places[0].address, PlacedFor.LOAD, is_full=places[0].address == here.addresses["one"])

    await here.list("one", "two")
    monkeypatch.setattr(replicas, "choose", full)
    asking = asyncio.create_task(here.ask(0))
    await eventually(lambda: len(here.stack.gateway.backend.target.room) == 1)
    await here.list("two")
    assert await asking == "two"
    assert not here.targets["one"].opens


async def test_a_request_that_other_weights_cannot_serve_keeps_its_own(
    here: Replacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though these would be cheaper; it is refused only where there are no others."""
    here.targets["two"].max_draft_count = 4
    await here.list("one", "two")
    monkeypatch.setattr(replicas, "choose", lambda places, wish: Placement(places[-1].address, PlacedFor.LOAD))
    assert [await here.ask(0, draft_count=each) for each in (4, 5)] == ["two", "one"]
    await here.list("two")
    with pytest.raises(InvalidRequest, match="draft_count"):
        await here.ask(0, draft_count=5)


async def test_a_request_waits_for_room_of_its_weights_and_not_for_ever(here: Replacing) -> None:
    """The only place that is left has the same ones and less room; others are served there meanwhile."""
    two = here.targets["two"]
    two.model_hash, two.context_len, two.model = "one", SHORT_LEN, here.targets["one"].model
    async with here.replaced_before(None) as asking:
        assert await here.ask(1, 8) == "one"
        with pytest.raises(PeerLost, match="none has room for the 130 tokens"):
            await asking


async def test_a_request_whose_place_goes_before_its_first_token_begins_with_other_weights(here: Replacing) -> None:
    """It was sent there already; nobody waits for a target with its weights that may never come."""
    one = here.targets["one"]
    one.mischief = dict.fromkeys(range(1, 1000), Mischief.LOST)
    asking = asyncio.create_task(here.ask(0))
    await eventually(lambda: len(one.opens) > 0)
    await here.list("two")
    assert await asking == "two"


async def test_a_request_that_others_cannot_serve_waits_for_its_own_weights(here: Replacing) -> None:
    """It is not refused for what the others lack: its own come back."""
    one = here.targets["one"]
    here.targets["two"].max_draft_count = 4
    one.mischief = dict.fromkeys(range(1, 1000), Mischief.LOST)
    asking = asyncio.create_task(here.ask(0, draft_count=5))
    await eventually(lambda: len(one.opens) > 0)
    await here.list("two")
    one.mischief.clear()
    await here.list("one", "two")
    assert await asking == "one"


async def test_samples_of_one_request_keep_their_weights(here: Replacing) -> None:
    """Two of them, of which one might have begun: both wait, and the request ends as one."""
    one = here.targets["one"]
    one.mischief = dict.fromkeys(range(1, 1000), Mischief.LOST)
    asked = pb.GenerateRequest(token_ids=types_pb2.TokenIds(token_ids=(3, 5)), max_tokens=8, sample_count=2)
    asking = asyncio.create_task(here.stack.run(asked))
    await eventually(lambda: len(one.opens) > 1)
    await here.list("two")
    with pytest.raises(PeerLost, match="none has the model with which the request began"):
        await asking
    assert not here.targets["two"].opens


async def test_a_sample_that_waits_keeps_the_weights_of_one_that_has_begun(here: Replacing) -> None:
    """It has its place in the queue only when their target has gone."""
    one, admission = here.targets["one"], here.stack.gateway.frontend.admission
    asked = pb.GenerateRequest(token_ids=types_pb2.TokenIds(token_ids=(3, 5)), max_tokens=SHORT_LEN, sample_count=2)
    async with AsyncExitStack() as places:
        held = [await places.enter_async_context(admission.entry()) for _ in range(admission.places - 1)]
        one.reading.clear()
        asking = asyncio.create_task(here.stack.run(asked))
        await eventually(lambda: one.answers > 0)
        await here.list("two")
        admission.give_back(held[0])
        with pytest.raises(PeerLost, match="none has the model with which the request began"):
            await asking
    one.reading.set()
    assert not here.targets["two"].opens


async def test_a_request_that_has_begun_keeps_its_weights(here: Replacing) -> None:
    """It waits for them, and ends when none comes; no answer has tokens of two."""
    one = here.targets["one"]
    one.mischief = dict.fromkeys(range(3, 1000), Mischief.LOST)
    asking = asyncio.create_task(here.ask(0))
    await eventually(lambda: one.answers >= 3)
    await here.list("two")
    with pytest.raises(PeerLost, match="none has the model with which the request began"):
        await asking
    assert not here.targets["two"].opens


@pytest.mark.parametrize("model_hash", HASHES)
async def test_prompts_of_one_call_share_weights_and_not_places(
    here: Replacing, monkeypatch: pytest.MonkeyPatch, model_hash: str
) -> None:
    """All have those of the first one; where both targets have them, both get some of the prompts."""
    here.targets["two"].model_hash, turns = model_hash, count()
    await here.list("one", "two")
    if model_hash == "two":

        def in_turns(places: Sequence[LinkFigures], wish: PlaceWish) -> Placement:
            return Placement(places[next(turns) % len(places)].address, PlacedFor.LOAD)

        monkeypatch.setattr(replicas, "choose", in_turns)
    # Where a place is by cost, a few calls, because one of them may find the same place best for all its prompts.
    calls = 1 if model_hash == "two" else 3
    async with httpx.AsyncClient(base_url=f"http://{here.stack.gateway.rest_address}") as http:
        for call in range(calls):
            prompts = [[3 + call, 1 + number] for number in range(8)]
            body = {"model": "markov", "prompt": prompts, "max_tokens": 4, "seed": SEED}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            assert len(answer["choices"]) == 8
    numbers = sorted(len(each.opens) for each in here.targets.values())
    assert sum(numbers) == 8 * calls
    assert numbers == [0, 8] if model_hash == "two" else numbers[0] >= 2


async def test_what_is_named_before_a_file_says_which_weights_count(tokenizer: str, tmp_path: Path) -> None:
    """As in any list: others are left out."""
    async with AsyncExitStack() as stack:
        here = await replacing(tokenizer, tmp_path, stack, first="one")
        here.file.write_text(here.addresses["two"], encoding="utf-8")
        targets = here.stack.gateway.backend.target
        await eventually(lambda: len(targets.left_out) == 1)
        assert "has other weights, with which no request begins" in targets.left_out[0]
        assert {await here.ask(number) for number in range(4)} == {"one"}
