"""litellm and llama-index, unmodified, in an environment of their own: they want another openai package."""

from pathlib import Path

import pytest
from support.rest.rest_stack import RestStack, run_client

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]
ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-litellm" / "bin" / "python"
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
