"""Conversations with tools over REST, where the model's chat template has a place for all that a turn can carry."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.models.templated import templated
from support.stack import RunningStack, running_stack
from transformers import PreTrainedTokenizerFast

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = """
{%- if tools is not none %}{{ 'You may call:\\n' }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson ~ '\\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.reasoning_content == 'secret' %}
        {{- raise_exception('Nobody thinks so here.') }}
    {%- endif %}
    {{- message.role }}{{ ' ' ~ message.name if message.name is defined }}
    {{- ' to ' ~ message.tool_call_id if message.tool_call_id is defined }}: {{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- ' <' ~ call.id ~ ' ' ~ call.function.name ~ '> ' ~ call.function.arguments | tojson }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}
"""
PARAMETERS = {"type": "object", "properties": {"where": {"type": "string", "default": None}}}
TOOL = {"type": "function", "function": {"name": "count", "description": "Counts <ships>.", "parameters": PARAMETERS}}
TOOL_LINE = f"{json.dumps(TOOL)}\n"
ONE_TOOL = f"You may call:\n{TOOL_LINE}"
USER = {"role": "user", "name": "Ada", "content": "How many ships?"}
ARGUMENTS = {"where": "é", "deep": [1, None]}
CALLS = [
    {"id": f"call-{number}", "type": "function", "function": {"name": "count", "arguments": ARGUMENTS}}
    for number in range(2)
]
CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULTS = [{"role": "tool", "tool_call_id": f"call-{number}", "content": str(number)} for number in (1, 0)]
SECRET = {"role": "assistant", "content": "Three.", "reasoning_content": "secret"}
TURNS = [USER, CALLING, *RESULTS]
TURN_LINES = (
    'user Ada: How many ships?\nassistant:  <call-0 count> {"where": "é", "deep": [1, null]}'
    ' <call-1 count> {"where": "é", "deep": [1, null]}\ntool to call-1: 1\ntool to call-0: 0\nassistant:'
)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """The embedded pair's tokenizer as transformers reads it, from a folder with a chat template."""
    return PreTrainedTokenizerFast.from_pretrained(templated(tmp_path_factory.mktemp("templated"), TEMPLATE))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[RunningStack]:
    """A target with a gateway that has that folder."""
    options = {"tokenizer": tokenizer.name_or_path, "rest_listen": "127.0.0.1:0"}
    async with running_stack(draft=None, gateway=options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows nothing of the protocol."""
    assert stack.gateway is not None
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}", timeout=60) as client:
        yield client


@pytest.fixture
def prompts(stack: RunningStack, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids of all prompts that reach the target."""
    seen: list[list[int]] = []
    begin = stack.target.runner.open

    def noted(token_ids: list[int], *rest: Any) -> Any:
        seen.append(list(token_ids))
        return begin(token_ids, *rest)

    monkeypatch.setattr(stack.target.runner, "open", noted)
    return seen


def body_of(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A body in which calls have their arguments as text, as the protocol wants them."""
    copied = json.loads(json.dumps(messages))
    for call in (call for message in copied for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return {"messages": copied, "max_tokens": 2, **fields}


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([USER], {}, "user Ada: How many ships?\nassistant:"),
        ([USER], {"tools": []}, "user Ada: How many ships?\nassistant:"),
        ([USER], {"tools": [TOOL]}, f"{ONE_TOOL}user Ada: How many ships?\nassistant:"),
        (TURNS, {}, TURN_LINES),
        (TURNS, {"tools": [TOOL], "tool_choice": "auto"}, ONE_TOOL + TURN_LINES),
        (TURNS, {"tools": [TOOL], "tool_choice": "none"}, ONE_TOOL + TURN_LINES),
        (TURNS, {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}, ONE_TOOL + TURN_LINES),
    ],
)
async def test_the_target_reads_what_the_template_says(
    http: httpx.AsyncClient,
    prompts: list[list[int]],
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    fields: dict[str, Any],
    expected: str,
) -> None:
    """Names, calls, answers with the ids of their calls, and tools whatever the choice: the ids of transformers."""
    reply = await http.post(CHAT, json=body_of(messages, **fields))
    assert reply.status_code == 200, reply.text
    assert [tokenizer.decode(ids) for ids in prompts] == [expected]
    tools = fields.get("tools") or None
    assert prompts == [tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, return_dict=False)]
    assert f'"prompt_tokens":{len(prompts[0])},' in reply.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_template_s_own_sentence_is_the_error(
    http: httpx.AsyncClient, prompts: list[list[int]], stream: bool
) -> None:
    """About the messages, with a status also for a stream, before anything reaches the target."""
    reply = await http.post(CHAT, json=body_of([USER, SECRET], tools=[TOOL], stream=stream))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "messages", "invalid_value")
    assert error["message"].endswith("the chat template takes them, which says: Nobody thinks so here.")
    assert not prompts


async def test_guesses_change_nothing_where_an_answer_is_a_call_or_a_form(http: httpx.AsyncClient) -> None:
    """And it is one of both, with as much of the tool as can be enforced."""
    where = {"type": "string", "maxLength": 6, "pattern": "^(?=a)"}
    odd = {"type": "object", "properties": {"where": where, "n": None}, "required": None, "additionalProperties": False}
    form = {"type": "object", "properties": {"hero": {"enum": ["fox", "king"]}}, "required": ["hero"]}
    shape = {"type": "json_schema", "json_schema": {"name": "hero", "schema": {**form, "additionalProperties": False}}}
    tool = {"type": "function", "function": {"name": "count", "parameters": odd}}
    kinds = set()
    for seed in range(6):
        body = body_of([USER], tools=[tool], response_format=shape, seed=seed, temperature=1.0)
        body |= {"max_tokens": 200, "return_token_ids": True, "parallel_tool_calls": False}
        guessed = (await http.post(CHAT, json=body)).raise_for_status().json()
        plain = (await http.post(CHAT, json={**body, "speculation": {"enabled": False}})).raise_for_status().json()
        [choice] = guessed["choices"]
        assert choice["token_ids"] == plain["choices"][0]["token_ids"]
        assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in choice["message"] else "stop")
        assert guessed["outrider"]["ignored_keywords"] == ["pattern"]
        for call in choice["message"].get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"]).keys() <= {"where"}
        content = choice["message"]["content"]
        assert content is None or json.loads(content) in ({"hero": "fox"}, {"hero": "king"})
        kinds.add(content is None)
    assert kinds == {True, False}


async def test_grpc_reads_the_same(http: httpx.AsyncClient, prompts: list[list[int]], stack: RunningStack) -> None:
    """What its messages can carry: roles and contents."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert (await http.post(CHAT, json=body_of(turns))).status_code == 200
    request = pb.ChatRequest(messages=[pb.ChatMessage(**turn) for turn in turns])
    request.generation.max_tokens = 2
    stub = GenerationServiceStub(stack.channel(stack.address))
    assert [each async for each in stub.Chat(request)]
    assert len(prompts) == 2
    assert prompts[0] == prompts[1]
