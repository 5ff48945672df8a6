"""Answers over REST: whole and streamed say the same as gRPC, in the shapes that clients of OpenAI read."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.basics import eventually
from support.services.markov_services import SEED, WORDS, MarkovStack, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    TEXT: {"prompt": "fox sea", "max_tokens": 40, "seed": SEED},
    CHAT: {"messages": [{"role": "user", "content": "fox sea"}], "max_tokens": 40, "seed": SEED},
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ENDLESS = {"max_tokens": 400, "ignore_eos": True}


async def answer(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    """A whole answer."""
    reply = await http.post(path, json={**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def chunks(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    reply = await http.post(path, json={**BODIES[path], **USAGE, **fields})
    assert reply.status_code == 200, reply.text
    *events, done, nothing = reply.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts(found: list[dict[str, Any]]) -> dict[int, str]:
    """What every choice of a stream says."""
    said: dict[int, str] = {}
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        said[choice["index"]] = said.get(choice["index"], "") + new
    return said


def whole_texts(body: dict[str, Any]) -> dict[int, str]:
    """What every choice of an answer says."""
    return {each["index"]: each["text"] if "text" in each else each["message"]["content"] for each in body["choices"]}


async def test_rest_says_what_grpc_says(http: httpx.AsyncClient, markov: MarkovStack) -> None:
    """The same tokens for the same parameters and seed, from text and from token ids, with all figures."""
    rounds, completion = await markov.run(request(draft_count=4))
    said = "".join(each.text_delta for each in rounds) + completion.text_delta
    body = await answer(http, TEXT, speculation={"draft_count": 4, "return_rounds": True})
    assert whole_texts(body) == {0: said}
    ids = [WORDS.index(word) for word in ("fox", "sea")]
    assert whole_texts(await answer(http, TEXT, prompt=ids)) == {0: said}
    assert whole_texts(await answer(http, TEXT, speculation={"enabled": False})) == {0: said}
    assert body["usage"]["completion_tokens"] == completion.usage.completion_tokens
    figures, spoken = body["metrics"]["speculative_decoding"], completion.speculation
    assert figures["num_draft_tokens"] == sum(figures["per_step_drafted"]) == spoken.draft_tokens
    assert figures["num_accepted_draft_tokens"] == sum(figures["per_step_accepted"]) == spoken.accepted_tokens
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == len(figures["per_step_drafted"])
    assert figures["num_spec_tokens"] == 4
    assert (body["outrider"]["seed"], body["outrider"]["rule"]) == (SEED, "match")


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stop": ["moon", "gold wolf"]}, {"stop": "king"}])
async def test_a_stream_joins_to_the_whole(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    """Whatever is asked for: the same texts and reasons, one head, one finish reason a choice, the usage last."""
    body, found = await answer(http, path, **fields), await chunks(http, path, **fields)
    assert texts(found) == whole_texts(body)
    assert found[-1]["usage"] == body["usage"] | {"prompt_tokens_details": found[-1]["usage"]["prompt_tokens_details"]}
    assert found[-1]["choices"] == []
    assert [chunk["usage"] for chunk in found[:-1]] == [None] * (len(found) - 1)
    heads = {tuple(chunk[name] for name in ("id", "created", "model", "system_fingerprint")) for chunk in found}
    assert len(heads) == 1
    ends = [choice for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    reasons = {choice["index"]: choice["finish_reason"] for choice in ends}
    assert len(ends) == len(reasons) == fields.get("n", 1)
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in body["choices"]}
    assert found[-1]["outrider"]["seeds"] == body["outrider"]["seeds"]


async def test_a_chat_begins_with_its_role(http: httpx.AsyncClient) -> None:
    """Once a choice, then content only, and a delta without anything at the end."""
    found = await chunks(http, CHAT, n=2)
    for index in (0, 1):
        deltas = [each["delta"] for chunk in found for each in chunk["choices"] if each["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])


async def test_prompts_have_choices_of_their_own(http: httpx.AsyncClient) -> None:
    """Numbered through, each as if it were alone; a prompt counts once however many choices it has."""
    many = await answer(http, TEXT, prompt=["fox sea", "king"], n=2)
    alone = [await answer(http, TEXT, prompt=prompt, n=2) for prompt in ("fox sea", "king")]
    assert list(whole_texts(many).values()) == [text for body in alone for text in whole_texts(body).values()]
    assert many["usage"]["prompt_tokens"] == 3
    assert many["metrics"]["speculative_decoding"] is None
    echoed = await answer(http, TEXT, prompt=["fox sea", "king"], echo=True)
    assert [text[:4] for text in whole_texts(echoed).values()] == ["fox ", "king"]
    assert texts(await chunks(http, TEXT, prompt=["fox sea", "king"], echo=True)) == whole_texts(echoed)


async def test_without_usage_the_last_chunk_tells_the_seed(http: httpx.AsyncClient) -> None:
    """Because every answer can be asked for again; padding hides the lengths of chunks."""
    found = await chunks(http, CHAT, stream_options={"include_obfuscation": True}, seed=None)
    assert [("outrider" in chunk, "usage" in chunk) for chunk in found] == [(False, False)] * (len(found) - 1) + [
        (True, False)
    ]
    again = await chunks(http, CHAT, seed=found[-1]["outrider"]["seed"])
    assert texts(again) == texts(found)
    assert all("obfuscation" in chunk for chunk in found)


async def test_padding_hides_what_is_seen_from_outside(http: httpx.AsyncClient) -> None:
    """That is bytes, of which a character has up to four."""
    body = {**BODIES[TEXT], "prompt": "é 日本 😀", "echo": True, "stream": True}
    reply = await http.post(TEXT, json={**body, "stream_options": {"include_obfuscation": True}})
    events = [event.removeprefix(b"data: ") for event in reply.content.split(b"\n\n")[:-2]]
    assert "日本".encode() in events[0]
    assert {len(event) % 32 for event in events} == {0}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (TEXT, {"model": "other"}, 404, "model"),
        (TEXT, {"prompt": [99]}, 400, "prompt.0"),
        (TEXT, {"prompt": [[1], [1, 99]]}, 400, "prompt.1.1"),
        (TEXT, {"prompt": ["fox", "fox " * 999]}, 400, "prompt.1"),
        (TEXT, {"max_tokens": 9999}, 400, "prompt"),
        (TEXT, {"best_of": 2}, 400, "best_of"),
        (TEXT, {"prompt": ["fox"] * 65}, 400, "prompt"),
        (TEXT, {"n": 9}, 400, "n"),
        (TEXT, {"logit_bias": {"99": 1}}, 400, "logit_bias"),
        (TEXT, {"speculation": {"draft_count": 9}}, 400, "speculation.draft_count"),
        (CHAT, {"max_tokens": 9999}, 400, "messages"),
        (CHAT, {"max_completion_tokens": 3}, 400, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        (CHAT, {"tool_choice": "auto"}, 400, "tool_choice"),
        (CHAT, {"foo": 1}, 400, "foo"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_reach_no_service(
    http: httpx.AsyncClient,
    markov: MarkovStack,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    stream: bool,
) -> None:
    """They have a status even when a stream was asked for, and name the field as REST calls it."""
    opened = markov.target.answers
    reply = await http.post(path, json={**BODIES[path], **fields, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert markov.target.answers == opened


async def test_an_error_in_the_middle_is_an_event(http: httpx.AsyncClient) -> None:
    """And then the stream ends without [DONE]; these services send no log-probabilities, which is a fault of theirs."""
    reply = await http.post(TEXT, json={**BODIES[TEXT], "logprobs": 1, "stream": True})
    assert reply.status_code == 200
    last = reply.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "protocol_violation"
    reply = await http.post(TEXT, json={**BODIES[TEXT], "logprobs": 1})
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_back(http: httpx.AsyncClient, markov: MarkovStack, stream: bool) -> None:
    """Before any header of a stream, and a client that leaves, running or waiting, makes room and leaves nothing."""
    admission, body = markov.gateway.frontend.admission, {**BODIES[TEXT], **ENDLESS, "stream": stream}
    held = admission.entry()
    places = await held.__aenter__()
    for _ in range(3):
        await admission.take(places)
    waiting = asyncio.create_task(http.post(TEXT, json=body))
    await eventually(lambda: admission.waiting == 1)
    reply = await http.post(TEXT, json=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(reply.headers["retry-after"]) >= 1
    waiting.cancel()
    await eventually(lambda: admission.waiting == 0)
    await held.__aexit__(None, None, None)
    running = asyncio.create_task(http.post(TEXT, json={**body, "n": 4}))
    await eventually(lambda: markov.target.sessions == 4 or running.done())
    running.cancel()
    await eventually(lambda: admission.running == markov.target.sessions == markov.draft.sessions == 0)
