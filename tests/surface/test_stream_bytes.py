"""Streams of /v1, byte by byte: comments, data lines, their order, and an end that says how it ended."""

import asyncio
import json
from itertools import product
from typing import Any

import pytest
from support.basics import eventually
from support.rest.event_streams import EventStream, check_stream, read_events
from support.rest.rest_stack import CHAT, COMPLETIONS, PATIENCE_S, RestStack, rest_stack, said
from support.rest.vllm_figures import PerRequestMetrics, read_metrics

from outrider.cli.bench.common import OPENINGS

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALE = "Once upon a time there was a king who had"
PROMPTS: dict[str, dict[str, Any]] = {CHAT: said(TALE), COMPLETIONS: {"prompt": TALE}}
ENDLESS = {"ignore_eos": True, "max_tokens": 3000}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(("count", "wants_usage"), [*product((1, 3), (True, False))])
async def test_form(rest: RestStack, path: str, count: int, *, wants_usage: bool) -> None:
    """Role first, one reason to end for each answer, usage last when asked for, then the end; and no other line."""
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if wants_usage else {}
    stream = await rest.stream(path, **PROMPTS[path], **options, max_tokens=24, seed=3, n=count)
    check_stream(stream, is_chat=path == CHAT, count=count, wants_usage=wants_usage)
    assert stream.comments == []
    assert all(stream.text(index) for index in range(count))


@pytest.mark.parametrize("path", PROMPTS)
async def test_log_probabilities_do_not_change_the_form(rest: RestStack, path: str) -> None:
    """Every token is reported once, in the chunks of its answer."""
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    fields = {**PROMPTS[path], **wanted, "max_tokens": 24, "seed": 3, "ignore_eos": True}
    stream = await rest.stream(path, **fields)
    check_stream(stream, is_chat=path == CHAT)
    parts = [part["logprobs"] for part in stream.of_choice(0) if part["logprobs"] is not None]
    whole = (await rest.ask(path, **fields))["choices"][0]["logprobs"]
    for name in ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in part[name]] == whole[name]
        assert len(whole[name]) == 24


