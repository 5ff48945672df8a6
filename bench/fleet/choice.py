"""`python -m bench.fleet.choice`: what the choice of a target costs a gateway, among simulated targets that say loads.

The gateway and all targets are in this process, and only the CPU of the thread that chooses counts. Books are as full
as those of targets that have many sessions and have cached many prompts.
"""

import asyncio
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated

import typer

from gateway.server import RunningGateway
from gateway.server import start as start_gateway
from gateway.sessions.placement import PromptPrefix
from gateway.sessions.replicas import Placing
from gateway.sessions.room import LOOK_S
from gateway.settings import GatewaySettings
from outrider.cli.bench.common import machine, markdown, revision
from outrider.cli.running import Interrupts, run
from outrider.client import AsyncClient
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.process import telemetry
from outrider.process.options import between, grouped, run_app, service_app
from target_service.server import TargetSettings
from target_service.server import start as start_target

MODEL, LISTEN = "sim:h100-8b@stretch=0.01", "127.0.0.1:0"
WANTED_MS = 1.5
SHARES = (0.1, 0.5, 0.9)
ANSWER = 64  # tokens of the answer whose rounds are to make no choice

app = service_app()
counted = partial(typer.Option, metavar="N")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Options: among how many targets is chosen, and for which prompts."""

    targets: Annotated[int, counted(help="Targets.", callback=between(2, 64))] = 16
    prompt: Annotated[int, counted(help="Tokens of a prompt.", callback=between(64, 100_000))] = 4_000
    sessions: Annotated[int, counted(help="Sessions on each target.", callback=between(0, 1000))] = 32
    choices: Annotated[int, counted(help="Choices that are measured.", callback=between(10, 10_000))] = 300


@app.command()
@grouped
def choice(*, wanted: ChoiceOptions) -> None:
    """Measures choices one by one, and how many an answer of many rounds takes."""
    telemetry.configure_logs("warning")

    async def measuring(_: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            addresses = []
            for _number in range(wanted.targets):
                target = await start_target(TargetSettings(MODEL, listen=LISTEN))
                stack.push_async_callback(target.stop, 0)
                addresses.append(target.address)
            settings = GatewaySettings(",".join(addresses), MODEL, "", listen=LISTEN, rest_listen="", lookup=False)
            gateway = await start_gateway(settings)
            stack.push_async_callback(gateway.stop, 0)
            await measure(gateway, wanted)

    run(measuring)


async def measure(gateway: RunningGateway, wanted: ChoiceOptions) -> None:
    """Measures and prints."""
    target = gateway.backend.target
    while not all(peer.load for peer in target.peers):  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(LOOK_S)
    async with AsyncClient(gateway.address) as client:
        num_rounds = len([_ async for _ in client.generate("Once upon a time", max_tokens=ANSWER, ignore_eos=True)]) - 1
    num_chosen = sum(target.placements.values())
    dice = random.Random(0)
    for number, peer in enumerate(target.peers):
        for session in range(wanted.sessions):
            prefix = await PromptPrefix.of(prompt_of(wanted, dice), b"")
            peer.book.opened(f"{number} {session}".encode(), wanted.prompt, prefix)
    digests_ms, choices_ms = list[float](), list[float]()
    info, ends = target.present(), frozenset[int]()
    for _ in range(wanted.choices):
        prompt = prompt_of(wanted, dice)
        spec = SessionSpec(prompt, len(prompt), SamplingParameters(), 0, len(prompt) + ANSWER, ends, ends)
        began_s = time.thread_time()
        prefix = await PromptPrefix.of(prompt, b"")
        known_s = time.thread_time()
        # An audit's way, which never waits for room.
        gateway.backend.place(spec, info, Placing(info.model_hash, prefix))
        digests_ms.append(1e3 * (known_s - began_s))
        choices_ms.append(1e3 * (time.thread_time() - known_s))
    report(wanted, digests_ms, choices_ms, num_chosen, num_rounds)


def prompt_of(wanted: ChoiceOptions, dice: random.Random) -> tuple[int, ...]:
    """A prompt whose first half all have in common."""
    half = wanted.prompt // 2
    return (*range(half), *dice.choices(range(1000), k=wanted.prompt - half))


def report(
    wanted: ChoiceOptions, digests_ms: list[float], choices_ms: list[float], num_chosen: int, num_rounds: int
) -> None:
    """Prints the times, and how many choices an answer took."""
    both_ms = [sum(each) for each in zip(digests_ms, choices_ms, strict=True)]
    head = ["", *(f"{share:.0%} below" for share in SHARES)]
    rows = [
        [name, *(f"{sorted(times)[int(share * len(times))]:.2f}" for share in SHARES)]
        for name, times in (("digests of the prompt", digests_ms), ("choice", choices_ms), ("both", both_ms))
    ]
    sys.stdout.write(
        f"## A place among {wanted.targets} SIMULATED targets, for a prompt of {wanted.prompt} tokens\n\n"
        f"CPU milliseconds of a gateway, {wanted.choices} choices, {wanted.sessions} sessions on each target; "
        f"{machine()}; commit {revision() or 'unknown'}.\n\n{markdown(head, rows)}\n\n"
        f"At most {WANTED_MS} ms are wanted: {'met' if median(both_ms) <= WANTED_MS else 'MISSED'}. "
        f"An answer of {num_rounds} rounds took {num_chosen} choice.\n"
    )


if __name__ == "__main__":
    run_app(app)
