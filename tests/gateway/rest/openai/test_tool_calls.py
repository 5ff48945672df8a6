"""Calls of tools and reasoning over /v1/chat/completions, from a target that says prepared answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from canitoolcall.probe import BUILTIN_SCENARIOS, probe
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel
from support.services.reciting import RecitingStack, reciting_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
# So that several tokens come at once.
GUESSES = {"speculation": {"draft_count": 4}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOKYO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京 ☔"}}\n</tool_call>'
NOTE = '{"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}'
PEOPLE = '[{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}]'
EVENT = f'{{"title": "Design review", "attendees": {PEOPLE}, "location": {{"city": "Berlin", "room": "4.12"}}}}'
# What the target says, by what the last user says.
ANSWERS = {
    "weather in Paris right now": PARIS,
    "in Paris and in Tokyo": f"{PARIS}\n{TOKYO}",
    "What is 17 + 25?": "42",
    "Create an event": f'Done.\n<tool_call>\n{{"name": "create_event", "arguments": {EVENT}}}\n</tool_call>',
    "Save a note": f'<tool_call>\n{{"name": "save_note", "arguments": {NOTE}}}\n</tool_call>',
    "What time is it": '<tool_call>\n{"name": "get_server_time", "arguments": {}}\n</tool_call>',
    "about Lisbon": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>',
    "temp_c": "It is 18 degrees and clear.",
    "which number is larger": "<think>\n9.9 is 9.90.\n</think>\n\n"
    '<tool_call>\n{"name": "record_answer", "arguments": {"answer": "9.9"}}\n</tool_call>',
    "Think of Rome": "<think>\nRome, then.\n</think>\n\nAll roads lead there.",
    "Cut": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Llanfairpwllgwyngyllgogerychwyrndrobwll"}}',
    "Both": f"Let me look STOP here.\n{PARIS}",
}


def script(prompt: str) -> str:
    """The answer to what was said last."""
    said = max(ANSWERS, key=prompt.rfind)
    assert said in prompt
    if prompt.endswith("</think>\n\n"):
        return ANSWERS[said].rpartition("</think>\n\n")[2]
    return ANSWERS[said]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """One stack for all."""
    async with reciting_stack(tmp_path_factory.mktemp("reciter"), script, ANSWERS.values()) as running:
        yield running


class City(BaseModel):
    """Where it may rain."""

    city: str


def client_model(stack: RecitingStack) -> str:
    """The name of the model that is served."""
    return stack.gateway.frontend.model_name


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def ask(stack: RecitingStack, text: str, **fields: Any) -> dict[str, Any]:
    """The whole answer's body."""
    reply = await stack.http.post(CHAT, json={"messages": user(text), "tools": [TOOL], **GUESSES, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def chunks(stack: RecitingStack, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    body = {"messages": user(text), "tools": [TOOL], "stream": True, **GUESSES, **fields}
    reply = await stack.http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
async def test_all_scenarios_of_the_probe_pass(stack: RecitingStack) -> None:
    """Nine of them, whole and streamed, and both alike, without a warning."""
    report = await asyncio.to_thread(probe, stack.base_url, stack.gateway.frontend.model_name, concurrency=2)
    assert len(report.outcomes) == 3 * len(BUILTIN_SCENARIOS) == 27
    bad = [each for each in report.outcomes if each.status != "pass" or each.warnings]
    assert not bad, report.render_text()


async def test_a_call_is_a_message_without_content(stack: RecitingStack) -> None:
    """With an id, a name, arguments as text, and the reason "tool_calls"."""
    body = await ask(stack, "in Paris and in Tokyo")
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert {**first, "id": ""} == {
        "id": "",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    assert json.loads(second["function"]["arguments"]) == {"city": "東京 ☔"}
    assert body["outrider"]["accepted_tokens"] > 0


async def test_no_delta_mixes_two_kinds(stack: RecitingStack) -> None:
    """A call begins with its id, name and no arguments; what follows has its index and more of these."""
    deltas = [each["choices"][0]["delta"] for each in await chunks(stack, "Create an event", max_tokens=200)]
    kinds = [set(each) - {"role"} for each in deltas]
    assert all(len(each) <= 1 for each in kinds)
    assert "".join(each.get("content") or "" for each in deltas) == "Done."
    begun, *more = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
    assert begun.keys() == {"index", "id", "type", "function"}
    assert begun["function"] == {"name": "create_event", "arguments": ""}
    assert all(each.keys() == {"index", "function"} and each["index"] == 0 for each in more)
    assert "".join(each["function"]["arguments"] for each in more) == EVENT


async def test_a_call_that_the_limit_cuts_off_is_not_told(stack: RecitingStack) -> None:
    """And the reason is "length", also when there was a whole call before."""
    body = await ask(stack, "Cut", max_tokens=10)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    whole = await ask(stack, "in Paris and in Tokyo")
    body = await ask(stack, "in Paris and in Tokyo", max_tokens=whole["usage"]["completion_tokens"] - 4)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
async def test_without_tools_to_call_an_answer_is_text(stack: RecitingStack, fields: dict[str, Any]) -> None:
    """Whatever it looks like."""
    body = await ask(stack, "weather in Paris right now", **fields)
    assert body["choices"][0]["message"]["content"] == PARIS
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_reasoning_goes_on_as_reasoning(stack: RecitingStack) -> None:
    """Where the message that goes on has begun to think; after its end comes text."""
    for begun, expected in (("<think>\nRome", ", then."), ("<think>\nRome, then.\n</think>\n\nAll", None)):
        turns = [*user("Think of Rome"), {"role": "assistant", "content": begun}]
        reply = await stack.http.post(CHAT, json={"messages": turns, "continue_final_message": True})
        message = reply.json()["choices"][0]["message"]
        text = "All roads lead there." if expected else " roads lead there."
        assert (message.get("reasoning_content"), message["content"]) == (expected, text)


async def test_reasoning_is_apart_from_the_answer_and_counted(stack: RecitingStack) -> None:
    """Whole and streamed, unless it is not wanted."""
    body = await ask(stack, "Think of Rome", tools=None)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rome, then.", "All roads lead there.")
    details, count = body["usage"]["completion_tokens_details"], body["usage"]["completion_tokens"]
    assert 0 < details["reasoning_tokens"] < count
    deltas = [each["choices"][0]["delta"] for each in await chunks(stack, "Think of Rome")]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "Rome, then."
    assert "".join(each.get("content", "") for each in deltas) == "All roads lead there."
    hidden = await ask(stack, "Think of Rome", include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == body["usage"] | {"prompt_tokens_details": hidden["usage"]["prompt_tokens_details"]} | {
        name: hidden["usage"][name] for name in ("prompt_tokens", "total_tokens")
    }


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_thinking_can_be_switched_off(stack: RecitingStack, fields: dict[str, Any]) -> None:
    """By the template's own variable, or by the effort, which sets it."""
    body = await ask(stack, "Think of Rome", **fields)
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_stop_strings_end_content_and_not_calls(stack: RecitingStack) -> None:
    """One in the content ends all; one in the arguments of a call is no one's business."""
    body = await ask(stack, "Both", stop=["STOP"])
    assert body["choices"][0]["message"]["content"] == "Let me look "
    assert body["choices"][0]["finish_reason"] == "stop"
    body = await ask(stack, "weather in Paris right now", stop=["Paris"])
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_log_probabilities_and_ids_belong_to_tokens_whichever_delta(stack: RecitingStack) -> None:
    """All ids of an answer are in its chunks, once each."""
    whole = await ask(stack, "Create an event", return_token_ids=True)
    told = await chunks(stack, "Create an event", return_token_ids=True)
    ids = [token_id for each in told for token_id in each["choices"][0].get("token_ids", ())]
    assert ids == whole["choices"][0]["token_ids"]


async def test_usage_can_be_told_with_every_chunk(stack: RecitingStack) -> None:
    """It grows to that of the end."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = await chunks(stack, "weather in Paris right now", stream_options=options)
    counts = [each["usage"]["completion_tokens"] for each in told]
    assert counts == sorted(counts)
    assert told[-1]["choices"] == []
    whole = await ask(stack, "weather in Paris right now")
    assert counts[-1] == whole["usage"]["completion_tokens"]
    bare = await chunks(stack, "weather in Paris right now", stream_options={"continuous_usage_stats": True})
    assert all(each["choices"] for each in bare)
    assert bare[-1]["usage"]["completion_tokens"] == counts[-1]


async def test_what_clients_echo_is_taken_and_named(stack: RecitingStack) -> None:
    """Arguments as an object too; the header says what was not looked at, keys of parts that a client made up too."""
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    turns = [
        *user("What's the weather?"),
        {
            **{"role": "assistant", "content": "", "reasoning_content": "Ask.", "annotations": [], "refusal": None},
            "tool_calls": [{"index": 0, "id": "a", "type": "function", "function": function}],
            **{"provider_specific_fields": {"x": 1}, "audio": None},
        },
        {
            **{"role": "tool", "tool_call_id": "a"},
            "content": [{"type": "text", "text": "temp_c", "cache_control": {}, "its\nid, é": 1, "none": None}],
        },
    ]
    for stream in (False, True):
        reply = await stack.http.post(CHAT, json={"messages": turns, "tools": [TOOL], "stream": stream})
        assert reply.status_code == 200, reply.text
        named = "messages.tool_calls.index, messages.annotations, messages.provider_specific_fields"
        parts = "messages.content.cache_control, messages.content.its%0Aid%2C%20%C3%A9"
        assert reply.headers["x-outrider-ignored"] == f"{named}, {parts}"
    assert "x-outrider-ignored" not in (await stack.http.post(CHAT, json={"messages": user("Both")})).headers


async def test_openai_s_own_message_is_echoed_as_it_is(stack: RecitingStack) -> None:
    """With what its package parsed of a call, whole and as the fields that are set; what was parsed is named."""
    async with AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        tools: list[Any] = [pydantic_function_tool(City, name="get_weather")]
        asked: list[Any] = user("weather in Paris right now")
        parsed = await client.chat.completions.parse(model=client_model(stack), messages=asked, tools=tools)
        message = parsed.choices[0].message
        assert message.tool_calls
        assert message.tool_calls[0].function.parsed_arguments == City(city="Paris")
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "temp_c: 18"}
        for echoed in (message, message.to_dict(), message.model_dump(), message.model_dump(exclude_none=True)):
            raw = await client.chat.completions.with_raw_response.create(
                model=client_model(stack), messages=[*asked, echoed, result], tools=tools
            )
            assert raw.parse().choices[0].message.content == "It is 18 degrees and clear."
            named = raw.headers["x-outrider-ignored"].split(", ")
            assert set(named) <= {"messages.parsed", "messages.tool_calls.function.parsed_arguments"}
            assert "messages.tool_calls.function.parsed_arguments" in named


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": "No.", "refusal": "I will not."}, "No."),
        ({"content": None, "reasoning_content": "Hm."}, ""),
    ],
)
async def test_an_assistant_may_have_refused_or_only_thought(
    stack: RecitingStack, turn: dict[str, Any], shown: str
) -> None:
    """A refusal stands for content where there is none; beside content it is named."""
    messages = [*user("Who?"), {"role": "assistant", **turn}, *user("weather in Paris right now")]
    reply = await stack.http.post("/tokenize", json={"messages": messages})
    assert reply.status_code == 200, reply.text
    prompt = (await stack.http.post("/detokenize", json={"tokens": reply.json()["tokens"]})).json()["prompt"]
    assert (shown or "I will not.") in prompt if shown else "I will not." not in prompt
    is_named = reply.headers.get("x-outrider-ignored") == "messages.refusal"
    assert is_named == (turn.get("content") == "No.")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name is 'get_weather', but must be unlike those"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name is 'a b', but must be text that",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters.type is 'string', but must be 'object'",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"properties": []}, "strict": True}}
                ]
            },
            "tools.0.function.parameters.properties is [], but must be an object",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "dive"}}},
            "tool_choice.function.name is 'dive', but must be one of get_weather",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "dive"}}]},
                }
            },
            "tool_choice.allowed_tools.tools.0.function.name is 'dive', but must be one of get_weather",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice is 'required', but must be absent without tools"),
        (
            {"chat_template_kwargs": {"messages": "x"}},
            "chat_template_kwargs.messages is 'x', but must be absent; the template takes enable_thinking",
        ),
    ],
)
async def test_faults_are_named(stack: RecitingStack, fields: dict[str, Any], sentence: str) -> None:
    """The field, its value and the limit."""
    reply = await stack.http.post(CHAT, json={"messages": user("Both"), "tools": [TOOL], **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(sentence)


async def test_a_schema_that_is_too_large_is_refused(stack: RecitingStack) -> None:
    """By its size."""
    function = {"name": "a", "parameters": {"properties": {"a": {"const": "y" * (1 << 18)}}}}
    tools = [{"type": "function", "function": function}]
    reply = await stack.http.post(CHAT, json={"messages": user("Both"), "tools": tools})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith("bytes, but must have at most 262144")


async def test_the_page_gets_reasoning_apart(stack: RecitingStack) -> None:
    """In the rounds in which it came; the text is the answer alone."""
    reply = await stack.http.post("/page/generate", json={"messages": user("Think of Rome")})
    views = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert "".join(view.get("reasoning", "") for view in views) == "Rome, then."
    texts = [token["text"] for view in views for token in view.get("tokens", ())]
    assert "".join(texts) + views[-1]["text"] == "All roads lead there."
    assert views[-1]["usage"]["reasoning_tokens"] > 0


async def test_the_page_gets_calls_apart(stack: RecitingStack) -> None:
    """With their ids, names and arguments in pieces; what is wrong with tools has the names that it has on /v1."""
    body = {"messages": user("in Paris and in Tokyo"), "tools": [TOOL]}
    reply = await stack.http.post("/page/generate", json=body)
    views = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]
    pieces = [piece for view in views for piece in view.get("calls", ())]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["get_weather", "get_weather"]
    assert len({piece["call_id"] for piece in pieces if "name" in piece}) == 2
    arguments = ["".join(each["text"] for each in pieces if each["index"] == n and "text" in each) for n in (0, 1)]
    assert [json.loads(each) for each in arguments] == [{"city": "Paris"}, {"city": "東京 ☔"}]
    assert "".join(token["text"] for view in views for token in view.get("tokens", ())) == ""
    for changes in ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tool_choice": "all"}):
        bad = {**body, **changes}
        refusals = [(await stack.http.post(path, json=bad)).json()["error"] for path in (CHAT, "/page/generate")]
        assert refusals[0] == refusals[1]
        assert refusals[0]["param"].startswith(next(iter(changes)))


async def test_a_gateway_that_reads_no_calls_says_so(tmp_path: Path) -> None:
    """With --tool-format off an answer is text, and what must be a call is refused."""
    async with reciting_stack(tmp_path, script, ANSWERS.values(), tool_format="off") as deaf:
        body = await ask(deaf, "which number is larger")
        assert body["choices"][0]["message"]["content"] == ANSWERS["which number is larger"]
        forced = {"messages": user("Both"), "tools": [TOOL], "tool_choice": "required"}
        reply = await deaf.http.post(CHAT, json=forced)
        assert reply.status_code == 400
        assert "--tool-format off" in reply.json()["error"]["message"]
