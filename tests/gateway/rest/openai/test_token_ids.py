"""Token ids over REST: those that gRPC gives, whole and in a stream, with several samples and an echo."""

from typing import Any

import httpx
import pytest
from support.services.markov_services import SEED, MarkovStack, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"max_tokens": 40, "seed": SEED, "return_token_ids": True}
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "fox sea", **ASKED},
    CHAT: {"messages": [{"role": "user", "content": "fox sea"}], **ASKED},
}


def ids_of(choices: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The ids of every choice, joined over chunks."""
    said: dict[int, list[int]] = {}
    for choice in choices:
        said.setdefault(choice["index"], []).extend(choice["token_ids"])
    return said


async def test_they_are_those_of_grpc(http: httpx.AsyncClient, markov: MarkovStack) -> None:
    """For every sample of a request, whatever is echoed before it."""
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for message in markov.generate(request(sample_count=3, draft_count=None)):
        if message.HasField("round"):
            said[message.round.sample_index] += [token.token_id for token in message.round.tokens]
    body = (await http.post(TEXT, json={**BODIES[TEXT], "n": 3, "echo": True})).json()
    assert ids_of(body["choices"]) == said


@pytest.mark.parametrize("prompt", [[-1] * 2_000, [[5], [-1] * 2_000]])
async def test_ids_of_a_prompt_that_is_too_long_are_not_looked_at(http: httpx.AsyncClient, prompt: list[Any]) -> None:
    """Which would take the time of others; what is wrong with them need not be known."""
    reply = await http.post(TEXT, json={"prompt": prompt})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "the prompt has 2000 tokens, but must leave room for one more in the context of" in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_joins_to_the_whole(http: httpx.AsyncClient, path: str) -> None:
    """Also after a stop string, where tokens bring no text."""
    fields = {**BODIES[path], "n": 2, "stop": ["moon"]}
    whole = ids_of((await http.post(path, json=fields)).json()["choices"])
    reply = await http.post(path, json={**fields, "stream": True})
    chunks = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
    streamed = ids_of([choice for chunk in chunks for choice in httpx.Response(200, text=chunk).json()["choices"]])
    assert streamed == whole
    assert all(whole.values())


@pytest.mark.parametrize("path", BODIES)
async def test_unasked_they_do_not_come(http: httpx.AsyncClient, path: str) -> None:
    """Clients of OpenAI's see what OpenAI sends."""
    body = (await http.post(path, json={**BODIES[path], "return_token_ids": False})).json()
    assert "token_ids" not in body["choices"][0]
