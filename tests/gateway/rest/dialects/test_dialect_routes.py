"""The routes of the dialects beside what they answer: errors in their shapes from every layer, pings, departures."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.basics import eventually
from support.services.markov_services import MarkovStack, markov_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TURNS = [{"role": "user", "content": "fox"}]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": TURNS, "max_tokens": 400, "seed": 1},
    RESPONSES: {"input": TURNS, "max_output_tokens": 400, "seed": 1},
}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        ({"content": b"{", "headers": JSON}, 400, "invalid_request_error"),
        ({"json": {}}, 400, "invalid_request_error"),
        ({"json": {"model": "other", "max_tokens": 1, "messages": TURNS}}, 404, "not_found_error"),
        ({"content": b"{}", "headers": {"content-type": "text/xml"}}, 415, "invalid_request_error"),
        ({"content": b" " * (5 << 20), "headers": JSON}, 413, "invalid_request_error"),
        ({"content": b"{}", "headers": {**JSON, "origin": "https://other.example"}}, 403, "permission_error"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_errors_of_messages_have_one_shape(
    http: httpx.AsyncClient, path: str, sent: dict[str, Any], status: int, kind: str
) -> None:
    """Whether the route finds the fault or what stands before it."""
    if path == COUNT and "json" in sent:
        sent = {"json": {name: value for name, value in sent["json"].items() if name != "max_tokens"}}
    reply = await http.post(path, **sent)
    assert reply.status_code == status, reply.text
    told = reply.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert set(told["error"]) == {"type", "message"}


async def test_only_paths_below_messages_have_that_shape(http: httpx.AsyncClient) -> None:
    """All others have OpenAI's."""
    assert (await http.get("/v1/messages/nothing")).json()["error"]["type"] == "not_found_error"
    assert (await http.get(MESSAGES)).status_code == 405
    for path in ("/v1/messages_of_others", "/v1/responses/resp_1"):
        assert (await http.get(path)).json()["error"]["code"] == "unknown_url"


@pytest.mark.slow
async def test_the_document_has_both(http: httpx.AsyncClient) -> None:
    """With every event of their streams, and the shape of their errors."""
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, event, error in (
        (MESSAGES, "ContentBlockDelta", "MessagesErrorBody"),
        (RESPONSES, "ItemEvent", "ErrorBody"),
    ):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert str(responses["400"]["content"]).count(f"/{error}'") == 1
        streamed = str(responses["200"]["content"]["text/event-stream"])
        assert f"#/components/schemas/{event}" in streamed
        assert event in schemas
    assert "MessagesTokenCount" in schemas


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_frees_the_place(
    markov: MarkovStack, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    """Whole or streamed."""
    admission, target = markov.gateway.frontend.admission, markov.target
    target.reading.clear()
    try:
        asking = asyncio.create_task(http.post(path, json={**BODIES[path], "stream": stream}))
        await eventually(lambda: admission.running == 1)
        asking.cancel()
        await eventually(lambda: admission.running == 0)
    finally:
        target.reading.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(words: str) -> AsyncIterator[MarkovStack]:
    """A stack that says very soon that it is alive."""
    async with markov_stack(words, rest_listen="127.0.0.1:0", keep_alive_seconds=0.01) as running:
        yield running


async def test_silence_on_a_stream_of_messages_is_pings(impatient: MarkovStack) -> None:
    """Which its clients know; no client is sent a comment there."""
    impatient.target.reading.clear()
    url = f"http://{impatient.gateway.rest_address}{MESSAGES}"
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url, json={**BODIES[MESSAGES], "stream": True, "max_tokens": 4}) as reply,
    ):
        received = ""
        async for part in reply.aiter_text():
            received += part
            if received.count('event: ping\ndata: {"type":"ping"}\n\n') >= 2:
                impatient.target.reading.set()
    assert received.startswith("event: message_start\n")
    assert "keep-alive" not in received
    assert received.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
