"""Checks of a gateway that runs already, from outside. Starts nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cli.doctor import selftest
from outrider.cli.doctor.answering import NOT_SERVING, STATUS_PATH, Answerer, rest_json, who_answers
from outrider.cli.doctor.findings import CONFIG, UNAVAILABLE, Finding, failed, ok, skipped, told, warning

REACHABLE, REST, MODELS = "gateway", "REST", "models"


@dataclass(frozen=True, slots=True)
class Rest:
    """What the REST surface says: the gateway, and the services behind it; None where it is not one."""

    status: Mapping[str, Any] | None


async def check(address: str, rest_address: str | None, own_version: str) -> AsyncIterator[Finding]:
    """All checks of the gateway on an address, in order; nothing more where nobody answers."""
    answerer = await who_answers(address)
    finding = judge_answerer(address, answerer)
    yield finding
    if finding.exit_code:
        return
    yield judge_rest(rest_address, await gather_rest(rest_address) if rest_address else None, own_version)
    tested = await selftest.gather(address)
    yield judge_models(tested)
    yield selftest.judge(tested, has_draft=True)


async def gather_rest(address: str) -> Rest:
    """Asks for the status."""
    return Rest(await asyncio.to_thread(rest_json, address, STATUS_PATH))


def judge_answerer(address: str, answerer: Answerer | None) -> Finding:
    """Whether a gateway that serves is there."""
    if answerer is None:
        sentence = f"Nothing answers on {address}."
        return failed(REACHABLE, sentence, "Start a stack with `outrider up`, or check the address.", UNAVAILABLE)
    if answerer.role == "rest":
        sentence = f"{address} is the gateway's REST address, and --address is its gRPC one."
        return failed(REACHABLE, sentence, "Give it as --rest-address; gRPC answers on 50050 by default.", CONFIG)
    if answerer.role != "gateway":
        who = "a program that is not Outrider's" if answerer.role == "other" else f"the {answerer.role} service"
        return failed(REACHABLE, f"On {address} answers {who}.", "Give the address of the gateway.", CONFIG)
    if answerer.detail == NOT_SERVING:
        sentence = f"The gateway on {address} answers, but has no target to serve with."
        return failed(REACHABLE, sentence, "Start the target, or look into the gateway's log.", UNAVAILABLE)
    return ok(REACHABLE, f"The gateway on {address} is serving.")


def judge_rest(address: str | None, rest: Rest | None, own_version: str) -> Finding:
    """The version that the gateway runs, and the models that it names."""
    if address is None or rest is None:
        return skipped(REST, "Only REST tells the gateway's version.", "Give its address with --rest-address.")
    if rest.status is None or "gateway" not in rest.status:
        sentence = f"{address} does not answer as a gateway's REST surface."
        return failed(REST, sentence, "Check the address; `outrider up` prints it as the page's.", UNAVAILABLE)
    version = rest.status["gateway"].get("version")
    services = " and ".join(_service(role, rest.status.get(role, {})) for role in ("target", "draft"))
    sentence = f"Version {version} answers on {address}, with {services}."
    if version != own_version:
        fix = "Use the same version on both sides where something does not work."
        return warning(REST, f"{sentence} This command is version {own_version}.", fix)
    return ok(REST, sentence)


def _service(role: str, status: Mapping[str, Any]) -> str:
    """A service in words, for instance "the target big"."""
    if not status.get("configured"):
        return f"no {role}"
    return f"the {role} {status.get('model')}" if status.get("up") else f"a {role} that is away"


def judge_models(tested: selftest.Outcome) -> Finding:
    """What computes behind the gateway, as an answer tells it."""
    if tested.speculative is None:
        return skipped(MODELS, "Without an answer nothing is known about the models.")
    result = tested.speculative.result
    sentence = f"The target is {result.model_hash[:12]} with {result.numerics_ids[-1]}; its draft "
    if result.speculation.draft_tokens:
        return ok(MODELS, f"{sentence}guessed {told(result.speculation.draft_tokens, 'token')}.")
    fix = "Start a draft, or look into its log; answers are the same without it, only later."
    return warning(MODELS, f"{sentence}guessed nothing.", fix)
