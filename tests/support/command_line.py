"""For tests of the command line: terminals of their own, generations to show, and a gateway that follows a script."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from outrider.cli.options import RequestOptions
from outrider.cli.views import View
from outrider.client import (
    GeneratedToken,
    Origin,
    PromptToken,
    RejectedToken,
    Result,
    Round,
    RoundFacts,
    SpeculationFigures,
)
from outrider.errors import InvalidRequest
from outrider.parameters import TokenLogprob
from outrider.rpc.errors import error_from, status_of
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from support.basics import eventually

ROWS, COLUMNS = 24, 80
INTERRUPT = "\x03"
UP = "\x1b[A"
# Its own session with the terminal in control, so that Ctrl-C typed there becomes the signal.
START = (
    "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from outrider.cli import main; main()"
)
CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """A running command, and everything that it has shown so far."""

    process: asyncio.subprocess.Process
    handle: int
    shown: str = ""
    seen: int = 0
    received: bytearray = field(default_factory=bytearray)

    def type(self, text: str) -> None:
        """Presses the keys of a text."""
        os.write(self.handle, text.encode())

    async def until(self, words: str) -> str:
        """Waits for words after those waited for before; returns what was shown up to them, in plain text."""
        await eventually(lambda: words in self.plain[self.seen :])
        start, self.seen = self.seen, self.plain.index(words, self.seen) + len(words)
        return self.plain[start : self.seen]

    async def press_until(self, keys: str, words: str) -> None:
        """Presses keys until words are shown: Python's readline misses a signal between its prompt and its wait."""
        while words not in self.plain[self.seen :]:
            self.type(keys)
            with suppress(TimeoutError):
                await eventually(lambda: words in self.plain[self.seen :], 2.0)
        await self.until(words)

    async def press_to_leave(self, keys: str) -> None:
        """Presses keys until the command has ended, for the same reason."""
        while self.process.returncode is None:
            self.type(keys)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.process.wait()), 2.0)

    @property
    def plain(self) -> str:
        """What was shown, without styles and movements."""
        return CONTROL_SEQUENCES.sub("", self.shown)

    def read(self) -> None:
        """Takes what the command has written; a terminal that the last process has left gives an error."""
        try:
            self.received += os.read(self.handle, 1 << 16)
        except OSError:
            asyncio.get_running_loop().remove_reader(self.handle)
        self.shown = self.received.decode(errors="ignore")


