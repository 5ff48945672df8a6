"""What each door makes of a conversation that comes back: nothing of it is lost in silence.

The templates take as much as those of the usual families do; the target's prompt is what is looked at.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.rest.histories import DOORS, HEADER, Called, Door, Gave, Said, Turns, chat, grpc_chat, messages, responses
from support.services.reciting import TEMPLATE, RecitingStack, reciting_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

# As Qwen 3.5 wants rules first, Mistral ids of nine characters, and Llama 3 one call a turn; others' words are dropped.
STRICT = """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
        {{- '<|turn|>system\\n' ~ message.content }}
    {%- elif message.role == 'user' %}{{ '<|turn|>user\\n' ~ message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|turn|>assistant\\n' ~ message.content }}
        {%- if message.tool_calls %}
            {%- if message.tool_calls | length != 1 %}{{ raise_exception('Only single tool-calls!') }}{% endif %}
            {%- if message.tool_calls[0].id | length != 9 %}{{ raise_exception('Ids have length 9!') }}{% endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<tool_call>' ~ call.name ~ ' ' ~ call.arguments | tojson ~ '</tool_call>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception('Ids have length 9!') }}{% endif %}
        {{- '<|turn|>tool\\n' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
# Nobody has a word here but user and assistant.
DEAF = """
{%- for message in messages if message.role in ('user', 'assistant') %}
    {{- '<|turn|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
# As Gemma: no rules at all, user and assistant by turns, and nobody else.
GEMMA = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|turn|>' ~ message.role ~ '\\n' ~ message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
TEMPLATES = {"loose": TEMPLATE, "strict": STRICT, "deaf": DEAF, "gemma": GEMMA}
ASK = Said("user", "Ask")
TWO = Called([("toolu_01AX", "look", '{"at": "sea"}'), ("toolu_01BX", "hear", '{"at": "bay"}')], "Well")
BROKEN = Called([("call_1", "look", '{"at": "se')])
RESULTS = [Gave("toolu_01BX", "gulls"), Gave("toolu_01AX", "ships")]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=TEMPLATES)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, RecitingStack, list[str]]]:
    """A template's name, its stack and the prompts that it saw."""
    prompts: list[str] = []

    def said(prompt: str) -> str:
        prompts.append(prompt)
        return "Aye"

    folder = tmp_path_factory.mktemp("history")
    async with reciting_stack(folder, said, ["Aye"], template=TEMPLATES[request.param], served_model_name="*") as stack:
        yield request.param, stack, prompts


@pytest.fixture(params=DOORS, ids=lambda each: each.__name__)
def door(request: pytest.FixtureRequest) -> Door:
    return request.param  # type: ignore[no-any-return]


def in_order(prompt: str, *words: str) -> bool:
    """Whether a prompt has these words, one behind the other."""
    place = 0
    for word in words:
        place = prompt.find(word, place)
        if place < 0:
            return False
    return True


@pytest.mark.parametrize("rule", ["system", "developer"])
async def test_rules_are_one_message_before_the_first_answer(
    running: tuple[str, RecitingStack, list[str]], door: Door, rule: str
) -> None:
    """Later ones are where the template has a place for them, or else the user's text; so are the first for one that
    has no place for any.
    """
    name, stack, prompts = running
    first = [Said("system", "Be brief"), Said("developer", "Be kind"), ASK, Said(rule, "Be fair")]
    taken = await door(stack, [*first, Said("assistant", "Said"), Said(rule, "Be late"), Said("user", "Go")])
    assert (taken.error, taken.ignored) == ("", "")
    last = "<|turn|>system\nBe late" if name == "loose" else "<|turn|>user\nBe late\nGo"
    rules = "Be brief\n\nBe kind\n\nBe fair"
    first_turns = f"user\n{rules}\n\nAsk" if name in NO_RULES else f"system\n{rules}<|turn|>user\nAsk"
    assert in_order(prompts[-1], f"<|turn|>{first_turns}", "Said", last, "Go")
    assert prompts[-1].count("Be brief") == 1


NO_RULES = ("deaf", "gemma")


@pytest.mark.parametrize(
    "turns",
    [
        [Said("system", "Be brief"), Said("assistant", "Said"), Said("user", "Go")],
        [Said("system", "Be brief"), TWO, *RESULTS, Said("user", "Go"), Said("user", "On")],
        [
            Said("user", "Ask"),
            Said("user", "Go"),
            Said("assistant", "Said"),
            Said("assistant", "More"),
            Said("user", "End"),
        ],
        [Said("system", "Be brief"), Said("developer", "Be kind")],
    ],
    ids=["the assistant begins", "calls begin", "two at a time", "rules alone"],
)
async def test_all_words_are_there_whoever_begins(
    running: tuple[str, RecitingStack, list[str]], door: Door, turns: Turns
) -> None:
    """Each of them once and in order, whatever order of speakers a template wants."""
    _, stack, prompts = running
    taken = await door(stack, turns)
    assert taken.error == ""
    words = [turn.text for turn in turns if not isinstance(turn, Gave)]
    assert in_order(prompts[-1], *words), prompts[-1]
    assert all(prompts[-1].count(word) == 1 for word in words)


@pytest.mark.parametrize(
    ("turns", "words", "fields"),
    [
        ([ASK, TWO, *RESULTS], ["Ask", "Well", "look", "sea", "hear", "bay", "gulls"], ["tool_calls", "tool_call_id"]),
        ([ASK, BROKEN, Gave("call_1", "ships")], ["Ask", "look", "partial_json", '"{\\"at\\": \\"se"', "ships"], []),
        ([ASK, Gave("toolu_09XX", "ships"), Said("user", "Well?")], ["Ask", "ships", "Well?"], ["tool_call_id"]),
        ([ASK, Called([("", "look", "")]), Gave("", "ships")], ["Ask", "look", "ships"], []),
    ],
    ids=["two calls", "broken arguments", "a result without a call", "no ids"],
)
async def test_what_came_before_is_read_as_far_as_it_goes(
    running: tuple[str, RecitingStack, list[str]], door: Door, turns: Turns, words: list[str], fields: list[str]
) -> None:
    """And what the template does not take so is named, as arguments are that were no object."""
    name, stack, prompts = running
    taken = await door(stack, turns)
    assert taken.error == ""
    prompt = prompts[-1]
    if turns[1] is TWO and name == "strict":
        words = ["Ask", "Well", "look", "sea", "ships", "hear", "bay", "gulls"]
    assert in_order(prompt, *words), prompt
    if turns[1] is TWO:
        assert "ships" in prompt
    if turns[1] is BROKEN:
        assert NAMED[door]["arguments"] in taken.ignored.split(", ")
    if name == "strict":
        assert {NAMED[door][each] for each in fields} <= {*taken.ignored.split(", ")}
    elif name == "loose" and turns[1] is not BROKEN:
        assert taken.ignored == ""


NAMED: dict[Door, dict[str, str]] = {
    chat: {
        "tool_calls": "messages.tool_calls",
        "tool_call_id": "messages.tool_call_id",
        "arguments": "messages.tool_calls.function.arguments",
    },
    responses: {
        "tool_calls": "input.function_call",
        "tool_call_id": "input.call_id",
        "arguments": "input.arguments",
    },
    messages: {
        "tool_calls": "messages.content.tool_use",
        "tool_call_id": "messages.content.tool_use_id",
        "arguments": "messages.content.input",
    },
    grpc_chat: {
        "tool_calls": "messages.tool_calls",
        "tool_call_id": "messages.tool_call_id",
        "arguments": "messages.tool_calls.arguments",
    },
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
OTHERS: list[tuple[str, list[dict[str, Any]], list[str], str]] = [
    (
        "/v1/chat/completions",
        [
            {
                "role": "assistant",
                "content": [],
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}],
            },
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "done"}],
            },
            {"role": "assistant", "content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "I see"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "I must not"}]},
            {"role": "assistant", "content": None, "refusal": "Nor that"},
            {"role": "assistant", "content": None, "function_call": {"name": "older", "arguments": '{"at": "quay"}'}},
            {"role": "function", "name": "older", "content": "tides"},
            {"role": "assistant", "tool_calls": [{"id": "e", "function": {"name": "listed", "arguments": ["pier"]}}]},
            {"role": "tool", "tool_call_id": "e", "content": None},
            {"role": "assistant", "content": None},
        ],
        ["patch", "*** Begin", "done", "I see", "I must not", "Nor that", "older", "quay", "tides", "listed", "pier"],
        "messages.tool_calls.custom, messages.2.content=image_url, messages.3.content=thinking, "
        "messages.function_call, messages.tool_calls.function.arguments",
    ),
    (
        "/v1/responses",
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "gA"},
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "I must not"}]},
            {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls", "-l"]}},
            {"type": "local_shell_call_output", "id": "d", "output": "total 3"},
            {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "tides"}},
            {"type": "mcp_call", "id": "m", "name": "fetch", "arguments": '{"url": "u1"}', "output": "page"},
            {"type": "mcp_list_tools", "id": "l", "tools": []},
            {"type": "function_call", "name": "whole", "arguments": {"at": "quay"}},
            {"type": "function_call_output", "output": ""},
            {
                "type": "function_call_output",
                "call_id": "x",
                "output": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "seen"}],
            },
        ],
        [
            "patch",
            "*** Begin",
            "done",
            "I must not",
            "ls",
            "total 3",
            "tides",
            "fetch",
            "u1",
            "page",
            "whole",
            "quay",
            "seen",
        ],
        "input.encrypted_content, input.2=custom_tool_call, input.5=local_shell_call, input.6=local_shell_call_output, "
        "input.7=web_search_call, input.8=mcp_call, input.9=mcp_list_tools, input.12.output=input_image",
    ),
    (
        "/v1/messages",
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "tides"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "u1"}]},
                    {"type": "tool_use", "id": "t", "name": "look", "input": None},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE, {"type": "text", "text": "seen"}]}
                ],
            },
        ],
        ["web_search", "tides", "u1", "look", "seen"],
        "messages.1.content.0=server_tool_use, messages.1.content.1=web_search_tool_result, "
        "messages.2.content.0.content=image",
    ),
]


