"""`outrider bench serve` against gateways that run: what it asks, counts and writes, not how fast anything was."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import scripted_gateway
from support.stack import running_stack

from bench.common import ComputeThreads
from bench.serve import ServeOptions, ask_in_turns, check
from outrider.cli.options import Models
from outrider.errors import InvalidRequest

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "bench", "serve")
WANTED = ServeOptions(requests=4, streams=2, tokens=8, temperature=0.5, seed=30, draft_count="3")


async def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, output.decode(), notes.decode()


async def test_every_request_is_asked_once_of_each_setting() -> None:
    """Behind one that warms up, with the same seeds on both sides, and with K only where it has an effect."""
    async with scripted_gateway() as gateway:
        blocks = await ask_in_turns(gateway.address, WANTED)
    asked = gateway.requests[2:]
    for enabled in (True, False):
        of_setting = [each for each in asked if each.speculation.enabled is enabled]
        assert sorted(each.seed for each in of_setting) == [30, 31, 32, 33]
        assert {each.speculation.HasField("draft_count") for each in of_setting} == {enabled}
    assert {(each.max_tokens, each.sampling.ignore_eos) for each in asked} == {(8, True)}
    assert sum(len(block.answers) for block in blocks) == 8
    assert [block.setting for block in blocks] == ["speculative", "plain", "plain", "speculative"]


async def test_the_command_against_a_real_stack(tmp_path: Path) -> None:
    """Both settings have their figures, answers are equal token for token, and the file has every request."""
    file = tmp_path / "requests.json"
    options = ("--requests", "4", "--streams", "2", "--tokens", "16", "--draft-count", "4", "--json")
    async with running_stack() as stack:
        assert stack.gateway is not None
        code, output, notes = await command("--address", stack.gateway.address, *options, "--save", str(file))
    assert code == 0, notes
    told: dict[str, Any] = json.loads(output)
    assert (told["equal_answers"], told["compared_answers"]) == (4, 4)
    for name, has_drafts in (("speculative", True), ("plain", False)):
        found = told[name]
        assert (found["completed"], found["total_output_tokens"], found["max_concurrency"]) == (4, 64, 2)
        assert (found["num_draft_tokens"] >= found["num_accepted_tokens"] > 0) is has_drafts
        assert found["ttft_s"]["median"] > 0
        assert found["output_throughput"]["high"] >= found["output_throughput"]["median"] > 0
    assert told["ratio"]["count"] == 2
    kept = json.loads(file.read_text())
    assert sum(len(block["answers"]) for block in kept["blocks"]) == 8


async def test_nobody_there_is_unavailable() -> None:
    """Exit code 69 and one sentence, before anything is measured."""
    code, output, notes = await command("--address", "127.0.0.1:1", "--requests", "1")
    assert (code, output) == (69, "")
    [sentence] = notes.splitlines()
    assert sentence.startswith("outrider: Nothing answers on 127.0.0.1:1")


@pytest.mark.parametrize(
    ("wanted", "models", "cpus"),
    [
        (ServeOptions(address="a:1"), Models(target="x"), ComputeThreads()),
        (ServeOptions(address="a:1"), Models(), ComputeThreads(threads=2)),
        (ServeOptions(address="a:1"), Models(), ComputeThreads(draft_threads=4)),
        (ServeOptions(address="a"), Models(), ComputeThreads()),
        (ServeOptions(draft_count="many"), Models(), ComputeThreads()),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(
    wanted: ServeOptions, models: Models, cpus: ComputeThreads
) -> None:
    """Before a stack is started for it."""
    with pytest.raises(InvalidRequest):
        check(wanted, models, cpus)
