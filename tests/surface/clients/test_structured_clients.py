"""instructor, pydantic-ai and llm, unmodified, in an environment of their own: objects by schemas and by calls."""

from pathlib import Path

import jsonschema_rs
import pytest
from support.rest.rest_stack import RestStack, run_client
from surface.programs.pets import Pet

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.surface]
PYTHON = Path(__file__).resolve().parents[3] / ".venv-structured" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment here: make test-surface makes it")
async def test_every_way_of_asking_for_an_object_gets_one(rest: RestStack) -> None:
    """Three libraries, schemas and calls, chat completions and responses, whole and streamed."""
    told = await run_client(PYTHON, "structured_client.py", rest.base_url, await rest.model())
    assert len(told) == 13
    for name, pet in told.items():
        assert jsonschema_rs.is_valid(Pet.model_json_schema(), pet), name
    kinds = ("OpenAIChatModel", "OpenAIResponsesModel")
    for way in (f"{kind} {output}" for kind in kinds for output in ("native", "tool")):
        assert told[f"{way} streamed"] == told[way]
