"""`outrider up` and `outrider generate` with the real services and the embedded pair."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.basics import eventually
from support.processes import children_of, command_words
from support.stack import until_quiet

from outrider.cli.options import RequestOptions, settings_of
from outrider.client import AsyncClient, Result, Round
from outrider.model_files.model_names import embedded_model
from outrider.rpc.channels import open_channel

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--draft-port", "0", "--target-port", "0")
READY_S, END_S = 120.0, 30.0
PROMPT = "Once upon a time"
OPTIONS = RequestOptions(max_tokens=24, seed=5, temperature=0.8, draft_count="4")


@dataclass
class Up:
    """A running `outrider up`."""

    process: asyncio.subprocess.Process
    gateway: str

    async def until_noted(self, words: str) -> None:
        """Reads its stderr until a line contains the words."""
        assert self.process.stderr is not None
        while words not in (line := (await asyncio.wait_for(self.process.stderr.readline(), READY_S)).decode()):
            assert line, f"stderr ended before {words!r}"

    def children(self) -> list[int]:
        """Process ids of its services."""
        return list(children_of(self.process.pid))

    async def await_children(self, count: int) -> list[int]:
        """Process ids of its services, once it has started so many."""
        await eventually(lambda: len(self.children()) >= count, READY_S)
        return self.children()

    def child(self, module: str) -> int:
        """Process id of one service."""
        for pid, words in children_of(self.process.pid).items():
            if module in words:
                return pid
        raise AssertionError(f"no child runs {module}")

    async def until_quiet(self) -> None:
        """Waits until neither service holds a session or a block; the gateway knows where they are."""
        words = command_words(self.child("gateway"))
        for flag in ("--target", "--draft"):
            async with open_channel(words[words.index(flag) + 1]) as channel:
                await until_quiet(channel)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Starts a command with pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)


@asynccontextmanager
async def running_up(*arguments: str) -> AsyncIterator[Up]:
    """`outrider up` on free ports, killed at the end if it still runs."""
    process = await start("up", *FREE_PORTS, *arguments)
    try:
        assert process.stdout is not None
        gateway = None
        while gateway is None:
            line = (await asyncio.wait_for(process.stdout.readline(), READY_S)).decode()
            assert line, "stdout ended before the gateway was named"
            gateway = re.search(r"The gateway answers on (\S+)\.$", line.rstrip())
        yield Up(process, gateway[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(address: str) -> tuple[list[int], Result]:
    """Token ids and result of a request."""
    async with AsyncClient(address) as client, client.generate(PROMPT, **settings_of(OPTIONS)) as stream:
        events = [event async for event in stream]
    rounds = [event for event in events if isinstance(event, Round)]
    [result] = [event for event in events if isinstance(event, Result)]
    return [token.token_id for event in rounds for token in event.tokens], result


async def generated(*arguments: str) -> dict[str, Any]:
    """The first sample that `outrider generate` with a stack of its own prints as JSON."""
    options = ("--max-tokens", "16", "--seed", "5", "--temperature", "0.8", "--json", *arguments)
    process = await start("generate", "Once upon a time", *options)
    output, notes = await asyncio.wait_for(process.communicate(), READY_S)
    assert process.returncode == 0, notes.decode()
    answer: dict[str, Any] = json.loads(output)["samples"][0]
    return answer


async def ended(pid: int) -> None:
    """Waits for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, over.set)
    try:
        await asyncio.wait_for(over.wait(), END_S)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


@pytest.mark.slow
async def test_generate_is_a_function_of_its_seed() -> None:
    """With a stack of its own: the same seed gives the same tokens, speculative or plain."""
    first = await generated("--draft-count", "4")
    again = await generated("--draft-count", "auto")
    plain = await generated("--no-speculation")
    assert first["token_ids"] == again["token_ids"] == plain["token_ids"]
    assert len(first["token_ids"]) == first["usage"]["completion_tokens"] == 16
    assert first["speculation"]["accepted_tokens"] > 0
    assert plain["speculation"]["draft_tokens"] == 0


@pytest.mark.slow
async def test_generate_under_another_rule_and_with_another_draft() -> None:
    """The rule, what the draft gets and log-probabilities come through a stack of its own."""
    options = ("--rule", "ratio", "--draft-dtype", "float32", "--top-n", "8", "--draft-count", "4")
    answer = await generated(*options, "--samples", "2", "--logprobs", "2", "--echo")
    assert (answer["rule"], answer["follows_target"], len(answer["token_ids"])) == ("ratio", True, 16)
    assert answer["speculation"]["accepted_tokens"] > 0
    assert [len(token["most_probable"]) for token in answer["tokens"]] == [2] * 16


