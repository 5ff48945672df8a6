"""`outrider chat` without a terminal, as a process of its own."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.command_line import ScriptedGateway, scripted_gateway

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "chat")
ANSWER = "Once upon a!"
FIGURES = "3 tokens, 1000 tokens/s, first token 0 ms, cached 1 of 2 prompt tokens, acceptance rate 0.50, seed 5"


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


async def run_command(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a conversation."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode or 0, output.decode(), notes.decode()


async def test_each_line_is_a_turn(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """Answers go to stdout, figures to stderr; the whole conversation and all options are sent with every turn."""
    file = tmp_path / "saved.json"
    lines = f"Grüße\n\n//not a command\n/edit instead\n/seed 9\n/system Be brief.\n/retry\n/save {file}\n/quit\nnever\n"
    options = ("--max-tokens", "9", "--seed", "5", "--system", "Be kind.", "--rule", "ratio", "--show-rejected")
    code, output, notes = await run_command(*options, "--address", gateway.address, stdin=lines.encode())
    assert (code, output) == (0, f"{ANSWER}\n" * 4)
    assert notes.splitlines()[0] == f"{FIGURES}, ended at the length limit"
    said = [[(each.role, each.content) for each in chat.messages] for chat in gateway.chats]
    first = [("system", "Be kind."), ("user", "Grüße")]
    assert said[:3] == [
        first,
        [*first, ("assistant", ANSWER), ("user", "/not a command")],
        [*first, ("assistant", ANSWER), ("user", "instead")],
    ]
    assert said[3] == [("system", "Be brief."), *said[2][1:]]
    assert [chat.generation.seed for chat in gateway.chats] == [5, 5, 5, 9]
    generation = gateway.chats[0].generation
    assert (generation.max_tokens, generation.speculation.return_rounds) == (9, True)
    saved = json.loads(file.read_text())
    assert [turn["assistant"] for turn in saved["turns"]] == [ANSWER] * 2
    assert [message["role"] for message in saved["messages"]] == ["system", *("user", "assistant") * 2]


@pytest.mark.parametrize(
    ("lines", "code", "sentence"),
    [
        (b"refuse\nHi\n", 64, "--temperature is -1.0, but must be at least 0"),
        (b"a\xff\n", 64, "line is b'a\\xff\\n', but must be valid UTF-8"),
        (b"/save\n", 64, "/save needs the name of a file behind it."),
    ],
)
async def test_the_first_error_ends_it(gateway: ScriptedGateway, lines: bytes, code: int, sentence: str) -> None:
    """Where nobody can answer, one sentence and its exit code are all."""
    assert await run_command("--address", gateway.address, stdin=lines) == (code, "", f"outrider: {sentence}\n")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_it(gateway: ScriptedGateway, number: signal.Signals, expected: int) -> None:
    """The call is cancelled on the way out."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--address", gateway.address, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"wait\n")
    assert await asyncio.wait_for(process.stdout.readexactly(4), 60) == b"Once"
    process.send_signal(number)
    await asyncio.wait_for(gateway.cancelled.wait(), 10)
    output, notes = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, output, notes) == (expected, b"", b"")


def test_options_without_an_effect_are_refused() -> None:
    """As with `generate`, and before anything starts."""
    command = (*COMMAND, "--no-speculation", "--show-rejected")
    ended = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=60)
    sentence = (
        "outrider: --show-rejected is 'True', but must be left out with --no-speculation, where it has no effect\n"
    )
    assert (ended.returncode, ended.stderr) == (64, sentence)


async def test_a_stack_of_its_own() -> None:
    """Started for the conversation and gone behind it; the second turn finds the first in the prefix cache."""
    lines = b"Tell me about the fox.\nAnd what did the wolf say to the king in the forest?\n"
    code, output, notes = await run_command("--max-tokens", "12", "--draft-count", "4", "--json", stdin=lines)
    first, second = [json.loads(line) for line in output.splitlines()]
    assert (code, notes) == (0, "")
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 12
    assert second["speculation"]["draft_tokens"] > 0
    assert second["usage"]["cached_prompt_tokens"] > 0
