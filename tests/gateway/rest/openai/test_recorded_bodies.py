"""What well-known programs send with their default settings, and what becomes of it.

Open WebUI: a body of its chat is put together by `process_chat_payload` in backend/open_webui/utils/middleware.py,
which offers its own tools natively since 0.10, and by `generate_chat_completion` in
backend/open_webui/routers/openai.py, which takes `metadata` out and asks for the usage of streams;
`apply_model_params_to_body_openai` in backend/open_webui/utils/payload.py lets settings of Ollama through, such as
`num_ctx`. Titles are asked for without a stream, and `generate_chat_completion` says `max_tokens` to every server but
OpenAI's. The version is 0.12.4.
Continue: what its autocomplete sends to /v1/completions for a coder of Qwen, with the template and the stops of
core/autocomplete/templating/AutocompleteTemplate.ts and those for the end of a line.
GuideLLM: what guidellm/backends/openai/request_handlers.py of 0.8.1 formats.
vllm bench serve: what its backends `openai`, `openai-chat` and `openai-responses` send for the data set `random`, with
--temperature 0, by vllm/benchmarks/lib/endpoint_request_func.py of 0.33.0, and how vllm/benchmarks/serve.py aligns its
prompts to the server's tokens.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.models.chat_templates import CHATML
from support.services.reciting import TURN, RecitingStack, reciting_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
IGNORED = "x-outrider-ignored"
ANSWER = "It is noon."
# No place for tools, as in many a template.
PLAIN = CHATML.replace("<|im_start|>", TURN).replace("<|im_end|>", "")
USER = {"role": "user", "content": "What time is it?"}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "Get the current Unix timestamp in seconds.",
        "parameters": {"properties": {}, "type": "object"},
    },
}
CALL = {"id": "a", "type": "function", "function": {"name": "get_current_timestamp", "arguments": "{}"}}
UNUSUAL, UNREAD = "priority, spaces_between_special_tokens", "messages.name, messages.tool_calls"
OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": "fox",
    "messages": [{"role": "system", "content": "Be brief."}, USER],
    "tools": [CLOCK],
    "stream_options": {"include_usage": True},
}
TITLE = {"model": "fox", "messages": [USER], "stream": False, "max_tokens": 1000}
STREAMED = {
    "model": "fox",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}]
GUIDELLM: dict[str, dict[str, Any]] = {
    CHAT: {**STREAMED, "max_completion_tokens": 5, "messages": PARTS},
    COMPLETIONS: {**STREAMED, "max_tokens": 5, "prompt": f"Once upon a time{TURN}assistant\n"},
}
COUNTED: dict[str, Any] = {
    "model": "fox",
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM: dict[str, dict[str, Any]] = {
    CHAT: {**COUNTED, "max_completion_tokens": 5, "messages": PARTS},
    COMPLETIONS: {
        **COUNTED,
        "prompt": f"Once upon a time{TURN}assistant\n",
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "logprobs": None,
    },
}
VLLM_RESPONSES: dict[str, Any] = {
    "model": "fox",
    "input": "Once upon a time",
    "max_output_tokens": 5,
    "stream": True,
    "store": False,
    "ignore_eos": True,
    "temperature": 0.0,
}
CONTINUE: dict[str, Any] = {
    "model": "fox",
    "max_tokens": 64,
    "temperature": 0.01,
    "stop": [
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
        *("\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```"),
    ],
    "prompt": f"<|fim_prefix|>def now():\n    <|fim_suffix|>\n{TURN}assistant\n<|fim_middle|>",
    "stream": True,
}
FILLED = "return time()"


def script(prompt: str) -> str:
    """What fills a gap and goes on after the stop whose number the prompt has, if it has one; else an answer."""
    if "<|fim_prefix|>" not in prompt:
        return ANSWER
    number = re.search(r"# (\d+)", prompt)
    # The turn begins with the mark.
    return f"<|fim_middle|>{FILLED}{CONTINUE['stop'][int(number[1])] if number else ''}more"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """A stack that is open to strangers, of a model without a place for tools."""
    options = {"drop_tools": True, "unknown_fields": "ignore", "served_model_name": "fox"}
    folder = tmp_path_factory.mktemp("reciter")
    async with reciting_stack(folder, script, [ANSWER, "```"], template=PLAIN, **options) as running:
        yield running


async def answered(stack: RecitingStack, path: str, body: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The header that names what was ignored of a body, and the answer, whole or in chunks."""
    reply = await stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return str(reply.headers.get(IGNORED, "")), [reply.json()]
    *lines, last = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    return str(reply.headers.get(IGNORED, "")), [json.loads(line) for line in lines]


