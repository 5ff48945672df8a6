"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes, and what they say of the prompts of answers.

And completions with a suffix, whose prompts are made of tokens that few models have.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.services.reciting import END, TEMPLATE, TURN, RecitingStack, reciting_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = "A fox. 東京 ☔"
USER = {"role": "user", "content": "Grüße, fox."}
TOOL = {"type": "function", "function": {"name": "bark"}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """One stack for all, whose target always says the same."""
    folder = tmp_path_factory.mktemp("reciter")
    async with reciting_stack(folder, lambda _: ANSWER, [ANSWER], served_model_name="fox, vixen") as running:
        yield running


async def post(stack: RecitingStack, path: str, **body: Any) -> dict[str, Any]:
    """The body of an answer."""
    reply = await stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def refusal(stack: RecitingStack, path: str, **body: Any) -> str:
    """The sentence of a 400."""
    reply = await stack.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


async def test_a_text_goes_to_tokens_and_back(stack: RecitingStack) -> None:
    """With the names of special tokens, and as many as are counted; names come when they are wanted."""
    text = f"{TURN}user\n{ANSWER}{END}"
    cut = await post(stack, "/tokenize", model="vixen", prompt=text)
    assert cut == {"count": len(cut["tokens"]), "max_model_len": 4096, "tokens": cut["tokens"], "token_strs": None}
    assert await post(stack, "/detokenize", tokens=cut["tokens"]) == {"prompt": text}
    named = await post(stack, "/tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
    assert named["tokens"] == cut["tokens"]
    assert (len(named["token_strs"]), named["token_strs"][0], named["token_strs"][-1]) == (cut["count"], TURN, END)
    assert (await post(stack, "/tokenize", prompt=""))["tokens"] == []
    assert await post(stack, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER, {"role": "assistant", "content": "A f"}], "continue_final_message": True},
    ],
)
async def test_a_conversation_has_the_tokens_that_are_generated_from(
    stack: RecitingStack, fields: dict[str, Any]
) -> None:
    """As many as the usage of an answer counts, whatever the template gets."""
    body = {"messages": [USER], **fields}
    cut, chat = await post(stack, "/tokenize", **body), await post(stack, "/v1/chat/completions", **body, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == cut["count"]


async def test_the_end_of_a_prompt_is_the_client_s_to_choose(stack: RecitingStack) -> None:
    """The assistant's turn begins there, or nothing does, or the last message goes on."""

    async def prompt(*messages: dict[str, Any], **fields: Any) -> str:
        cut = await post(stack, "/tokenize", messages=messages, **fields)
        return str((await post(stack, "/detokenize", tokens=cut["tokens"]))["prompt"])

    asked, begun = f"{TURN}user\nGrüße, fox.", {"role": "assistant", "content": "A f"}
    assert await prompt(USER) == f"{asked}{TURN}assistant\n"
    assert await prompt(USER, add_generation_prompt=False) == asked
    assert await prompt(USER, begun, add_generation_prompt=False) == f"{asked}{TURN}assistant\nA f"
    assert await prompt(USER, begun, continue_final_message=True) == f"{asked}{TURN}assistant\nA f"
    parts = {"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": " f"}]}
    going_on = {"messages": [USER, parts], "continue_final_message": True, "add_generation_prompt": False}
    answer = await post(stack, "/v1/chat/completions", **going_on)
    # It says what it says from the place on that it has come to.
    assert answer["choices"][0]["message"]["content"] in ANSWER


async def test_what_a_conversation_echoes_is_named(stack: RecitingStack) -> None:
    """As in chat."""
    body = {"messages": [{**USER, "annotations": []}]}
    reply = await stack.http.post("/tokenize", json=body)
    assert reply.headers["x-outrider-ignored"] == "messages.annotations"


