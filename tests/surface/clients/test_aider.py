"""aider, unmodified, in an environment of its own, changes a file as its target says. It reaches no other."""

from pathlib import Path

import pytest
from support.rest.programs import TASK, work

pytestmark = pytest.mark.harness
AIDER = Path(__file__).resolve().parents[3] / ".venv-aider" / "bin" / "aider"
QUIET = ("--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings")
SAID = "A queen it is."
ANSWERS = {
    "whole": f"{SAID}\n\na.txt\n```\nthe queen\n```\n",
    "diff": f"{SAID}\n\na.txt\n```\n<<<<<<< SEARCH\nthe king\n=======\nthe queen\n>>>>>>> REPLACE\n```\n",
}


@pytest.mark.skipif(not AIDER.exists(), reason="no environment here: make test-harness makes it")
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize("form", ANSWERS)
async def test_aider_edits_a_file(tmp_path: Path, form: str, stream: str) -> None:
    """As a whole file and as what is replaced, streamed and not."""
    words = ["--model", "openai/outrider", "--edit-format", form, stream, *QUIET, "--message", TASK, "a.txt"]
    home = {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "AIDER_ANALYTICS": "false"}
    told = await work(tmp_path, (ANSWERS[form],), [AIDER, *words], home)
    assert SAID in told
    assert "Applied edit to a.txt" in told
