"""litellm, its proxy and llama-index, unmodified, in an environment of their own: they want another openai package."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from support.rest.programs import KEY, litellm_proxy
from support.rest.rest_stack import CHAT, RestStack, run_client, said

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]
ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-litellm" / "bin" / "python"
PROXY = PYTHON.with_name("litellm")
# What the proxy may take the gateway for.
PROVIDERS = ("hosted_vllm", "openai")
QUESTION = "Tell me of a fox."
# As few tokens as OpenAI's responses may have: for fewer the proxy asks for so many.
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}
NEEDS_PYTHON = pytest.mark.skipif(not PYTHON.exists(), reason="no environment here: make test-surface makes it")


@NEEDS_PYTHON
async def test_litellm_gets_the_same_answers(rest: RestStack) -> None:
    """Whole, streamed and asynchronous answers are one; text has a reason to end; a bad value is a bad request."""
    told = await run_client(PYTHON, "litellm_client.py", rest.base_url, await rest.model())
    assert told["versions"]["openai"].startswith("2.")
    chat = told["chat"]
    assert chat["text"]
    assert (chat["role"], chat["finish_reason"], chat["completion_tokens"]) == ("assistant", "length", 12)
    streamed = {"text": chat["text"], "finish_reasons": ["length"], "completion_tokens": [12]}
    assert told["streamed"] == told["async"]["streamed"] == streamed
    assert told["async"]["whole"] == chat
    assert told["completion"]["text"]
    assert told["completion"]["finish_reason"] == "length"
    assert (told["refused"]["kind"], told["refused"]["status"]) == ("BadRequestError", 400)
    assert "temperature" in told["refused"]["message"]
    called = told["call"]["whole"]
    assert told["call"]["streamed"] == called
    assert (called["name"], called["finish_reason"], called["arguments"].keys()) == (
        "keep",
        "tool_calls",
        {"name", "age"},
    )


@NEEDS_PYTHON
async def test_llama_index_gets_text_objects_and_calls(rest: RestStack) -> None:
    """Whole and streamed text are one; a pydantic object and the arguments of a call are as they were asked for."""
    told = await run_client(PYTHON, "llama_index_client.py", rest.base_url, await rest.model())
    assert told["whole"]
    assert told["streamed"] == told["whole"]
    assert told["pet"].keys() == {"name", "kind", "age"}
    assert told["call"]["name"] == "keep"
    assert told["call"]["arguments"].keys() == {"name", "kind", "age"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(rest: RestStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The URL of a proxy for all of them."""
    folder = tmp_path_factory.mktemp("proxy")
    async with litellm_proxy(PROXY, folder, rest.base_url, await rest.model(), PROVIDERS) as url:
        yield url


@NEEDS_PYTHON
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_litellms_proxy_passes_chat_on(rest: RestStack, proxy: str, provider: str) -> None:
    """With the same seed its tokens are those of the gateway, whole and streamed; a bad value is refused by name."""
    ask: dict[str, Any] = {**said(QUESTION), "max_tokens": 12, "seed": 5, "temperature": 0.7, "logprobs": True}
    [choice] = (await rest.ask(CHAT, **ask))["choices"]
    tokens = [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]
    async with openai.AsyncOpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        [whole] = (await client.chat.completions.create(model=provider, **ask)).choices
        stream = await client.chat.completions.create(model=provider, **ask, stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
        with pytest.raises(openai.BadRequestError, match=r"temperature is 1000, but must be"):
            await client.chat.completions.create(model=provider, **said(QUESTION), temperature=1000)
    assert whole.message.content == choice["message"]["content"]
    assert "".join(piece.delta.content or "" for piece in pieces) == choice["message"]["content"]
    assert whole.logprobs is not None
    assert [(each.token, each.logprob) for each in whole.logprobs.content or ()] == tokens
    told = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content or ()]
    assert [(each.token, each.logprob) for each in told] == tokens
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason] == ["length"]


@NEEDS_PYTHON
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_litellms_proxy_translates(rest: RestStack, proxy: str, provider: str) -> None:
    """Messages and responses, whole and streamed, which it asks for as chat or responses, say what chat says."""
    [choice] = (await rest.ask(CHAT, **said(QUESTION), **GREEDY))["choices"]
    text = choice["message"]["content"]
    async with (
        anthropic.AsyncAnthropic(base_url=proxy, api_key=KEY, max_retries=0) as claude,
        openai.AsyncOpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client,
    ):
        # Anthropic's package has no word for the temperature.
        ask: dict[str, Any] = {"model": provider, **said(QUESTION), "max_tokens": 16, "extra_body": {"temperature": 0}}
        message = await claude.messages.create(**ask)
        async with claude.messages.stream(**ask) as stream:
            streamed = await stream.get_final_text()
        how: dict[str, Any] = {"model": provider, "input": QUESTION, "temperature": 0.0, "max_output_tokens": 16}
        response = await client.responses.create(**how)
        events = [event async for event in await client.responses.create(**how, stream=True)]
        thinking: dict[str, Any] = {"thinking": {"type": "adaptive"}}
        if provider == "openai":
            # litellm itself refuses what its list of models does not name.
            with pytest.raises(anthropic.BadRequestError, match=r"doesn't support `reasoning.effort`"):
                await claude.messages.create(**ask, **thinking)
        else:
            assert (await claude.messages.create(**ask, **thinking)).stop_reason == "max_tokens"
    assert [block.type == "text" and block.text for block in message.content] == [text]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 16)
    assert streamed == response.output_text == text
    assert (response.status, events[-1].type) == ("incomplete", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
