"""What mutual TLS between a gateway and its services costs a round, with and without it in one run. No gate.

    python -m bench.tls [--turns 40] [--tokens 96] [--draft-counts 0,4] [--target ...] [--draft ...]

Two stacks serve the same pair side by side: one in plaintext, one with certificates as `outrider certs` makes them.
Each request goes to both, in another order each turn, and their tokens are compared. A round lasts from one message to
the next at the client, whose own connection is in plaintext both times. Two processes of one model differ in speed by
themselves, so there is also the round without what the services computed, by their own clocks: TLS is in that part.
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from bench.common import (
    OPENINGS,
    ComputeThreads,
    MeasuredModels,
    interval,
    machine,
    markdown,
    parse_numbers,
    revision,
    run_measurement,
    settings_of,
    spread,
    stack_of,
    timed,
)
from bench.versions import Times, compare, in_turns
from outrider.cli.local_stack import Stack, gateway_launch, model_launch
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.running import Interrupts, note, run, service_log
from outrider.client import AsyncClient, Round, Speculation
from outrider.process import telemetry
from outrider.process.certs import CA, CERT, KEY, hosts_of, write_certificates
from outrider.process.children import Launch, Supervisor
from outrider.process.options import between, grouped

WAYS = PLAINTEXT, SECURED = "plaintext", "mutual TLS"
SERVICE_FLAGS = {"--tls-client-ca": CA, "--tls-cert": CERT, "--tls-key": KEY}
GATEWAY_FLAGS = {f"--service-tls-{what}": file for what, file in (("ca", CA), ("cert", CERT), ("key", KEY))}
TEMPERATURE = 0.8
MOST_DRAFT_TOKENS = 32

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Options: what is asked for, and how often."""

    turns: Annotated[
        int, typer.Option(help="Requests of each setting, each way.", metavar="N", callback=between(1, 1000))
    ] = 40
    tokens: Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(8, 512))] = 96
    draft_counts: Annotated[str, typer.Option(help="Draft tokens a round; 0 is plain decoding.", metavar="N,...")] = (
        "0,4"
    )


def launched(launch: Launch, way: str, certificates: Path) -> Launch:
    """Launch of a process with or without TLS, under a name of its own."""
    flags = GATEWAY_FLAGS if launch.name == "gateway" else SERVICE_FLAGS
    files = [word for flag, file in flags.items() for word in (flag, str(certificates / launch.name / file))]
    return replace(launch, name=f"{launch.name} ({way})", command=(*launch.command, *(files if way == SECURED else ())))


async def start(supervisor: Supervisor, stack: Stack, way: str, certificates: Path) -> str:
    """Starts a stack that way, and returns where its gateway answers. Raises ServiceFailed."""
    services = [launched(model_launch(role, stack), way, certificates) for role in ("target", "draft")]
    target, draft = await supervisor.start(*services)
    [gateway] = await supervisor.start(launched(gateway_launch(stack, target, draft), way, certificates))
    return gateway


def costs(rounds: Sequence[Round], seconds: float) -> dict[str, float]:
    """Milliseconds a round of an answer whose rounds after the first took so long.

    Rounds of plain decoding come unasked, each computed while the one before is on its way: nothing is left of these.
    """
    facts = [each.facts for each in rounds[1:]]
    found = {"round": 1e3 * seconds / len(facts)}
    asked = [each for each in facts if each.draft_count]
    if asked:
        rest_us = median(each.round_us - each.draft_compute_us - each.verify_compute_us for each in asked)
        found["round without computing"] = rest_us / 1e3
    return found


async def measure(
    clients: Mapping[str, AsyncClient], settings: Mapping[str, Speculation], turns: int, tokens: int
) -> Times:
    """Costs of rounds each way, by setting. Raises TokensDiffer, and what the gateways answer."""
    found: Times = defaultdict(lambda: defaultdict(list))
    for turn in range(turns + 1):
        note(f"Turn {turn} of {turns}{'' if turn else ', to warm up'}.")
        prompt = OPENINGS[turn % len(OPENINGS)]
        for setting, speculation in settings.items():
            answers = {}
            for way in in_turns(clients, turn):
                rounds, first_s, seconds = await timed(
                    clients[way],
                    prompt,
                    max_tokens=tokens,
                    seed=turn,
                    temperature=TEMPERATURE,
                    ignore_eos=True,
                    speculation=speculation,
                )
                answers[way] = [token.token_id for each in rounds for token in each.tokens]
                for figure, cost_ms in costs(rounds, seconds - first_s).items() if turn else ():
                    found[f"{setting}, {figure}"][way].append(cost_ms)
            compare(answers, f"{prompt!r}, {setting}")
    return found


def render(found: Times) -> str:
    """Medians with quartiles each way; ratios and differences of neighbours with their intervals."""
    rows = []
    for what, times in found.items():
        pairs = list(zip(times[PLAINTEXT], times[SECURED], strict=True))
        ratios, more_us = (interval(each) for each in zip(*((b / a, 1e3 * (b - a)) for a, b in pairs), strict=True))
        ways = (spread(times[way]).show(".3f") for way in WAYS)
        rows.append([what, *ways, ratios.show(".3f"), more_us.show(".0f")])
    ways = (f"{way}, ms (quartiles)" for way in WAYS)
    return markdown(["median", *ways, f"{SECURED} over {PLAINTEXT} (95 %)", "more, us (95 %)"], rows)


@app.command()
@grouped
def tls(*, wanted: TlsOptions, models: MeasuredModels, cpus: ComputeThreads) -> None:
    """Compares rounds in plaintext with rounds under mutual TLS between gateway and services, in one run."""
    telemetry.configure_logs("warning")
    stack = stack_of(models, cpus)
    settings = settings_of(parse_numbers("--draft-counts", wanted.draft_counts, int, 0, MOST_DRAFT_TOKENS))

    async def measuring(interrupts: Interrupts) -> None:
        with tempfile.TemporaryDirectory() as folder:
            certificates = Path(folder)
            write_certificates(certificates, hosts_of([], {}), timedelta(days=1))
            async with AsyncExitStack() as exits:
                supervisor = await exits.enter_async_context(Supervisor(note, service_log))
                interrupts.urgent = supervisor.kill
                addresses = {way: await start(supervisor, stack, way, certificates) for way in WAYS}
                clients = {
                    way: await exits.enter_async_context(AsyncClient(address)) for way, address in addresses.items()
                }
                found = await measure(clients, settings, wanted.turns, wanted.tokens)
        print(
            f"{Path(stack.target).name} with {Path(stack.draft or '').name}; {machine()}; {wanted.turns} requests of "
            f"{wanted.tokens} tokens a setting and way;\ncommit {revision() or 'unknown'}. Tokens were equal both "
            f"ways.\n\n{render(found)}"
        )

    run(measuring, options=SHARED_OPTIONS)


if __name__ == "__main__":
    run_measurement(app, "tls")