@pytest.mark.parametrize(("path", "turns", "words", "ignored"), OTHERS, ids=lambda each: str(each)[:14])
async def test_what_other_servers_answered_is_said_as_text_or_calls(
    running: tuple[str, RecitingStack, list[str]],
    path: str,
    turns: list[dict[str, Any]],
    words: list[str],
    ignored: str,
) -> None:
    """Custom calls, refusals, tools that a server runs by itself, images beside the text of a result; all are named."""
    _, stack, prompts = running
    conversation = [{"role": "user", "content": "Ask"}, *turns, {"role": "user", "content": "Well?"}]
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    field = "input" if path.endswith("responses") else "messages"
    reply = await stack.http.post(path, json={field: conversation, limit: 4})
    assert reply.status_code == 200, reply.text
    assert in_order(prompts[-1], "Ask", *words, "Well?"), prompts[-1]
    assert {*ignored.split(", ")} <= {*reply.headers[HEADER].split(", ")}


@pytest.mark.parametrize("field", ["parallel_tool_calls", ""])
async def test_what_a_template_does_not_take_back_is_not_made(
    running: tuple[str, RecitingStack, list[str]], field: str
) -> None:
    """Where a turn may have one call, an answer has no second one, which is named if it was asked for."""
    name, stack, _ = running
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {
        "messages": [{"role": "user", "content": "Ask"}],
        "tools": [tool],
        "max_tokens": 4,
        "tool_choice": "required",
    }
    reply = await stack.http.post("/v1/chat/completions", json={**body, **({field: True} if field else {})})
    assert reply.status_code == 200, reply.text
    once = await stack.http.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False})
    assert once.status_code == 200
    free, single = (each.grammar for each in stack.target.opens[-2:])
    assert (free == single) == (name == "strict")
    assert (reply.headers.get(HEADER) == "parallel_tool_calls") == (name == "strict" and bool(field))


