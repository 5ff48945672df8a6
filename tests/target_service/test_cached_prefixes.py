"""What a target says of its cache over real links: to which gateways, how soon, and that it is what is there."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.basics import spec_of
from support.models.tiny_models import SETTINGS
from support.services.session_clients import Link, TargetClient

from gateway.sessions.placement import PromptPrefix
from outrider.engine.cache import ROOT
from outrider.estimates.prefixes import KnownPrefixes, PrefixNews
from outrider.model_service import load
from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from outrider.rpc.messages.round import news_from
from outrider.v1 import target_service_pb2 as pb
from outrider.v1.target_service_pb2_grpc import TargetServiceStub


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    """A model whose cache has room for some prompts and not for all."""
    return load_model(replace(SETTINGS, model=str(folder), dtype="float32", kv_tokens=1024))


class Listener:
    """A gateway without sessions that wants to know what is cached."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.link = Link(TargetServiceStub(channel).Link, pb.TargetServiceLinkRequest)
        self.known = KnownPrefixes(1 << 20)

    async def ask(self, **fields: bool) -> None:
        """Says what it reads; all there is unless it says otherwise."""
        wanted = {"reads_load": True, "wants_prefixes": True} | fields
        await self.link.call.write(pb.TargetServiceLinkRequest(**wanted))

    async def hear(self) -> PrefixNews:
        """The next news."""
        frame = await self.link.frame()
        assert frame.load.HasField("prefixes")
        news = news_from(frame.load.prefixes)
        self.known.hear(news)
        return news

    async def until(self, condition: Callable[[], bool]) -> None:
        """Listens until a condition holds."""
        while not condition():
            await self.hear()


async def names_of(token_ids: tuple[int, ...], salt: bytes = b"") -> set[int]:
    """Names of a prompt's whole blocks, as gateways know them."""
    return {*(await PromptPrefix.of(token_ids, salt)).names}


def prompt(number: int, length: int = 150) -> tuple[int, ...]:
    """A prompt that has nothing in common with another number's."""
    return tuple((at * (number + 1)) % 241 + number + 1 for at in range(length))


async def said(channel: grpc.aio.Channel, token_ids: tuple[int, ...], salt: bytes = b"") -> None:
    """A session of another gateway that reads a prompt and ends."""
    client = TargetClient(channel)
    await client.open(replace(spec_of(token_ids, len(token_ids) + 8, eos=()), cache_salt=salt))
    await client.verdict()
    await client.close(1)
    await client.link.call.done_writing()
    await client.drain()


def names_in(service: RunningModelService) -> set[int]:
    """Names of what the target's cache holds."""
    return {*service.runner.pool.prefixes.journal.all()[0]}


async def test_a_gateway_without_sessions_hears_of_others_prompts(
    channel: grpc.aio.Channel, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there at once, and what comes without waiting for the next sign of life; of each salt by itself."""
    monkeypatch.setattr(load, "HEARTBEAT_S", 1e6)
    first, later = Listener(channel), Listener(channel)
    await first.ask()
    assert (await first.hear()).number == 0
    assert first.known.is_known
    before = {*first.known.names}
    assert before == names_in(service)
    one, other = await names_of(prompt(1), b"one"), await names_of(prompt(1), b"other")
    await said(channel, prompt(1), b"one")
    await first.until(lambda: first.known.names >= one)
    assert not first.known.names & other
    await said(channel, prompt(1), b"other")
    await first.until(lambda: first.known.names >= other)
    await later.ask()
    assert ((await later.hear()).number, later.known.names) == (0, first.known.names)
    assert len(one | other) == 4


async def test_only_who_asks_is_told(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway of before reads loads without a word of it; and who asks without reading loads hears nothing."""
    monkeypatch.setattr(load, "HEARTBEAT_S", load.LEAST_S)
    old, deaf = Listener(channel), Listener(channel)
    await old.ask(wants_prefixes=False)
    await deaf.ask(reads_load=False)
    await said(channel, prompt(2))
    for _ in range(3):
        frame = await old.link.frame()
        assert (frame.HasField("load"), frame.load.HasField("prefixes")) == (True, False)
    await deaf.link.call.done_writing()
    with pytest.raises(EOFError):
        await deaf.link.frame()


async def test_who_asks_again_hears_all_again(channel: grpc.aio.Channel, service: RunningModelService) -> None:
    """From number 0 on, which makes up for whatever was missed."""
    listener = Listener(channel)
    await said(channel, prompt(3))
    await listener.ask()
    await listener.until(lambda: listener.known.is_known)
    names = {*listener.known.names}
    assert names >= await names_of(prompt(3))
    listener.known = KnownPrefixes(1 << 20)
    await listener.ask()
    while (await listener.hear()).number:
        assert not listener.known.is_known
    assert listener.known.names == names == names_in(service)


@pytest.mark.parametrize("seed", range(3))
async def test_when_all_is_quiet_it_is_what_is_there(
    channel: grpc.aio.Channel, service: RunningModelService, seed: int
) -> None:
    """After sessions of any prompts that evict each other's blocks, by the table of blocks itself."""
    chance, listener = random.Random(seed), Listener(channel)
    await listener.ask()
    pool = service.runner.pool
    for _ in range(40):
        number, salt = chance.randrange(12), chance.choice([b"", b"salt"])
        await said(channel, prompt(number, chance.choice([100, 300, 600])), salt)
    pool.check_integrity()
    await listener.until(lambda: listener.known.names == names_in(service))
    expected = set[int]()
    for number in range(12):
        for salt in (b"", b"salt"):
            text, parent = prompt(number, 600), ROOT
            names = (await PromptPrefix.of(text, salt)).names
            for at in range(0, 600 - pool.block_size, pool.block_size):
                found = pool.prefixes.find(salt, parent, text[at : at + pool.block_size])
                if found is None:
                    break
                parent = found
                if (at + pool.block_size) % 64 == 0:
                    expected.add(names[at // 64])
    assert expected == listener.known.names
    assert 0 < len(expected) < 2 * 12 * 9 / 4