@asynccontextmanager
async def terminal(*arguments: str, changes: Mapping[str, str] | None = None) -> AsyncIterator[Terminal]:
    """Runs `outrider` in a terminal with colours; it is killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    unwanted = {"NO_COLOR", "VISUAL", "EDITOR", "COLUMNS", "LINES", "INPUTRC"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {"TERM": "xterm-256color", **(changes or {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    running = Terminal(process, ours)
    asyncio.get_running_loop().add_reader(ours, running.read)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


ROUNDS = (
    Round((GeneratedToken(5, Origin.PLAIN, "Once"),), "Once"),
    Round((GeneratedToken(6, Origin.ACCEPTED, " upon"), GeneratedToken(7, Origin.CORRECTION, " a")), " upon a"),
    Round((GeneratedToken(8, Origin.ACCEPTED, ""), GeneratedToken(9, Origin.BONUS, " é")), " é"),
)
RESULT = Result(
    rest=" time",
    finish_reason="length",
    seed=11,
    prompt_tokens=3,
    completion_tokens=5,
    speculation=SpeculationFigures(
        rounds=2,
        draft_tokens=4,
        accepted_tokens=2,
        acceptance_rate=0.5,
        draft_acceptance_rate=0.5,
        mean_acceptance_length=2.0,
        fallback_rounds=1,
    ),
    first_token_us=1_000,
    total_us=100_000,
    model_hash="ab",
    numerics_ids=("cpu-test",),
    cached_prompt_tokens=2,
    queue_us=50,
)
TEXT = "Once upon a é time"
NUMBERED = (
    Round(
        (
            GeneratedToken(5, Origin.PLAIN, "Once\n", TokenLogprob(-0.25, (5, 6), (-0.25, -2.0))),
            GeneratedToken(6, Origin.ACCEPTED, "\x1b", TokenLogprob(-1.5, (6, 8), (-1.5, -1.625))),
        ),
        "Once\n\x1b",
        prompt=(PromptToken(3, "Ask"), PromptToken(4, ": ", TokenLogprob(-3.0, (1, 2), (-0.5, -1.0)))),
    ),
)
REJECTED = (
    ROUNDS[0],
    replace(
        ROUNDS[1],
        rejected=(RejectedToken(70, " the", -0.5), RejectedToken(71, " fox")),
        facts=RoundFacts(draft_count=3),
    ),
    replace(ROUNDS[2], rejected=(RejectedToken(72, " \x1b"),)),
)


# Two guesses side by side, the second of which was kept; of two after it none was, and one after those not looked at.
BRANCHED = (
    ROUNDS[0],
    Round(
        (
            GeneratedToken(6, Origin.ACCEPTED, " upon", row=2, drafter="lookup"),
            GeneratedToken(7, Origin.CORRECTION, " a"),
        ),
        " upon a",
        rejected=(
            RejectedToken(70, " in", row=1, parent=0, drafter="model", value=0.5),
            RejectedToken(71, " the", row=3, parent=2, drafter="lookup"),
            RejectedToken(72, " \x1b", row=4, parent=2, drafter="model", value=0.125),
            RejectedToken(73, " fox", row=5, parent=3, drafter="lookup"),
        ),
        facts=RoundFacts(draft_count=5, accepted_count=1, evaluated_count=2),
    ),
    ROUNDS[2],
)


def shown(view: View, rounds: tuple[Round, ...] = ROUNDS, *, rejected: bool = False) -> None:
    """Lets a view see a whole generation, in which rejected guesses were asked for or not."""
    view.begin("Ask: ", RequestOptions(show_rejected=rejected or None))
    for event in rounds:
        view.show(event)
    view.finish(RESULT)
    view.end()


def show_two_samples(view: View) -> None:
    """Lets a view see two samples of the same generation."""
    view.begin("Ask: ", RequestOptions(sample_count=2))
    for index in range(2):
        for event in ROUNDS:
            view.show(replace(event, sample_index=index))
        view.finish(replace(RESULT, sample_index=index, seed=11 + index))
    view.end()


Call = grpc.aio.ServicerContext[Any, pb.GenerateResponse]


@dataclass
class ScriptedGateway(GenerationServiceServicer):
    """Answers every prompt with the same two rounds; "wait" is never answered, "refuse" is refused, and where a number
    of samples is named they come mixed.

    "think" is answered after some reasoning. "lose" passes on the loss of a connection to a service, and "too large" is
    answered by more than a message may have.
    """

    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    chats: list[pb.ChatRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(  # noqa: N802, the protocol's name
        self, request: pb.GenerateRequest, context: Call
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        async for response in self._answer(request.text, request, context):
            yield response

    async def Chat(  # noqa: N802, the protocol's name
        self, request: pb.ChatRequest, context: Call
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answers by the script that the last message names."""
        self.chats.append(request)
        generation = request.generation
        async for response in self._answer(request.messages[-1].content, generation, context, generation.seed):
            yield response

    async def _answer(
        self, text: str, request: pb.GenerateRequest, context: Call, seed: int = 7
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if text == "wait":
            # The end of the call, wherever it finds this method: a cancellation may come before "Once" is sent.
            context.add_done_callback(lambda _: self.cancelled.set())
        if text == "refuse":
            await context.abort_with_status(status_of(InvalidRequest("temperature", -1.0, "at least 0")))
        if text == "lose":
            nothing = grpc.aio.Metadata()
            lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
            await context.abort_with_status(status_of(error_from(lost)))
        if text == "too large":
            yield said((pb.TOKEN_ORIGIN_PLAIN, "x" * MAX_MESSAGE_BYTES))
        if text == "think":
            thinking = said((pb.TOKEN_ORIGIN_PLAIN, ""))
            thinking.round.deltas.add(reasoning="Hm, tales.")
            yield thinking
        for response in mixed_samples(request.sample_count):
            yield response
        if request.sample_count:
            return
        yield said((pb.TOKEN_ORIGIN_PLAIN, "Once"))
        if text == "wait":
            await asyncio.Event().wait()
        yield said((pb.TOKEN_ORIGIN_ACCEPTED, " upon"), (pb.TOKEN_ORIGIN_CORRECTION, " a"))
        yield pb.GenerateResponse(completion=completion(seed))


def said(*tokens: tuple[pb.TokenOrigin.ValueType, str]) -> pb.GenerateResponse:
    """A round of tokens, whose ids are the lengths of their texts."""
    parts = [pb.GeneratedToken(token_id=len(text), origin=origin, text=text) for origin, text in tokens]
    return pb.GenerateResponse(round=pb.Round(tokens=parts, text_delta="".join(text for _, text in tokens)))


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[ScriptedGateway]:
    """One that answers on `address`."""
    server = grpc.aio.server()
    servicer = ScriptedGateway()
    add_GenerationServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


def completion(seed: int = 7) -> pb.Completion:
    """The end of the script."""
    return pb.Completion(
        finish_reason=types_pb2.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=2, completion_tokens=3, cached_prompt_tokens=1),
        seed=seed,
        speculation=pb.SpeculationFigures(rounds=1, draft_tokens=2, accepted_tokens=1, acceptance_rate=0.5),
        timings=pb.Timings(first_token_us=10, total_us=3_000),
        text_delta="!",
    )


def mixed_samples(count: int) -> Iterator[pb.GenerateResponse]:
    """Two rounds of each sample by turns, with log-probabilities and the rule `lenient`; the last sample ends first."""
    for half in ("one", " two"):
        for index in range(count):
            token = pb.GeneratedToken(token_id=len(half), origin=pb.TOKEN_ORIGIN_ACCEPTED, text=half)
            token.logprob.CopyFrom(
                types_pb2.TokenLogprob(logprob=-0.5, top_token_ids=[3, 9], top_logprobs=[-0.5, -1.5])
            )
            prompt = [pb.PromptToken(token_id=8, text="Hello")] if half == "one" and index == 0 else []
            told = pb.Round(tokens=[token], text_delta=half, sample_index=index, prompt_tokens=prompt)
            yield pb.GenerateResponse(round=told)
    for index in reversed(range(count)):
        ending = completion()
        ending.sample_index, ending.seed, ending.rule = index, 70 + index, types_pb2.ACCEPTANCE_RULE_LENIENT
        ending.acceptance.lenience = 0.25
        yield pb.GenerateResponse(completion=ending)
