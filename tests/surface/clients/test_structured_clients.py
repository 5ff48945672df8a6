"""instructor, pydantic-ai, llm and openai-agents, unmodified, in an environment of their own: objects by schemas and by
calls.
"""

from pathlib import Path

import jsonschema_rs
import pytest
from support.models.chat_families import FAMILIES
from support.rest.rest_stack import RestStack, run_client
from support.services.reciting import reciting_stack
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


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment here: make test-surface makes it")
async def test_an_agent_with_functions_and_a_type_of_output_reports(tmp_path: Path) -> None:
    """It calls, and then answers by the schema, with a model whose reasoning the prompt begins."""
    family = next(each for each in FAMILIES if each.name == "qwen 3.5")
    call = family.thinking("Look.", family.call("weather", {"city": "Paris"}))
    report = family.thinking("So.", '{"city": "Paris", "sunny": true}')
    async with reciting_stack(
        tmp_path,
        lambda prompt: report if "It is sunny" in prompt else call,
        [call, report],
        template=family.template,
        special=family.special,
        added=family.added,
        turn=family.turn,
        heads=family.heads,
        served_model_name="*",
    ) as stack:
        told = await run_client(PYTHON, "agents_client.py", stack.base_url)
        assert told == [{"city": "Paris", "sunny": True}] * 4
        assert all(session.grammar for session in stack.target.opens)
