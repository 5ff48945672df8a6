"""inspect-ai, unmodified, in an environment of its own: it evaluates a text, and an answer by a schema."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
from support.rest.programs import NOWHERE
from support.rest.rest_stack import CHAT, RestStack, run_client, said

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.harness]
PYTHON = Path(__file__).resolve().parents[3] / ".venv-inspect" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment here: make test-harness makes it")
async def test_inspect_ai_gets_text_and_an_object(
    rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is what the same body gets and is scored; the object is valid by the schema that was sent."""
    # It fetches nothing, and writes nothing elsewhere.
    for name, value in {**NOWHERE, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    told = await run_client(PYTHON, "inspect_client.py", rest.base_url, await rest.model(), str(tmp_path / "logs"))
    [choice] = (await rest.ask(CHAT, **said("Tell me of a fox."), temperature=0, max_tokens=12))["choices"]
    text = choice["message"]["content"]
    score = "C" if "fox" in text.lower() else "I"
    assert told["text"] == {"status": "success", "text": text, "reason": "max_tokens", "score": score, "tokens": 12}
    assert (told["beast"]["status"], told["beast"]["reason"]) == ("success", "stop")
    validator = jsonschema_rs.validator_for(told["schema"])
    assert validator.is_valid(json.loads(told["beast"]["text"]))
