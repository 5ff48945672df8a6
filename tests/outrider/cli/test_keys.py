"""The commands at a gateway that asks for keys: they send theirs, say when it does not open, and show it nowhere."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from support.keys import key_of, write_keys
from support.services.markov_services import MarkovStack, markov_stack, write_tokenizer

import outrider
from outrider.cli.doctor.checks import GATEWAY, REST, SELF_TEST, check_gateway, who_answers
from outrider.cli.local_stack import Stack, gateway_launch
from outrider.cli.race import STORY, race
from outrider.client import GenerationOptions
from outrider.errors import InvalidKey

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
ASKED = ("generate", "fox sea", "--max-tokens", "4", "--seed", "1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MarkovStack]:
    """A gateway that lets one name in."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = write_keys(folder / "keys.toml", alice={})
    async with markov_stack(write_tokenizer(folder), rest_listen="127.0.0.1:0", api_keys=keys) as running:
        yield running


async def run_command(*arguments: str, key: str = "") -> tuple[int, str]:
    """Exit code and all that a command says, with a key in its environment."""
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    environment = {**os.environ, "OUTRIDER_API_KEY": key}
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=both, env=environment)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, output.decode()


@pytest.mark.slow
async def test_a_key_comes_from_the_environment_or_the_command_line(stack: MarkovStack) -> None:
    """The command line goes first; without a key, and with a wrong one, the sentence is the gateway's, and the exit
    code is its own.
    """
    address = ("--address", stack.gateway.address)
    ends = await asyncio.gather(
        run_command(*ASKED, *address, key=key_of("alice")),
        run_command(*ASKED, *address, "--api-key", key_of("alice"), key="sk-wrong"),
        run_command(*ASKED, *address),
        run_command(*ASKED, *address, key="sk-wrong"),
        run_command(*ASKED, *address, key="sk wrong"),
    )
    assert [code for code, _ in ends] == [0, 0, InvalidKey.exit_code, InvalidKey.exit_code, 64]
    assert "No API key came" in ends[2][1]
    assert "none that this gateway knows" in ends[3][1]
    assert "--api-key must be text of printable ASCII without spaces" in ends[4][1]
    said = "".join(output for _, output in ends)
    assert key_of("alice") not in said
    assert "wrong" not in said


@pytest.mark.slow
async def test_a_race_is_run_with_a_key(stack: MarkovStack, capsys: pytest.CaptureFixture[str]) -> None:
    """At a gateway that asks for one; the command that has none says where it comes from before it starts anything."""
    question = replace(STORY, text="fox sea", options=GenerationOptions(max_tokens=4, seed=1, temperature=0.0))
    with pytest.raises(InvalidKey):
        await race(stack.gateway.address, question)
    await race(stack.gateway.address, replace(question, api_key=key_of("alice")))
    assert "Identical token for token: 4 tokens." in capsys.readouterr().err
    code, output = await run_command("up", "--race", "--api-keys", "keys.toml")
    assert (code, "unless OUTRIDER_API_KEY has one of the keys" in output) == (64, True)


async def test_the_doctor_examines_a_gateway_with_a_key(stack: MarkovStack) -> None:
    """Without one it still knows who answers, and says which option is missing."""
    address, rest = stack.gateway.address, stack.gateway.rest_address
    assert (answerer := await who_answers(rest)) is not None
    assert answerer.role == "rest"
    for key, codes in ((key_of("alice"), [0, 0, 0]), (None, [0, 69, InvalidKey.exit_code])):
        findings = [finding async for finding in check_gateway(address, rest, outrider.__version__, key)]
        assert [finding.check for finding in findings] == [GATEWAY, REST, SELF_TEST]
        assert [finding.exit_code for finding in findings] == codes
    assert "--api-key" in findings[1].fix


async def test_a_stack_with_keys_tells_its_figures_to_who_started_it() -> None:
    """On a port of their own, because REST asks for a key that they need not have."""
    open_stack = Stack("models/target", None, rest_port=0)
    assert "--api-keys" not in gateway_launch(open_stack, "a:1", None).command
    launch = gateway_launch(Stack("models/target", None, rest_port=0, api_keys="keys.toml"), "a:1", None)
    words = dict(zip(launch.command, launch.command[1:], strict=False))
    assert words["--api-keys"] == "keys.toml"
    assert launch.further["metrics"] == "127.0.0.1:0"
