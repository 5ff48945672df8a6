"""litellm, unmodified, in an environment of its own because it wants another openai package: which this proves too."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from surface.rest_stack import RestStack, rest_stack

pytestmark = pytest.mark.surface
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-litellm" / "bin" / "python"
CLIENT = Path(__file__).with_name("litellm_client.py")


@pytest.fixture
async def rest() -> AsyncIterator[RestStack]:
    """A stack."""
    async with rest_stack() as running:
        yield running


async def run_client(*arguments: str) -> dict[str, Any]:
    """What the script prints last; its notes are shown when it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(PYTHON, CLIENT, *arguments, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, notes.decode()
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


@pytest.mark.skipif(not PYTHON.exists(), reason="litellm has no environment here: make test-surface makes it")
async def test_litellm_gets_the_same_answers(rest: RestStack) -> None:
    """Whole, streamed and asynchronous answers are one; text has a reason to end; a bad value is a bad request."""
    told = await run_client(rest.base_url, await rest.model())
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