@pytest.mark.slow
async def test_long_texts_are_taken_whole(stack: RecitingStack) -> None:
    """A million characters, and no more; their tokens go back as one list."""
    text = "fox 東京 " * 100_000
    cut = await post(stack, "/tokenize", prompt=text, return_token_strs=True)
    assert cut["count"] == len(cut["tokens"]) == len(cut["token_strs"]) > 100_000
    assert (await post(stack, "/detokenize", tokens=cut["tokens"]))["prompt"] == text
    assert (await refusal(stack, "/tokenize", prompt="x" * 1_000_001)).startswith("prompt has 1000001 characters")


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt is 'a', but must be absent beside messages"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools is 'present', but must be absent without messages"),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens is not a known parameter"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x is 1, but"),
        ("/tokenize", {"prompt": ["a"]}, "prompt is ['a'], but must be a valid string"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [5, 100_000]}, "tokens.1 is 100000, but must be the id of a token"),
        ("/detokenize", {"tokens": [5] * 200 + [100_000]}, "tokens.200 is 100000, but must be the id of a token"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens.1 is -1, but must be greater than or equal to 0"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is not served: the model's vocabulary has no"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt is True, but must be false or absent with continue_final_message",
        ),
    ],
)
async def test_faults_are_named(stack: RecitingStack, path: str, body: dict[str, Any], sentence: str) -> None:
    """The field, its value and the limit."""
    assert (await refusal(stack, path, **body)).startswith(sentence)


async def test_every_route_knows_all_names_of_the_model(stack: RecitingStack) -> None:
    """And no other."""
    said, text = {"messages": [USER], "max_tokens": 1}, {"prompt": f"{TURN}assistant\n", "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("/v1/chat/completions", "/v1/messages"), said),
        **dict.fromkeys(("/v1/completions", "/page/generate"), text),
        **{"/v1/responses": {"input": "a"}, "/v1/messages/count_tokens": {"messages": [USER]}},
        **{"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}},
    }
    for path, body in bodies.items():
        for name in ("fox", "vixen"):
            reply = await stack.http.post(path, json={"model": name, **body})
            assert reply.status_code == 200, (path, reply.text)
        assert (await stack.http.post(path, json={"model": "bear", **body})).status_code == 404, path
    assert [each["id"] for each in (await stack.http.get("/v1/models")).json()["data"]] == ["fox", "vixen"]


async def test_the_tokenizer_is_described(stack: RecitingStack) -> None:
    """With what clients look for: special tokens, the template, and how much fits."""
    info = (await stack.http.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == (END, None, TEMPLATE)
    assert info["model_max_length"] == 4096


async def test_nobody_is_looked_at_beyond_the_queue(stack: RecitingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting texts takes time, so there is no more of it at once than of requests."""
    admission = stack.gateway.frontend.admission
    monkeypatch.setattr(admission, "_num_arriving", admission.places + admission.queue_len)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        reply = await stack.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")


async def test_a_gap_is_filled_where_the_model_can(tmp_path: Path) -> None:
    """What stands before and after it goes between the model's own tokens; echo and ids have no meaning there."""
    seen, names = [], ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

    def script(prompt: str) -> str:
        seen.append(prompt)
        return ANSWER

    async with reciting_stack(tmp_path, script, [ANSWER], special=names) as coder:
        body = {"prompt": "def f(", "suffix": f"): pass{TURN}assistant\n"}
        answer = await post(coder, "/v1/completions", **body)
        assert answer["choices"][0]["text"]
        assert {*seen} == {f"<fim_prefix>def f(<fim_suffix>): pass{TURN}assistant\n"}
        cut = await post(coder, "/tokenize", prompt=f"<fim_prefix>def f(<fim_suffix>{body['suffix']}<fim_middle>")
        assert answer["usage"]["prompt_tokens"] == cut["count"]
        assert "echo is True" in await refusal(coder, "/v1/completions", **body, echo=True)
        assert "prompt is 'token ids'" in await refusal(coder, "/v1/completions", **{**body, "prompt": [5]})
