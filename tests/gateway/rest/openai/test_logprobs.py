"""Log-probabilities over REST, of a real model with a byte-level tokenizer: both shapes, whole and in a stream."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.stack import RunningStack, running_stack

from gateway.rest.sse import DONE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time there was a café"
FIELDS = {"max_tokens": 12, "seed": 7, "speculation": {"draft_count": 3}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    """The embedded pair."""
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0"}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows nothing of the protocol."""
    assert stack.gateway is not None
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}", timeout=60) as client:
        yield client


async def choices(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a whole answer."""
    reply = await http.post(path, json={**FIELDS, **fields})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"])


async def streamed(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """All pieces of choices of a stream."""
    reply = await http.post(path, json={**FIELDS, **fields, "stream": True})
    events = reply.content.removesuffix(DONE).split(b"\n\n")
    chunks = [httpx.Response(200, content=event.removeprefix(b"data: ")).json() for event in events if event]
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_chat_tells_every_token_with_its_bytes(http: httpx.AsyncClient, stack: RunningStack) -> None:
    """The bytes join to the text, the alternatives fall, and the numbers are those of gRPC."""
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"messages": messages, "logprobs": True, "top_logprobs": 3}
    (choice,) = await choices(http, CHAT, **fields)
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode().strip() == choice["message"]["content"].strip()
    for token in tokens:
        top = [each["logprob"] for each in token["top_logprobs"]]
        assert len(top) == 3
        assert sorted(top, reverse=True) == top
        assert token["logprob"] <= top[0] <= 0
    pieces = await streamed(http, CHAT, **fields)
    assert [token for piece in pieces for token in (piece["logprobs"] or {"content": []})["content"]] == tokens
    (bare,) = await choices(http, CHAT, messages=messages, logprobs=True)
    assert [token["top_logprobs"] for token in bare["logprobs"]["content"]] == [[]] * len(tokens)


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_tell_lists(http: httpx.AsyncClient, stack: RunningStack, echo: bool) -> None:
    """Of equal length, with places in the text; with echo the prompt comes first, also of the second choice."""
    fields = {"prompt": PROMPT, "logprobs": 2, "echo": echo, "n": 2}
    whole = await choices(http, TEXT, **fields)
    pieces = await streamed(http, TEXT, **fields)
    answer = await stack.generate(text=PROMPT, max_tokens=12, seed=7, draft_count=3, logprob_count=2, echo=echo)
    for choice in whole:
        told = choice["logprobs"]
        assert choice["text"].startswith(PROMPT) == echo
        assert len({len(told[name]) for name in told}) == 1
        assert (told["token_logprobs"][0] is None) == echo
        assert told["text_offset"] == sorted(told["text_offset"])
        assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][echo:])
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert (
                token.startswith("bytes:") or choice["text"][offset:].startswith(token) or token.startswith((" ", "<"))
            )
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        for name, values in told.items():
            assert [value for piece in mine for value in (piece["logprobs"] or {name: []})[name]] == values
    logprobs = [token.logprob.logprob for each in answer.rounds for token in (*each.prompt_tokens, *each.tokens)]
    assert whole[0]["logprobs"]["token_logprobs"][echo:] == logprobs[echo:]


async def test_a_prompt_is_scored_alone(http: httpx.AsyncClient, stack: RunningStack) -> None:
    """With no token behind it, the same as before an answer, whole and streamed, over REST and gRPC; without an echo
    there is nothing to give.
    """
    fields = {"prompt": [PROMPT, "fox"], "logprobs": 2, "echo": True, "n": 2, "return_token_ids": True}
    longer = await choices(http, TEXT, **fields)
    scored = await choices(http, TEXT, **fields, max_tokens=0)
    assert [choice["text"] for choice in scored] == [PROMPT, PROMPT, "fox", "fox"]
    for choice, other in zip(scored, longer, strict=True):
        count = len(choice["logprobs"]["tokens"])
        assert 0 < count < len(other["logprobs"]["tokens"])
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(other["logprobs"]["token_logprobs"][1:count])
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
    pieces = await streamed(http, TEXT, **fields, max_tokens=0)
    assert "".join(piece["text"] for piece in pieces if piece["index"] == 1) == PROMPT
    reply = await http.post(TEXT, json={**FIELDS, **fields, "max_tokens": 0})
    assert reply.json()["usage"]["completion_tokens"] == 0
    plain = await choices(http, TEXT, prompt=PROMPT, echo=True, max_tokens=0)
    assert (plain[0]["text"], plain[0]["logprobs"]) == (PROMPT, None)
    answer = await stack.generate(text=PROMPT, max_tokens=0, logprob_count=2, echo=True)
    assert (answer.text, answer.completion.usage.completion_tokens) == ("", 0)
    for more in ({}, {"echo": False}):
        reply = await http.post(TEXT, json={"prompt": PROMPT, "max_tokens": 0, **more})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "max_tokens is 0, but must be at least 1 unless echo is true"


async def test_an_echo_alone_is_the_prompt(http: httpx.AsyncClient) -> None:
    """As it was written, or as its ids are spelled; nothing is computed for it."""
    (choice,) = await choices(http, TEXT, prompt=PROMPT, echo=True)
    assert choice["text"].startswith(PROMPT)
    assert choice["logprobs"] is None
    (spelled,) = await choices(http, TEXT, prompt=[5, 6, 7], echo=True)
    (bare,) = await choices(http, TEXT, prompt=[5, 6, 7])
    assert spelled["text"].endswith(bare["text"])
    assert len(spelled["text"]) > len(bare["text"])