PART: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "x"}}, "only 'text' is served"),
    ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "x"}}, "only 'text' is served"),
    ("/v1/responses", {"type": "input_image", "image_url": "x"}, "only 'input_text', 'output_text' or 'refusal' is"),
    ("/v1/responses", {"type": "input_file", "file_id": "x"}, "only 'input_text', 'output_text' or 'refusal' is"),
    ("/v1/messages", IMAGE, "only 'text', 'thinking', 'redacted_thinking', 'tool_use' or 'tool_result' is served"),
    ("/v1/messages", {"type": "document", "source": {}}, "only 'text', 'thinking', 'redacted_thinking', 'tool_use'"),
]


@pytest.mark.parametrize(("path", "part", "served"), PART, ids=lambda each: str(each)[:24])
async def test_what_a_user_shows_beside_text_is_refused_by_its_type(
    running: tuple[str, RecitingStack, list[str]], path: str, part: dict[str, Any], served: str
) -> None:
    """And by its place, with what is served; alone, after text, and in what a call gave where there is no text."""
    _, stack, _ = running
    field, kind = ("input", "input_text") if path.endswith("responses") else ("messages", "text")
    for before in ([], [{"type": kind, "text": "Look"}]):
        said = [{"role": "user", "content": "Ask"}, {"role": "user", "content": [*before, part]}]
        reply = await stack.http.post(
            path, json={field: said, "max_tokens": 4} if field == "messages" else {field: said}
        )
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert message.startswith(f"{field}.1.content.{len(before)}.type is '{part['type']}', but {served}")
