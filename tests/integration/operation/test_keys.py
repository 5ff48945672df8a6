"""Two keys on a real stack share nothing that is remembered, not even with the same salt; one with itself does."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.basics import eventually
from support.keys import key_of, write_keys
from support.stack import RunningStack, running_stack

from outrider.client import Answer, AsyncClient, Speculation
from outrider.grammar import Grammar, GrammarEngine
from outrider.v1 import model_service_pb2 as model_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time there was a little girl named Lily who loved to play outside in the sun with her dog. " * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """The embedded pair with a gateway that lets two names in."""
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", alice={}, bob={})
    async with running_stack(gateway={"api_keys": path}) as running:
        yield running


async def ask(stack: RunningStack, name: str, **options: Any) -> Answer:
    """An answer to a name's request, which says the same every time."""
    asked = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "speculation": Speculation(draft_count=4), **options}
    async with AsyncClient(stack.address, api_key=key_of(name)) as client:
        answer = await client.generate(PROMPT, **asked).result()
    # What is cached of a session is there for the next one when the session has ended.
    await stack.quiet()
    return answer


async def counters(stack: RunningStack) -> list[model_pb.GetModelInfoResponse]:
    """What both services count."""
    return [await stack.info(service) for service in (stack.target, stack.draft)]


@pytest.mark.parametrize("salt", [None, "shared"])
async def test_two_keys_share_no_cached_prefix(stack: RunningStack, salt: str | None) -> None:
    """By what the answers say and by what both services count; with its own requests each key does, and tokens are the
    same for all.
    """
    options = {} if salt is None else {"cache_salt": salt}
    first = await ask(stack, "alice", **options)
    before = await counters(stack)
    assert (await ask(stack, "bob", **options)).result.cached_prompt_tokens == first.result.cached_prompt_tokens == 0
    between = await counters(stack)
    assert [info.prefix_hit_tokens for info in between] == [info.prefix_hit_tokens for info in before]
    assert all(new.prefix_query_tokens > old.prefix_query_tokens for new, old in zip(between, before, strict=True))
    for name in ("alice", "bob"):
        again = await ask(stack, name, **options)
        assert again.result.cached_prompt_tokens > 64
        assert again.token_ids == first.token_ids
    after = await counters(stack)
    assert all(new.prefix_hit_tokens > old.prefix_hit_tokens for new, old in zip(after, between, strict=True))


async def test_two_keys_share_no_memory_of_answers(stack: RunningStack) -> None:
    """What one got is looked up for no other: the same guesses are found by the one that said it before."""
    looked_up = Speculation(draft_count=4, drafter="lookup")
    said = [await ask(stack, name, speculation=looked_up, cache_salt="memory") for name in ("alice", "bob", "alice")]
    new, other, again = (answer.result.speculation.accepted_tokens for answer in said)
    # How far a target is ahead of a lookup, which then finds nothing, is a matter of time: the first two may differ.
    assert max(new, other) < again
    assert said[0].token_ids == said[1].token_ids == said[2].token_ids


async def test_two_keys_share_no_compiled_grammar(stack: RunningStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has it compiled once, in the gateway and in both services."""
    compiled: list[str] = []
    original = GrammarEngine._compile

    def compiling(engine: GrammarEngine, text: str) -> Grammar:
        compiled.append(text)
        return original(engine, text)

    monkeypatch.setattr(GrammarEngine, "_compile", compiling)
    for name, count in (("alice", 3), ("alice", 3), ("bob", 6), ("bob", 6)):
        await ask(stack, name, choices=["fox", "wolf"])
        await eventually(lambda count=count: len(compiled) == count)  # type: ignore[misc]
