"""Claude Code, Codex, opencode and Continue, unmodified, change a file in three steps that a target has by heart.

They reach no other.
"""

import json
from pathlib import Path

import pytest
from support.rest.programs import CONTEXT_LEN, DONE, TASK, work

pytestmark = pytest.mark.agents
ROOT = Path(__file__).resolve().parents[3]
AGENTS = ROOT / ".agents" / "node_modules"
CLIENTS = ROOT / ".npm-clients" / "node_modules"


def called(name: str, **arguments: str) -> str:
    """A call as the target writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_claude_code_edits_a_file(tmp_path: Path) -> None:
    """It reads, edits and reports, over /v1/messages."""
    file = str(tmp_path / "desk" / "a.txt")
    steps = (
        f"<think>\nThere is a file.\n</think>\n\nI look.\n{called('Read', file_path=file)}",
        called("Edit", file_path=file, old_string="king", new_string="queen"),
        DONE,
    )
    [program] = AGENTS.glob("@anthropic-ai/claude-code-linux-*/claude")
    command: list[str | Path] = [program, "-p", TASK, "--permission-mode", "acceptEdits", "--output-format", "json"]
    home = {
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }
    told = json.loads(await work(tmp_path, steps, command, home))
    assert (told["result"], told["num_turns"], told["stop_reason"]) == (DONE, 3, "end_turn")
    assert told["usage"]["output_tokens"] > 0


async def test_codex_edits_a_file(tmp_path: Path) -> None:
    """It looks, edits and reports, over /v1/responses."""
    steps = (
        f"<think>\nThere is a file.\n</think>\n\nI look.\n{called('exec_command', cmd='cat a.txt')}",
        called("exec_command", cmd="sed -i s/king/queen/ a.txt"),
        DONE,
    )
    config = (
        'model = "outrider"\nmodel_provider = "outrider"\n[model_providers.outrider]\nname = "Outrider"\n'
        'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    command: list[str | Path] = [
        AGENTS / ".bin" / "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    ]
    told = await work(tmp_path, steps, [*command, TASK], {".codex/config.toml": config})
    assert told.strip().endswith(DONE)


async def test_opencode_edits_a_file(tmp_path: Path) -> None:
    """It reads, edits and reports, over chat completions, by Vercel's AI SDK; it asks for a title as well."""
    file = str(tmp_path / "desk" / "a.txt")
    steps = (
        called("read", filePath=file),
        called("edit", filePath=file, oldString="king", newString="queen"),
        DONE,
    )
    config = {
        "provider": {
            "outrider": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                "models": {"outrider": {"limit": {"context": CONTEXT_LEN, "output": 4096}}},
            }
        }
    }
    home = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    [program] = CLIENTS.glob("opencode-linux-*/bin/opencode")
    told = await work(tmp_path, steps, [program, "run", "--auto", "--model", "outrider/outrider", TASK], home)
    assert told.strip().endswith(DONE)


async def test_continue_edits_a_file(tmp_path: Path) -> None:
    """It reads, edits and reports, over chat completions."""
    file = str(tmp_path / "desk" / "a.txt")
    steps = (
        called("Read", filepath=file),
        called("Edit", file_path=file, old_string="king", new_string="queen"),
        DONE,
    )
    model = {"name": "Outrider", "provider": "openai", "model": "outrider", "apiBase": "{url}/v1", "apiKey": "none"}
    config = {"name": "Outrider", "version": "1.0.0", "schema": "v1", "models": [model]}
    command: list[str | Path] = [
        CLIENTS / ".bin" / "node",
        CLIENTS / "@continuedev" / "cli" / "dist" / "cn.js",
        "--auto",
    ]
    home = {".continue/config.yaml": json.dumps(config), "CONTINUE_TELEMETRY_ENABLED": "0"}
    told = await work(tmp_path, steps, [*command, "-p", TASK], home)
    assert told.strip().endswith(DONE)