async def test_open_webui_gets_an_answer(stack: RecitingStack) -> None:
    """Without its tools, and without what it means for Ollama; a title, too."""
    ignored, chunks = await answered(stack, CHAT, OPEN_WEBUI)
    assert ignored == "tools"
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks[:-1]) == ANSWER
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    leaking = {**OPEN_WEBUI, "num_ctx": 8192, "num_batch": 512}
    assert (await answered(stack, CHAT, leaking))[0] == "num_ctx, num_batch, tools"
    ignored, [title] = await answered(stack, CHAT, TITLE)
    assert (ignored, title["choices"][0]["message"]["content"]) == ("", ANSWER)


@pytest.mark.slow
async def test_continue_gets_an_answer(stack: RecitingStack) -> None:
    """With all of its stops, and each of them ends the answer and is not in it."""
    assert len(CONTINUE["stop"]) == 14
    for number, stop in enumerate(CONTINUE["stop"]):
        prompt = CONTINUE["prompt"].replace("def now():", f"def now():  # {number}")
        ignored, chunks = await answered(stack, COMPLETIONS, {**CONTINUE, "prompt": prompt})
        assert "".join(each["choices"][0]["text"] for each in chunks) == FILLED, stop
        assert (ignored, chunks[-1]["choices"][0]["finish_reason"]) == ("", "stop")
        assert chunks[-1]["outrider"]["finish_reasons"] == ["stop_string"], stop
    ignored, chunks = await answered(stack, COMPLETIONS, CONTINUE)
    assert "".join(each["choices"][0]["text"] for each in chunks) == f"{FILLED}more"
    assert chunks[-1]["outrider"]["finish_reasons"] == ["eos"]


@pytest.mark.parametrize("path", GUIDELLM)
async def test_guidellm_gets_an_answer(stack: RecitingStack, path: str) -> None:
    """With the usage until then on every chunk."""
    ignored, chunks = await answered(stack, path, GUIDELLM[path])
    assert (ignored, len(chunks) > 2) == ("", True)
    assert [each["usage"]["completion_tokens"] for each in chunks][-1] == 5


@pytest.mark.parametrize("path", VLLM)
async def test_vllms_benchmark_gets_an_answer(stack: RecitingStack, path: str) -> None:
    """Pieces, then their usage with no choice and the server's times, which it reads."""
    ignored, [*pieces, last] = await answered(stack, path, VLLM[path])
    assert (ignored, last["choices"]) == ("", [])
    assert all(each["choices"] and not each["usage"] for each in pieces)
    assert (last["usage"]["completion_tokens"], last["usage"]["prompt_tokens"] > 0) == (5, True)
    assert {"queue_time_ms", "time_to_first_token_ms"} <= last["metrics"].keys()


