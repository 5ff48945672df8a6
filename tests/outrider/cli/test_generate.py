"""`outrider generate --address` as a process of its own, against a gateway that follows a script."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from outrider.errors import InvalidRequest
from outrider.rpc import MAX_MESSAGE_BYTES, error_from, status_of
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "generate")
# Says at its end whether anything heavy was imported, by whatever way.
SPY = (
    "import atexit, sys\n"
    "heavy = lambda: [name for name in ('torch', 'numpy', 'transformers', 'outrider.engine') if name in sys.modules]\n"
    "atexit.register(lambda: print('heavy:', heavy(), file=sys.stderr))\n"
    "from outrider.cli import main; main()"
)
Call = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


@dataclass
class ScriptedGateway(GenerationServiceServicer):
    """Answers every prompt with the same two rounds; "wait" is never answered, "refuse" is refused.

    "lose" passes on the loss of a connection behind it, and "too large" is answered by more than a message may have.
    """

    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(  # noqa: N802, the protocol's name
        self, request: pb.GenerateRequest, context: Call
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        if request.text == "refuse":
            await context.abort_with_status(status_of(InvalidRequest("temperature", -1.0, "at least 0")))
        if request.text == "lose":
            nothing = grpc.aio.Metadata()
            lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
            await context.abort_with_status(status_of(error_from(lost)))
        if request.text == "too large":
            yield said((pb.TOKEN_ORIGIN_PLAIN, "x" * MAX_MESSAGE_BYTES))
        yield said((pb.TOKEN_ORIGIN_PLAIN, "Once"))
        if request.text == "wait":
            await self._wait_for_cancellation()
        yield said((pb.TOKEN_ORIGIN_ACCEPTED, " upon"), (pb.TOKEN_ORIGIN_CORRECTION, " a"))
        yield pb.GenerateResponse(completion=completion())

    async def _wait_for_cancellation(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def said(*tokens: tuple[pb.TokenOrigin.ValueType, str]) -> pb.GenerateResponse:
    """A round of tokens, whose ids are the lengths of their texts."""
    parts = [pb.GeneratedToken(token_id=len(text), origin=origin, text=text) for origin, text in tokens]
    return pb.GenerateResponse(round=pb.Round(tokens=parts, text_delta="".join(text for _, text in tokens)))


def completion() -> pb.Completion:
    """The end of the script."""
    return pb.Completion(
        finish_reason=types_pb2.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=2, completion_tokens=3),
        seed=7,
        speculation=pb.SpeculationFigures(rounds=1, draft_tokens=2, accepted_tokens=1, acceptance_rate=0.5),
        timings=pb.Timings(first_token_us=10, total_us=3_000),
        text_delta="!",
    )


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    server = grpc.aio.server()
    servicer = ScriptedGateway()
    add_GenerationServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


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


async def test_defaults_belong_to_the_gateway(gateway: ScriptedGateway) -> None:
    """Without options the request names nothing but the prompt, which - reads from standard input."""
    code, _, _ = await run_command("-", "--no-speculation", "--address", gateway.address, stdin="Grüße".encode())
    [request] = gateway.requests
    assert (code, request.text) == (0, "Grüße")
    assert not any(request.HasField(name) for name in ("max_tokens", "seed"))
    assert request.sampling.ListFields() == []
    assert request.speculation.enabled is False
    assert not request.speculation.HasField("draft_count")


async def test_json_and_no_torch(gateway: ScriptedGateway) -> None:
    """One object on stdout, and the living process has imported nothing heavy."""
    code, output, notes = await run_command(
        "Hello", "--json", "--address", gateway.address, command=(sys.executable, "-c", SPY, "generate")
    )
    answer: dict[str, Any] = json.loads(output)
    assert (code, answer["text"], answer["token_ids"]) == (0, "Once upon a!", [4, 5, 2])
    assert (answer["finish_reason"], answer["seed"]) == ("length", 7)
    assert "heavy: []" in notes


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


async def test_refusal_is_one_sentence(gateway: ScriptedGateway) -> None:
    """The gateway's sentence goes to stderr, and nothing to stdout."""
    code, output, notes = await run_command("refuse", "--temperature", "-1", "--address", gateway.address)
    assert (code, output) == (64, "")
    assert notes == "outrider: temperature is -1.0, but must be at least 0\n"


async def test_nobody_answers(gateway: ScriptedGateway) -> None:
    """An address where nothing listens ends with EX_UNAVAILABLE and one line."""
    code, output, notes = await run_command("Hello", "--address", "127.0.0.1:1")
    assert (code, output) == (69, "")
    assert notes == "outrider: Nothing answers on 127.0.0.1:1 (any more); `outrider up` starts a stack.\n"


async def test_a_loss_behind_the_gateway_is_told_as_it_is(gateway: ScriptedGateway) -> None:
    """The gateway answers, so the sentence about a gateway that does not would be wrong."""
    code, output, notes = await run_command("lose", "--address", gateway.address)
    assert (code, output) == (69, "")
    assert notes == "outrider: UNAVAILABLE: Socket closed\n"


async def test_an_answer_over_the_limit_is_a_sentence(gateway: ScriptedGateway) -> None:
    """gRPC's own words about it are not for users."""
    code, _, notes = await run_command("too large", "--address", gateway.address)
    assert code == 64
    assert re.fullmatch(rf"outrider: message is '\d+ bytes', but must be at most {MAX_MESSAGE_BYTES} bytes\n", notes)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_signal_cancels_the_call(gateway: ScriptedGateway, number: signal.Signals, expected: int) -> None:
    """The call is cancelled on the way out, and the exit code tells of the signal."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "wait", "--address", gateway.address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(4), 60) == b"Once"
    process.send_signal(number)
    output, notes = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, output, notes) == (expected, b"", b"")
    await asyncio.wait_for(gateway.cancelled.wait(), 10)


async def test_reader_that_goes_away(gateway: ScriptedGateway) -> None:
    """A closed pipe ends the command quietly."""
    script = (
        f'{sys.executable} -c "{COMMAND[2]}" generate Hello --address {gateway.address} | true; echo ${{PIPESTATUS[0]}}'
    )
    code, output, notes = await run_command(script, command=("bash", "-c"))
    assert code == 0
    assert output.strip() in {"0", "141"}
    assert "Traceback" not in notes
