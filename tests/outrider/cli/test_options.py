"""Refusals of a gateway name the option that was typed: against a real one, and the table that the names come from."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import typer
from support.command_line import terminal
from support.requests.bad_requests import LONG, RARE, paths
from support.stack import RunningStack, running_stack
from typer.main import get_command

from outrider.cli.app import app
from outrider.cli.bench.load.__main__ import NAMES as LOAD_NAMES
from outrider.cli.bench.load.__main__ import LoadOptions
from outrider.cli.bench.load.__main__ import app as bench_load
from outrider.cli.options import OPTIONS, SHARED_OPTIONS, in_options
from outrider.client import GenerationOptions, InvalidRequest, OutriderError, Speculation
from outrider.client.requests import CALL_OPTIONS
from outrider.errors import Field, PromptTooLong
from outrider.process.options import options_of

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
SPECULATION = {f"speculation.{field.name}" for field in fields(Speculation)}
# The prompt, what predictions and choices are in the protocol, and what only programs say.
NO_OPTIONS = (
    *("text", "token_ids", "prediction_", "speculation.shape", "beam_search", "lark", "gbnf", "constraint.choices."),
    *("constraint.lark", "constraint.gbnf", "constraint.structural_tag", "constraint.whitespace", "constraint.is_"),
)
# Whatever the command line leaves to the gateway, and how the sentence about it begins.
REFUSED = [
    ("--min-tokens 9 --max-tokens 8", "--min-tokens is 9, but must be between 0 and 8"),
    ("--stop=", "--stop is '', but must be"),
    ("--stop a --stop " + LONG, "--stop is 'xxx"),
    ("--stop a " * 65, "--stop has 65 strings, but must have at most 64"),
    ("--stop-token-id 5 --stop-token-id 5000", "--stop-token-id is 5000, but must be a token id"),
    ("--stop-token-id 5 " * 65, "--stop-token-id has 65 ids, but must have at most 64"),
    ("--ban a --ban=", "--ban is '', but must be"),
    ("--ban " + RARE, "--ban is '"),
    ("--ban a " * 65, "--ban has 65 strings, but must have at most 64"),
    ("--cache-salt " + LONG, "--cache-salt is 'xxx"),
    ("--temperature nan", "--temperature is nan, but must be a finite number"),
    ("--temperature -1", "--temperature is -1.0, but must be"),
    ("--top-p 2", "--top-p is 2.0, but must be"),
    ("--min-p inf", "--min-p is inf, but must be"),
    ("--repetition-penalty 0", "--repetition-penalty is 0.0, but must be"),
    ("--presence-penalty 3", "--presence-penalty is 3.0, but must be"),
    ("--frequency-penalty -3", "--frequency-penalty is -3.0, but must be"),
    ("--logit-bias 5=101", "--logit-bias is 101.0, but must be"),
    ("--logit-bias 5000=1", "--logit-bias is 5000, but must be a token id"),
    (" ".join(f"--logit-bias {token}=1" for token in range(301)), "--logit-bias has 301 entries"),
    ("--draft-count 4000", "--draft-count is 4000, but must be between 0 and"),
    ("--lenience 0.5", "--lenience is 0.5, but must be absent under the rule match"),
    ("--rule lenient --lenience 0", "--lenience is 0.0, but must be"),
    ("--rule typical --typical-epsilon 7", "--typical-epsilon is 7.0, but must be"),
    ("--rule typical --typical-delta nan", "--typical-delta is nan, but must be"),
    ("--drafter nobody", "--drafter is 'nobody', but must be one of"),
    ("--drafter lookup,nobody", "--drafter is 'nobody', but must be one of"),
    ("--drafter lookup,lookup", "--drafter is ['lookup', 'lookup'], but must be without repetition"),
    (
        "--prediction /dev/null --draft-count 0",
        "--prediction is 'present', but must be absent where speculation is off",
    ),
    ("--rule block --drafter coupled", "--drafter is 'coupled', but must be one that serves the rule block"),
    ("--regex (", "--regex is '(', but must be one that can be enforced: "),
    ("--regex " + "a" * 8193, "--regex has 8193 bytes, but must have at most 8192"),
    ("--choice a --choice=", "--choice is ['a', ''], but must be a list of strings, none of them empty"),
    ("--regex a --ignore-eos", "--ignore-eos is True, but must be false with --regex"),
    ("--max-tokens 5000", "a prompt of 1 tokens and --max-tokens 5000 do not fit into the context of 4096 tokens"),
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    """One stack, which every test leaves as it was."""
    async with running_stack() as running:
        yield running


async def outrider(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode or 0, output.decode(), notes.decode()


def flags(*words: str, app: typer.Typer = app) -> Iterator[str]:
    """The options of a command, by the words that it is called with."""
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    for option in command.params:
        yield from option.opts


# Each is a process of its own; `make test` has one of four.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "beginning"),
    [pytest.param(*each, id=each[1]) for each in REFUSED],
)
async def test_a_refusal_names_the_option(stack: RunningStack, line: str, beginning: str) -> None:
    """It is the only line, also where JSON was asked for, and its exit code is that of wrong usage."""
    code, output, notes = await outrider("generate", "Once", *line.split(), "--json", "--address", stack.address)
    assert (code, output, notes.count("\n")) == (64, "", 1)
    assert notes.startswith(f"outrider: {beginning}")


@pytest.mark.slow
async def test_a_conversation_names_it_too(stack: RunningStack) -> None:
    """Where the first error ends it, and in a terminal where it goes on."""
    arguments = ("chat", "--address", stack.address, "--top-p", "2")
    code, output, notes = await outrider(*arguments, stdin=b"Once\n")
    assert (code, output, notes.count("\n")) == (64, "", 1)
    assert notes.startswith("outrider: --top-p is 2.0, but must be")
    async with terminal(*arguments) as screen:
        await screen.until("> ")
        screen.type("Once\n")
        assert "sampling" not in await screen.until("--top-p is 2.0, but must be")
        await screen.until("> ")
        screen.type("\x04")
        assert await asyncio.wait_for(screen.process.wait(), 120) == 0


@pytest.mark.slow
async def test_a_schema_that_cannot_be_followed_is_named_so(stack: RunningStack, tmp_path: Path) -> None:
    """And one that can is: by `generate`, and by every turn of a conversation."""
    schema = tmp_path / "schema.json"
    arguments = ("--json-schema", str(schema), "--address", stack.address)
    schema.write_text('{"not": {}}')
    code, output, notes = await outrider("generate", "Once", *arguments)
    assert (code, output) == (64, "")
    assert notes.startswith("""outrider: --json-schema is '{"not": {}}', but must be one that can be enforced: """)
    schema.write_text('{"enum": ["fox", "sea"]}')
    code, output, _ = await outrider("generate", "Once", *arguments)
    assert (code, output in {'"fox"\n', '"sea"\n'}) == (0, True)
    code, output, _ = await outrider("chat", "--choice", "fox", "--address", stack.address, stdin=b"Once\nAgain\n")
    assert (code, output) == (0, "fox\nfox\n")


@pytest.mark.slow
async def test_what_a_shape_forces_is_guessed_by_the_grammar(stack: RunningStack) -> None:
    """Each such token says so, and so do the figures."""
    # Longer than the target ever goes on unasked, and with a number of guesses that no policy chooses.
    tale = " ".join(["Once upon a time there was a fox, and the fox had a daughter."] * 12)
    guesses = ("--drafter", "lookup", "--draft-count", "8", "--show-rejected", "--max-tokens", "600")
    code, output, _ = await outrider(
        "generate", "Once", "--choice", tale, *guesses, "--address", stack.address, "--json"
    )
    [sample] = json.loads(output)["samples"]
    forced = [token for each in sample["rounds"] for token in each["tokens"] if token.get("drafter") == "grammar"]
    assert (code, sample["text"], bool(forced)) == (0, tale, True)
    [figures] = [each for each in sample["speculation"]["drafters"] if each["drafter"] == "grammar"]
    assert figures == {"drafter": "grammar", "draft_tokens": len(forced), "accepted_tokens": len(forced)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--draft-counts", "0,4000", "--draft-counts is 4000, but must be between 0 and"),
        ("--tokens", "100000", r"a prompt of \d+ tokens and --tokens 100000 do not fit"),
    ],
)
async def test_a_measurement_names_it_too(stack: RunningStack, option: str, value: str, sentence: str) -> None:
    """By the options that it has, which are not all called as elsewhere."""
    code, output, notes = await outrider("bench", "load", "--address", stack.address, option, value)
    assert (code, output) == (64, "")
    assert re.match(f"outrider: {sentence}", notes.splitlines()[-1]), notes


@pytest.mark.slow
async def test_a_prompt_is_no_option(stack: RunningStack) -> None:
    """What has no option keeps its name."""
    code, _, notes = await outrider("generate", "", "--address", stack.address)
    assert (code, notes) == (64, "outrider: prompt is '', but must be at least one token long\n")


async def test_every_field_is_one_and_has_an_option() -> None:
    """The table holds all that the protocol and the client call by a name, but the prompt, and nothing else."""
    called = set(GenerationOptions.__optional_keys__) - CALL_OPTIONS - {"speculation"}
    own = {"address", "api_key", "constraint.choices", "tls.ca", "tls.cert", "tls.key"}
    fields = paths() | called | SPECULATION | own
    assert set(OPTIONS) == {field for field in fields if not field.startswith(NO_OPTIONS)}


async def test_every_option_is_one() -> None:
    """Of `generate`; and of the others as far as they can say it."""
    assert set(OPTIONS.values()) <= set(flags("generate"))
    assert set(OPTIONS.values()) - {"--samples", "--logprobs", "--echo"} <= set(flags("chat"))
    load = set(options_of(LoadOptions()))
    assert load == set(flags(app=bench_load)) & load
    asked = {"address", "seed", "max_tokens", "sampling.temperature", "speculation.draft_count"}
    assert {LOAD_NAMES[field] for field in asked} <= load
    assert "--max-tokens" not in {*load, *SHARED_OPTIONS.values()}


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (InvalidRequest("logit_bias", {}, "a mapping"), "--logit-bias is {}, but must be a mapping"),
        (InvalidRequest("echo", True, ("no ", Field("logprob_count"))), "--echo is True, but must be no --logprobs"),
        (InvalidRequest("stop.3", "seed top_k", "short"), "--stop is 'seed top_k', but must be short"),
        (InvalidRequest("stop.3.role", "x", "top_k"), "stop.3.role is 'x', but must be top_k"),
        (InvalidRequest("messages.0.role", "x", "one of a"), "messages.0.role is 'x', but must be one of a"),
        (InvalidRequest("--seed", 5, "less"), "--seed is 5, but must be less"),
        (PromptTooLong(("9 and ", Field("max_tokens"), " 5 of kv_tokens")), "9 and --max-tokens 5 of kv_tokens"),
        (OutriderError("top_k", field="top_k"), "top_k"),
    ],
)
async def test_what_is_translated(error: OutriderError, sentence: str) -> None:
    """The field and the limit, but neither the value nor what merely looks like a field."""
    assert in_options(error, OPTIONS) == sentence