async def test_vllms_benchmark_aligns_its_prompts(stack: RecitingStack) -> None:
    """The server's tokens of a text, and the text of the first of them."""
    asked = {"model": "fox", "prompt": "Once upon a time", "add_special_tokens": False}
    _, [told] = await answered(stack, TOKENIZE, asked)
    assert len(told["tokens"]) == told["count"] > 3
    _, [text] = await answered(stack, "/detokenize", {"model": "fox", "tokens": told["tokens"][:3]})
    assert text["prompt"]
    assert "Once upon a time".startswith(text["prompt"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [{**USER, "id": 7}, {**USER, "id": 8}]}, "messages.id"),
        (CHAT, {"messages": [USER], "speculation": {"draft": 1}, "a b": 0}, "a%20b, speculation.draft"),
        (CHAT, {"messages": [USER], "tools": [CLOCK], "tool_choice": "auto"}, "tools, tool_choice"),
        (CHAT, {"messages": [USER], "tools": [{**CLOCK, "cache_control": {}}]}, "tools, tools.cache_control"),
        (CHAT, {"messages": [USER], "modalities": ["text"], "top_k": -1, "priority": 0}, ""),
        (
            CHAT,
            {"messages": [{**USER, "refusal": "x", "content": [{"type": "text", "text": "x", "y": 1}]}], "num_ctx": 1},
            "num_ctx, messages.content.y, messages.refusal",
        ),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "num_ctx": 1, "metadata": {}}, "num_ctx, metadata"),
        ("/v1/responses", {"input": [{**USER, "type": "message", "seen": True}]}, "input.seen"),
        ("/v1/responses", VLLM_RESPONSES, "ignore_eos"),
        (TOKENIZE, {"prompt": "a", "truncate": True}, "truncate"),
        (
            CHAT,
            {
                "messages": [USER],
                "priority": 5,
                "skip_special_tokens": False,
                "modalities": ["text", "audio"],
                "audio": {"voice": "alloy"},
            },
            "audio, modalities, priority, skip_special_tokens",
        ),
        (
            CHAT,
            {"messages": [USER], "service_tier": "flex", "store": True, "verbosity": "low", "num_ctx": 1, "user": "u"},
            "service_tier, store, verbosity, num_ctx, user",
        ),
        (
            COMPLETIONS,
            {"prompt": f"x{TURN}assistant\n", "priority": -1, "spaces_between_special_tokens": False},
            UNUSUAL,
        ),
        (
            CHAT,
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        (CHAT, {"messages": [{**USER, "name": "Ada"}, {"role": "assistant", "tool_calls": [CALL]}]}, UNREAD),
        (
            CHAT,
            {
                "messages": [USER],
                "prediction": {"type": "content", "content": [{"type": "text", "text": "It", "y": 1}]},
            },
            "prediction.content.y",
        ),
    ],
)
async def test_what_is_unknown_is_named(stack: RecitingStack, path: str, body: dict[str, Any], named: str) -> None:
    """On every route, wherever in the body it is, and each once; so is what is known and not served as asked, and what
    the template does not read.
    """
    reply = await stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get(IGNORED, "") == named


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": [USER], "num_ctx": 1, "temperature": -1}, "temperature is -1, but must be greater than or equal"),
        ({"messages": [{"role": "user", "x": 1}]}, "messages.0.content is missing"),
        ({"num_ctx": 1}, "messages is missing"),
        ({"messages": [USER], "functions": [{"name": "f"}], "num_ctx": 1}, "functions is not served"),
        ({"messages": [USER], "guided_json": {}}, "guided_json is not a known parameter; use structured_outputs.json"),
        ({"messages": [USER], "bad_words": ["x"]}, "bad_words is not a known parameter; use banned_words"),
        ({"messages": [{**USER, "audio": {"id": "a"}}], "store": True}, "messages.0.audio is not served"),
        (
            {"messages": [USER], "tools": [CLOCK], "tool_choice": {"type": "function"}},
            "tool_choice.function is missing",
        ),
    ],
)
async def test_what_is_known_is_checked_all_the_same(stack: RecitingStack, body: dict[str, Any], sentence: str) -> None:
    """And what is known and not served is refused."""
    reply = await stack.http.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(sentence)


async def test_many_unknown_keys_take_no_longer(stack: RecitingStack) -> None:
    """One in each of a hundred messages, each with another name, in one try; the header is bounded."""
    messages = [{**USER, f"key-{number}": 1} for number in range(100)]
    reply = await stack.http.post(CHAT, json={"messages": messages})
    assert reply.status_code == 200
    assert reply.headers[IGNORED].startswith("messages.key-0, messages.key-1, ")
    assert len(reply.headers[IGNORED]) == 2048 or reply.headers[IGNORED].endswith("key-99")


async def test_nothing_is_ignored_unless_the_operator_says_so(tmp_path: Path) -> None:
    """By default both are refused by name."""
    async with reciting_stack(tmp_path, lambda _: ANSWER, [ANSWER], template=PLAIN) as strict:
        for body, sentence in (
            ({"messages": [USER], "num_ctx": 1}, "num_ctx is not a known parameter"),
            ({"messages": [USER], "tools": [CLOCK]}, "tools is not served: the model's chat template has no place"),
            (
                {"messages": [USER], "skip_special_tokens": False},
                "skip_special_tokens is False, but only true is served",
            ),
            (
                {"messages": [USER], "modalities": ["text", "audio"]},
                "modalities.1 is 'audio', but only 'text' is served",
            ),
            (
                {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
                "chat_template_kwargs.enable_th",
            ),
        ):
            reply = await strict.http.post(CHAT, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(sentence)
