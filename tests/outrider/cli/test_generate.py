"""`outrider generate --address` as a process, against a gateway that follows a script; and samples in order."""

import asyncio
import json
import math
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from support.basics import BEHIND_IGNORED_INTERRUPTS
from support.command_line import RESULT, ScriptedGateway, scripted_gateway

from outrider.cli.generate import InOrder
from outrider.client import Result, Round
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.v1 import types_pb2

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "generate")
# Says at its end whether anything heavy was imported, by whatever way.
SPY = (
    "import atexit, sys\n"
    "names = 'torch', 'numpy', 'transformers', 'llguidance', 'outrider.engine'\n"
    "heavy = lambda: [name for name in names if name in sys.modules]\n"
    "atexit.register(lambda: print('heavy:', heavy(), file=sys.stderr))\n"
    "from outrider.cli import main; main()"
)


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


async def run_command(*arguments: str, stdin: bytes = b"", command: tuple[str, ...] = COMMAND) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode or 0, output.decode(), notes.decode()


async def test_pipe_gets_text_and_request_carries_the_options(gateway: ScriptedGateway) -> None:
    """Only what was named is set in the request; the text goes to stdout and the figures to stderr."""
    options = "--max-tokens 9 --temperature 0 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed -3"
    arguments = [*options.split(), "--stop", "x", "--stop", "y z", "--draft-count", "4", "--address", gateway.address]
    code, output, notes = await run_command("Hello", *arguments)
    assert (code, output) == (0, "Once upon a!\n")
    assert "seed 7" in notes
    [request] = gateway.requests
    assert (request.text, request.max_tokens, request.seed, list(request.stop)) == ("Hello", 9, -3, ["x", "y z"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 5, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert sampling.HasField("temperature")
    assert not sampling.HasField("presence_penalty")
    assert (request.speculation.enabled, request.speculation.draft_count) == (True, 4)


EVERY_OPTION = (
    *("--max-tokens", "9", "--min-tokens", "2", "--ignore-eos", "--stop", "x", "--stop-token-id", "5", "-n", "2"),
    *("--stop-token-id", "6", "--ban", "cat", "--ban", "Grüße", "--seed", "-3", "--temperature", "0.5", "--top-k", "7"),
    *("--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "-0.5"),
    *("--frequency-penalty", "0.25", "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--draft-count", "4"),
    *("--rule", "lenient", "--drafter", "sampled", "--lenience", "0.25", "--typical-epsilon", "0.125"),
    *("--typical-delta", "nan", "--logprobs", "3", "--echo", "--cache-salt", "mine", "--unrecorded", "--show-rejected"),
    *("--choice", "fox", "--choice", "Grüße"),
)


def unset(message: Message) -> set[str]:
    """Names of the fields, at any depth, that a message leaves to their defaults."""
    given = {field.name: value for field, value in message.ListFields()}
    inner = [unset(value) for value in given.values() if isinstance(value, Message)]
    return {field.name for field in message.DESCRIPTOR.fields if field.name not in given}.union(*inner)


@pytest.mark.slow
async def test_every_field_has_an_option(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """Whatever people want to say can be said on the command line, what only programs do cannot; `nan` is the gateway's
    to refuse.
    """
    prediction = tmp_path / "prediction"
    prediction.write_text("once more")
    arguments = (*EVERY_OPTION, "--prediction", str(prediction))
    code, _, _ = await run_command("Hello", *arguments, "--address", gateway.address)
    [request] = gateway.requests
    assert code == 0
    # Prompt and prediction are text or token ids, never both, one drafter is no list, and one shape is enough.
    programs = {"shape", "beam_search", "lark", "gbnf", "structural_tag", "whitespace", "is_lenient"}
    assert unset(request) - programs == {"token_ids", "prediction_token_ids", "drafters", "json_schema", "regex"}
    assert list(request.constraint.choices.texts) == ["fox", "Grüße"]
    assert request.prediction_text == "once more"
    sampling, speculation = request.sampling, request.speculation
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.logit_bias) == (2, True, {5: -1.5, 6: 2.0})
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
    assert (request.stop_token_ids, request.banned_words) == ([5, 6], ["cat", "Grüße"])
    assert (request.sample_count, request.logprob_count, request.echo) == (2, 3, True)
    assert (request.cache_salt, request.unrecorded, speculation.return_rounds) == ("mine", True, True)
    assert (speculation.rule, speculation.drafter) == (types_pb2.ACCEPTANCE_RULE_LENIENT, "sampled")
    assert (speculation.acceptance.lenience, speculation.acceptance.typical_epsilon) == (0.25, 0.125)
    assert math.isnan(speculation.acceptance.typical_delta)


@pytest.mark.slow
async def test_a_shape_is_a_file_or_a_text(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """The file's text as it is, and the expression."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type":  "object", "title": "Grüße"}')
    for arguments in (("--json-schema", str(schema)), ("--regex", "[a-z]+ü")):
        code, _, _ = await run_command("Hello", *arguments, "--address", gateway.address)
        assert code == 0
    assert [each.constraint.json_schema for each in gateway.requests] == [schema.read_text(), ""]
    assert [each.constraint.regex for each in gateway.requests] == ["", "[a-z]+ü"]


@pytest.mark.slow
async def test_a_shape_that_is_none_is_refused_by_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a stack is started: a file that is not there, one that is no JSON, and two shapes of one answer."""
    # A long path would be cut in the sentence.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"type": ')
    for arguments, words in (
        (
            ("--json-schema", "none"),
            "--json-schema is 'none', but must be a file of text in UTF-8: ",
        ),
        (("--json-schema", "broken.json"), "--json-schema is 'broken.json', but must be a file of JSON: Expecting"),
        (("--json-schema", "/dev/null"), "--json-schema is '/dev/null', but must be a file of JSON: "),
        (("--regex", "a", "--choice", "b"), "--choice is \"['b']\", but must be left out with --regex"),
        (("--regex", "a", "--json-schema", "x"), "--regex is 'a', but must be left out with --json-schema"),
    ):
        for command in (("generate", "Hello"), ("chat",)):
            code, output, notes = await run_command(*command, *arguments, command=COMMAND[:-1])
            assert (code, output) == (64, "")
            assert notes.startswith(f"outrider: {words}")


@pytest.mark.slow
async def test_samples_come_one_behind_the_other(gateway: ScriptedGateway) -> None:
    """However their messages mix: each under its heading, in order, with figures that name its rule."""
    code, output, notes = await run_command("Hello", "-n", "3", "--logprobs", "2", "--address", gateway.address)
    texts = [f"[Sample {number} of 3]\none two!\n" for number in (1, 2, 3)]
    assert (code, output) == (0, "".join(texts))
    told = [line for line in notes.splitlines() if "tokens/s" in line]
    assert [f"seed {70 + index}" in line for index, line in enumerate(told)] == [True] * 3
    assert told[0].endswith("rule lenient with lenience 0.25: does not follow the target's distribution")
    assert "3 -0.500  9 -1.500" in notes


@pytest.mark.slow
async def test_json_lists_the_samples(gateway: ScriptedGateway) -> None:
    """One object with the prompt's tokens, when they came, and every sample in order."""
    code, output, _ = await run_command("Hello", "-n", "2", "--json", "--address", gateway.address)
    answer = json.loads(output)
    assert (code, [sample["seed"] for sample in answer["samples"]]) == (0, [70, 71])
    assert answer["prompt"] == [{"token_id": 8, "text": "Hello", "logprob": None, "most_probable": []}]


@pytest.mark.slow
async def test_defaults_belong_to_the_gateway(gateway: ScriptedGateway) -> None:
    """Without options the request names nothing but the prompt, which - reads from standard input."""
    code, _, _ = await run_command("-", "--no-speculation", "--address", gateway.address, stdin="Grüße".encode())
    [request] = gateway.requests
    assert (code, request.text) == (0, "Grüße")
    assert {field.name for field, _ in request.ListFields()} == {"text", "speculation"}
    assert request.speculation.enabled is False
    assert [field.name for field, _ in request.speculation.ListFields()] == ["enabled"]


@pytest.mark.slow
async def test_json_and_no_torch(gateway: ScriptedGateway) -> None:
    """One object on stdout, and the living process has imported nothing heavy."""
    code, output, notes = await run_command(
        "Hello", "--json", "--address", gateway.address, command=(sys.executable, "-c", SPY, "generate")
    )
    [answer] = json.loads(output)["samples"]
    assert (code, answer["text"], answer["token_ids"]) == (0, "Once upon a!", [4, 5, 2])
    assert (answer["finish_reason"], answer["seed"]) == ("length", 7)
    assert "heavy: []" in notes


@pytest.mark.slow
async def test_terminal_gets_styles(gateway: ScriptedGateway) -> None:
    """On a terminal there are a legend, styled tokens and the figures."""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "Hello", "--address", gateway.address, stdout=theirs, env=environment
    )
    os.close(theirs)
    assert await asyncio.wait_for(process.wait(), 60) == 0
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "the target's correction" in shown
    assert "\x1b[1;32m upon\x1b[0m" in shown
    assert "mean acceptance length" in shown


@pytest.mark.slow
async def test_refusal_is_one_sentence(gateway: ScriptedGateway) -> None:
    """The gateway's sentence goes to stderr, about the option instead of the field, and nothing to stdout."""
    code, output, notes = await run_command("refuse", "--temperature", "-1", "--address", gateway.address)
    assert (code, output) == (64, "")
    assert notes == "outrider: --temperature is -1.0, but must be at least 0\n"


@pytest.mark.slow
async def test_a_refusal_in_a_terminal_has_a_line_of_its_own(gateway: ScriptedGateway) -> None:
    """It does not follow upon the prompt, which is shown by then."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "refuse", "--address", gateway.address, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert await asyncio.wait_for(process.wait(), 60) == 64
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.endswith("\r\noutrider: --temperature is -1.0, but must be at least 0\r\n")


@pytest.mark.slow
async def test_a_service_that_is_no_gateway() -> None:
    """A server that does not know the method is named as what it is not."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    code, output, notes = await run_command("Hello", "--address", address)
    assert (code, output) == (64, "")
    assert notes == f"outrider: --address is '{address}', but must be that of a gateway\n"
    await server.stop(0)


@pytest.mark.slow
async def test_the_port_of_rest_is_no_gateway_for_this() -> None:
    """An HTTP server answers there, so that nothing does would be wrong; often it is the very gateway's page."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code, _, notes = await run_command("Hello", "--address", address)
    assert code == 64
    limit = "where a gateway answers gRPC, and not its REST"
    assert notes == f"outrider: --address is '{address}', but must be {limit}\n"


@pytest.mark.slow
async def test_a_full_disk_is_a_sentence(gateway: ScriptedGateway) -> None:
    """It is no bug of ours, so there is no traceback."""
    script = f'{sys.executable} -c "{COMMAND[2]}" generate Hello --address {gateway.address} >/dev/full'
    code, _, notes = await run_command(script, command=("bash", "-c"))
    assert (code, notes) == (74, "outrider: The output cannot be written: the disk or the quota is full.\n")


@pytest.mark.slow
async def test_nobody_answers(gateway: ScriptedGateway) -> None:
    """An address where nothing listens ends with EX_UNAVAILABLE and one line."""
    code, output, notes = await run_command("Hello", "--address", "127.0.0.1:1")
    assert (code, output) == (69, "")
    assert notes == "outrider: Nothing answers on 127.0.0.1:1 (any more); `outrider up` starts a stack.\n"


@pytest.mark.slow
async def test_a_loss_behind_the_gateway_is_told_as_it_is(gateway: ScriptedGateway) -> None:
    """The gateway answers, so the sentence about a gateway that does not would be wrong."""
    code, output, notes = await run_command("lose", "--address", gateway.address)
    assert (code, output) == (69, "")
    assert notes == "outrider: UNAVAILABLE: Socket closed\n"


@pytest.mark.slow
async def test_an_answer_over_the_limit_is_a_sentence(gateway: ScriptedGateway) -> None:
    """gRPC's own words about it are not for users."""
    code, _, notes = await run_command("too large", "--address", gateway.address)
    assert code == 64
    assert re.fullmatch(rf"outrider: message is '\d+ bytes', but must be at most {MAX_MESSAGE_BYTES} bytes\n", notes)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_signal_cancels_the_call(gateway: ScriptedGateway, number: signal.Signals, expected: int) -> None:
    """The call is cancelled on the way out, and the exit code names the signal."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "wait", "--address", gateway.address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(4), 60) == b"Once"
    process.send_signal(number)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, output, notes) == (expected, b"", b"")
    await asyncio.wait_for(gateway.cancelled.wait(), 120)


@pytest.mark.slow
async def test_an_interrupt_that_was_ignored_stays_so(gateway: ScriptedGateway) -> None:
    """It is meant for somebody else then; SIGTERM after it is what ends the call."""
    pipe = asyncio.subprocess.PIPE
    command = (*BEHIND_IGNORED_INTERRUPTS, *COMMAND, "wait", "--address", gateway.address)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(4), 60) == b"Once"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
async def test_reader_that_goes_away(gateway: ScriptedGateway) -> None:
    """A closed pipe ends the command quietly."""
    script = (
        f'{sys.executable} -c "{COMMAND[2]}" generate Hello --address {gateway.address} | true; echo ${{PIPESTATUS[0]}}'
    )
    code, output, notes = await run_command(script, command=("bash", "-c"))
    assert code == 0
    assert output.strip() in {"0", "141"}
    assert "Traceback" not in notes


def events_of(index: int, num_rounds: int) -> list[Round | Result]:
    """All events of one sample."""
    return [*(Round((), f"{index}.{place}", index) for place in range(num_rounds)), replace(RESULT, sample_index=index)]


def test_the_first_sample_waits_for_nothing() -> None:
    """Its events pass at once, and those of the second only after its end."""
    in_order = InOrder()
    [one, end], [other, other_end] = events_of(0, 1), events_of(1, 1)
    assert list(in_order.take(other)) == []
    assert list(in_order.take(one)) == [one]
    assert list(in_order.take(end)) == [end, other]
    assert list(in_order.take(other_end)) == [other_end]


@pytest.mark.parametrize("count", [1, 3])
@given(data=st.data())
def test_every_event_is_shown_once_and_in_order(count: int, data: st.DataObject) -> None:
    """Whatever the order in which the samples take turns."""
    samples = [events_of(index, data.draw(st.integers(0, 3))) for index in range(count)]
    turns = data.draw(st.permutations([index for index, events in enumerate(samples) for _ in events]))
    waiting = [iter(events) for events in samples]
    in_order = InOrder()
    shown = [event for index in turns for event in in_order.take(next(waiting[index]))]
    assert shown == [event for events in samples for event in events]
