"""Gateways know what is cached at targets whoever sent it, and no token is another one for that."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.basics import eventually
from support.stack import TARGET, RunningStack, running_stack

from gateway.server import RunningGateway, start
from gateway.sessions import peer as peers
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import PlacedFor, PromptPrefix
from gateway.settings import GatewaySettings
from outrider.model_service.load import LinkLoad
from outrider.model_service.outbox import Outbox
from outrider.v1.target_service_pb2 import TargetServiceLinkRequest
from target_service.servicer import TargetServicer

SALT = {"cache_salt": "shared", "draft_count": 0, "seed": 5, "max_tokens": 4, "temperature": 0.8}


def prompt(number: int) -> list[int]:
    """A prompt that has nothing in common with another number's: three whole blocks and a bit."""
    return [(at * 7 + number * 311) % 4000 + 3 for at in range(200)]


def links(gateway: RunningGateway | None) -> tuple[ServicePeer, ...]:
    """Links to targets."""
    assert gateway is not None
    return gateway.backend.target.peers


@asynccontextmanager
async def beside(stack: RunningStack, *targets: str) -> AsyncIterator[RunningStack]:
    """The same services with another gateway, which knows these targets."""
    settings = GatewaySettings(",".join(targets), TARGET, "", listen="127.0.0.1:0", rest_listen="")
    gateway = await start(settings)
    try:
        yield replace(stack, gateway=gateway)
    finally:
        await gateway.stop(0)


async def is_cached(peer: ServicePeer, number: int, salt: bytes = b"shared") -> bool:
    """Whether a gateway has heard that a prompt is cached there."""
    names = (await PromptPrefix.of(prompt(number), salt)).names
    return peer.book.pushed.is_known and peer.book.pushed.names >= {*names}


async def test_a_gateway_knows_what_another_one_has_left_at_a_target() -> None:
    """Its own sessions go there for it, find what was expected, and say the same; other salts have none of it."""
    async with (
        running_stack(draft=None, further_targets=1) as stack,
        beside(stack, stack.targets[1].address) as other,
    ):
        first, second = links(stack.gateway)
        said = [(await other.generate(token_ids=prompt(number), **SALT)).token_ids for number in range(6)]
        for number in range(6):
            await eventually(lambda number=number: is_cached(second, number))
            assert not await is_cached(first, number)
            assert not await is_cached(second, number, b"mine")
        assert stack.gateway is not None
        target = stack.gateway.backend.target
        found = [await stack.generate(token_ids=prompt(number), **SALT) for number in range(6)]
        assert [each.token_ids for each in found] == said
        assert [each.completion.usage.cached_prompt_tokens for each in found] == [192] * 6
        assert (target.placements[PlacedFor.HIT], sum(target.placements.values())) == (6, 6)
        hits = target.prefix_hits
        assert (hits.expected, hits.found, hits.errors.count, hits.errors.total) == (1152, 1152, 6, 0)
        mine = await stack.generate(token_ids=prompt(0), **SALT | {"cache_salt": "mine"})
        assert (mine.token_ids, mine.completion.usage.cached_prompt_tokens) == (said[0], 0)
        assert (hits.expected, hits.found, hits.errors.total) == (1152, 1152, 0)


async def test_a_gateway_hears_what_another_one_has_driven_out() -> None:
    """A cache with room for a few prompts: what this gateway sent is gone after what others sent."""
    async with (
        running_stack(draft=None, kv_tokens=512) as stack,
        beside(stack, stack.target.address) as other,
    ):
        [link] = links(stack.gateway)
        await stack.generate(token_ids=prompt(0), **SALT)
        await eventually(lambda: is_cached(link, 0))
        prefix = await PromptPrefix.of(prompt(0), b"shared")
        assert link.book.hit_len(prefix) == 192
        for number in (1, 2, 3):
            await other.generate(token_ids=prompt(number), **SALT)
        await eventually(lambda: is_cached(link, 3))
        assert link.book.hit_len(prefix) == 0


async def test_a_target_that_was_started_again_has_nothing() -> None:
    """And a gateway that hears of it expects nothing there, until it is sent again."""
    async with running_stack(draft=None) as stack:
        [link] = links(stack.gateway)
        before = await stack.generate(token_ids=prompt(0), **SALT)
        await eventually(lambda: is_cached(link, 0))
        book = link.book
        await stack.restart_target()
        await eventually(lambda: link.book is not book and link.book.pushed.is_known)
        assert not await is_cached(link, 0)
        after = await stack.generate(token_ids=prompt(0), **SALT)
        assert (after.token_ids, after.completion.usage.cached_prompt_tokens) == (before.token_ids, 0)
        await eventually(lambda: is_cached(link, 0))


@pytest.mark.parametrize("who", ["target", "gateway"])
async def test_a_peer_of_before_leaves_it_at_what_was_sent(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that does not know the question, and a gateway that does not ask it: both serve as they did."""

    def silent(servicer: TargetServicer, outbox: Outbox) -> LinkLoad:
        return LinkLoad(servicer.load, outbox)

    begin, _ = peers.CALLS["target"]
    if who == "target":
        monkeypatch.setattr(TargetServicer, "link_load", silent)
    else:
        calls = {**peers.CALLS, "target": (begin, TargetServiceLinkRequest(reads_load=True))}
        monkeypatch.setattr(peers, "CALLS", calls)
    async with running_stack(draft=None, further_targets=1) as stack:
        await eventually(lambda: all(link.load for link in links(stack.gateway)))
        found = [await stack.generate(token_ids=prompt(0), **SALT) for _ in range(2)]
        assert [each.completion.usage.cached_prompt_tokens for each in found] == [0, 192]
        assert [(link.book.pushed.is_known, link.faults) for link in links(stack.gateway)] == [(False, 0)] * 2
        assert stack.gateway is not None
        hits = stack.gateway.backend.target.prefix_hits
        assert (hits.expected, hits.found, hits.errors.total) == (192, 192, 0)
