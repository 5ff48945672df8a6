"""Whether the ports of a stack are free, or who has them. Opens no port for longer than a moment."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.cli.doctor.answering import Answerer, who_answers
from outrider.cli.doctor.findings import UNAVAILABLE, Finding, failed, ok
from outrider.cli.local_stack import HOST

CHECK = "ports"
# What each option's port is for, as `who_answers` names it.
ROLES = {"--rest-port": "rest", "--port": "gateway", "--draft-port": "draft", "--target-port": "target"}
NAMES = {"rest": "REST and the page", "gateway": "gateway", "draft": "draft service", "target": "target service"}


@dataclass(frozen=True, slots=True)
class Port:
    """One port: free, answered by somebody, or not to be had, which `problem` explains."""

    option: str
    number: int
    answerer: Answerer | None = None
    problem: str = ""


async def gather(ports: Mapping[str, int]) -> list[Port]:
    """Looks at ports by their options; 0 means any free one, so there is nothing to look at."""
    wanted = [(option, number) for option, number in ports.items() if number]
    return list(await asyncio.gather(*(_look(option, number) for option, number in wanted)))


async def _look(option: str, number: int) -> Port:
    answerer = await who_answers(f"{HOST}:{number}")
    if answerer is not None:
        return Port(option, number, answerer)
    with socket.socket() as probe:
        # Without this, connections that ended a moment ago would look like a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, number))
        except OSError as error:
            return Port(option, number, problem=error.strerror or str(error))
    return Port(option, number)


def judge(ports: list[Port]) -> list[Finding]:
    """One finding about all that is well, and one about each port that is not."""
    free = [str(port.number) for port in ports if port.answerer is None and not port.problem]
    findings = [ok(CHECK, f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} free.")] if free else []
    return findings + [_taken(port) for port in ports if str(port.number) not in free]


def _taken(port: Port) -> Finding:
    choose = f"{port.option} 0 takes a free one."
    if port.answerer is None:
        return failed(CHECK, f"{port.number} cannot be used: {port.problem}.", choose, UNAVAILABLE)
    role = port.answerer.role
    if role == "other":
        sentence = f"{port.number} is taken by a program that is not Outrider's, so `outrider up` cannot start."
        return failed(CHECK, sentence, f"Stop it, or choose another port: {choose}", UNAVAILABLE)
    detail = f" ({port.answerer.detail})" if port.answerer.detail else ""
    sentence = f"{port.number} answers already, as Outrider's {NAMES.get(role, role)}{detail}."
    if role != ROLES[port.option]:
        fix = f"`outrider up` wants it for something else: stop what answers there, or choose another port: {choose}"
        return failed(CHECK, sentence, fix, UNAVAILABLE)
    return ok(CHECK, sentence)