async def test_several_prompts(rest: RestStack) -> None:
    """Answers are numbered through: all of the first prompt, then all of the second."""
    fields: dict[str, Any] = {"prompt": [TALE, "There was once a poor fisherman who"], "n": 2, "seed": 3}
    stream = await rest.stream(COMPLETIONS, **fields, max_tokens=16)
    check_stream(stream, is_chat=False, count=4)
    whole = (await rest.ask(COMPLETIONS, **fields, max_tokens=16))["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    assert [stream.text(index) for index in range(4)] == [choice["text"] for choice in whole]


async def test_headers(rest: RestStack) -> None:
    """Nothing on the way may keep, change or collect the events."""
    body = {"model": await rest.model(), "stream": True, "max_tokens": 2, **said(TALE)}
    async with rest.http.stream("POST", CHAT, json=body) as reply:
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-accel-buffering"] == "no"
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in reply.headers
        await reply.aread()


@pytest.mark.slow
@pytest.mark.parametrize("path", PROMPTS)
async def test_figures_are_in_the_form_that_aiperf_reads(rest: RestStack, path: str) -> None:
    """On the usage chunk and on the body; zeros when nothing was guessed, null when nothing could be or for several."""
    fields = {**PROMPTS[path], "max_tokens": 40, "seed": 3, "speculation": {"draft_count": 4}}
    stream = await rest.stream(path, **fields, stream_options={"include_usage": True})
    assert stream.usage_chunk is not None
    assert not any("metrics" in chunk for chunk in stream.chunks[:-1])
    body = await rest.ask(path, **fields)
    for reply in (stream.usage_chunk, body):
        check_guessed(read_metrics(reply), reply["usage"]["completion_tokens"])
    silent = read_metrics(await rest.ask(path, **{**fields, "max_tokens": 1})).speculative_decoding
    assert silent is not None
    assert (silent.num_spec_steps, silent.mean_acceptance_length, sum(silent.acceptance_histogram)) == (0, 1.0, 0)
    plain = await rest.ask(path, **{**fields, "speculation": {"enabled": False}})
    several = await rest.ask(path, **fields, n=2)
    assert read_metrics(plain).speculative_decoding is read_metrics(several).speculative_decoding is None


def check_guessed(metrics: PerRequestMetrics, completion_tokens: int) -> None:
    """Guesses were made, some were right, and times are there and possible."""
    figures = metrics.speculative_decoding
    assert figures is not None
    assert figures.num_spec_tokens == 4
    assert 0 < figures.num_accepted_draft_tokens < figures.num_draft_tokens
    # Each verdict has one token beside those that it accepted, and the first of all came before them.
    assert figures.num_accepted_draft_tokens + figures.num_spec_steps <= completion_tokens - 1
    assert metrics.time_to_first_token_ms is not None
    assert metrics.generation_time_ms is not None
    assert metrics.queue_time_ms is not None
    assert metrics.tokens_per_second is not None
    assert metrics.mean_itl_ms is not None
    assert metrics.time_to_first_token_ms > 0
    assert metrics.generation_time_ms > 0


async def test_figures_and_vllm_format_can_fail(rest: RestStack) -> None:
    """A count that contradicts the others is not read."""
    body = await rest.ask(CHAT, **said(TALE), max_tokens=24, seed=3, speculation={"draft_count": 4})
    body["metrics"]["speculative_decoding"]["num_spec_steps"] += 1
    with pytest.raises(ValueError, match="speculative_decoding"):
        read_metrics(body)


@pytest.mark.slow
async def test_comments_keep_a_long_prompt_alive() -> None:
    """While the prompt is read, comments come, and nothing but comments; a client's parser does not see them."""
    async with rest_stack(gateway={"keep_alive_seconds": 0.01}) as rest:
        prompt = " ".join(OPENINGS * 6)[:5000]
        stream = await rest.stream(CHAT, **said(prompt), max_tokens=4)
        check_stream(stream, is_chat=True)
        assert stream.comments
        # After the role, at the latest, and before the first word.
        assert stream.comments[0] <= 1


async def open_stream(rest: RestStack, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a streamed request over a connection of its own."""
    body = json.dumps({"model": await rest.model(), "stream": True, **said(TALE), **fields}).encode()
    host, _, port = rest.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {rest.address}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.slow
async def test_nothing_comes_before_a_place_is_free() -> None:
    """No headers, and so no comment, while a request waits: its status is not known yet."""
    async with rest_stack(gateway={"max_requests": 1, "keep_alive_seconds": 0.002}) as rest:
        running, running_writer = await open_stream(rest, **ENDLESS)
        await running.readuntil(b"data: ")
        waiting, waiting_writer = await open_stream(rest, max_tokens=2)
        await eventually(lambda: rest.admission.waiting == 1)
        head = asyncio.create_task(waiting.readuntil(b"\r\n\r\n"))
        # The other stream goes on for long enough that comments would have come.
        for _ in range(100):
            await running.readuntil(b"data: ")
        assert not head.done()
        assert rest.admission.waiting == 1
        running_writer.close()
        async with asyncio.timeout(PATIENCE_S):
            assert (await head).startswith(b"HTTP/1.1 200")
            await waiting.readuntil(b"data: [DONE]\n\n")
        waiting_writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", PROMPTS)
async def test_lost_target_is_an_error_without_an_end(path: str) -> None:
    """The last event says what happened, in the form of a refusal; there is no finish reason, usage or end."""
    async with rest_stack(gateway={"rebuild_budget_seconds": 0.0}) as rest:
        body = {"model": await rest.model(), "stream": True, **PROMPTS[path], **ENDLESS}
        raw = b""
        async with rest.http.stream("POST", path, json={**body, "stream_options": {"include_usage": True}}) as reply:
            async for part in reply.aiter_raw():
                raw += part
                if raw.count(b"data: ") > 3 and rest.stack.target is not None:
                    await rest.stack.target.stop(0)
                    rest.stack.target = None
        check_error(read_events(raw))


def check_error(stream: EventStream) -> None:
    """A stream that broke off says so, and nothing that a client could take for success."""
    assert stream.error is not None
    assert not stream.is_done
    assert stream.usage_chunk is None
    assert stream.finish_reasons() == []
    assert set(stream.error) == {"message", "type", "param", "code"}
    assert stream.error["message"]
    assert stream.error["type"] == "service_unavailable_error"