@pytest.mark.slow
async def test_a_stack_has_the_defaults_that_its_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a command starts for itself, and there by the variable; an option goes before it."""
    monkeypatch.setenv("OUTRIDER_GENERATION_DEFAULTS", "temperature=0.3,top_p=0.8")
    answer = await generated("--no-speculation")
    assert (answer["sampling"]["temperature"], answer["sampling"]["top_p"]) == (0.8, 0.8)
    async with running_up("--no-draft", "--generation-defaults", "temperature=0.4") as up:
        async with AsyncClient(up.gateway) as client:
            sampling = (await client.generate(PROMPT, max_tokens=4).result()).result.sampling
        assert (sampling.temperature, sampling.top_p) == (0.4, 1.0)


@pytest.mark.slow
async def test_up_survives_its_draft_and_drains_on_sigint() -> None:
    """A killed draft costs no token, is started again, and speculation resumes; Ctrl-C then exits 0."""
    async with running_up() as up:
        children = [up.child(module) for module in ("gateway", "draft_service", "target_service")]
        before, result = await ask(up.gateway)
        assert result.speculation.accepted_tokens > 0
        os.kill(up.child("draft_service"), signal.SIGKILL)
        during, _ = await ask(up.gateway)
        await up.until_noted("The draft service is back on")
        assert during == before
        async with asyncio.timeout(END_S):
            while not (await ask(up.gateway))[1].speculation.accepted_tokens:
                # Every answer until speculation resumes is the same, too.
                assert (await ask(up.gateway))[0] == before
        assert (await ask(up.gateway))[0] == before
        await up.until_quiet()
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.process.wait(), END_S) == 0
        for pid in children:
            await ended(pid)


async def test_a_race_is_the_proof_of_life() -> None:
    """With --race both answers come after the table and are compared; the stack stays up until SIGTERM."""
    async with running_up("--race") as up:
        await up.until_noted("With speculation: Once upon a time")
        await up.until_noted("Without speculation: Once upon a time")
        await up.until_noted("Identical token for token: 128 tokens.")
        await up.until_noted("Serving until Ctrl-C.")
        up.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(up.process.wait(), END_S) == 0


@pytest.mark.slow
async def test_no_service_outlives_a_killed_parent() -> None:
    """SIGKILL leaves no time to clean up: the services end by themselves."""
    async with running_up("--no-draft") as up:
        children = [up.child(module) for module in ("gateway", "target_service")]
        up.process.kill()
        await up.process.wait()
        for pid in children:
            await ended(pid)


REFUSED_CONFIG = '{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'


def linked_model(folder: Path) -> str:
    """The embedded target, but for a configuration of its own."""
    target = Path(embedded_model("target"))
    for path in target.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_bytes((target / "config.json").read_bytes())
    return str(folder)


def refused_model(folder: Path) -> str:
    """The embedded target, but of a kind that cannot be served."""
    linked_model(folder)
    (folder / "config.json").write_text(REFUSED_CONFIG)
    return str(folder)


@pytest.mark.slow
async def test_refused_model_ends_up_with_its_sentence(tmp_path: Path) -> None:
    """A model of a kind that cannot be served: one sentence, exit code 78."""
    process = await start("up", *FREE_PORTS, "--no-draft", "--target", refused_model(tmp_path))
    _, notes = await asyncio.wait_for(process.communicate(), READY_S)
    assert process.returncode == 78
    [*_, sentence] = notes.decode().splitlines()
    assert sentence.startswith("outrider: The target service ended with code 78 before it was ready:")
    assert "amba" in sentence


@pytest.mark.slow
async def test_a_restart_that_is_hopeless_ends_up(tmp_path: Path) -> None:
    """The model was replaced by one that cannot be served: `up` ends with that sentence and code, and tries no more."""
    async with running_up("--no-draft", "--target", linked_model(tmp_path)) as up:
        (tmp_path / "config.json").write_text(REFUSED_CONFIG)
        os.kill(up.child("target_service"), signal.SIGKILL)
        _, notes = await asyncio.wait_for(up.process.communicate(), READY_S)
        assert up.process.returncode == 78
    [*_, sentence] = notes.decode().splitlines()
    assert sentence.startswith("outrider: The target service ended with code 78 before it was ready:")


async def test_taken_port_is_told_before_anything_starts() -> None:
    """Exit code 69 and one sentence with the way out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = await start("up", "--port", str(port), "--draft-port", "0", "--target-port", "0")
        output, notes = await asyncio.wait_for(process.communicate(), END_S)
    assert (process.returncode, output) == (69, b"")
    assert notes.decode() == (
        f"outrider: Port {port} is taken; stop what listens there, or choose another with --port, 0 for a free one.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
async def test_interrupted_start_leaves_nothing(signals: int) -> None:
    """Ctrl-C while models load, once or twice: no service stays, and `up` exits 0."""
    process = await start("up", *FREE_PORTS)
    up = Up(process, "")
    children = await up.await_children(2)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), END_S)
    assert process.returncode == 0
    for pid in children:
        await ended(pid)
