"""`outrider doctor`: which checks there are, in which order, and the exit code."""

import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.metadata import version

from outrider.cli.doctor.checks import check_engine, check_gateway, check_ports, self_test
from outrider.cli.doctor.models import check_pair, download_fix
from outrider.cli.doctor.report import (
    SELF_TEST,
    SOFTWARE,
    Finding,
    exit_code,
    failed,
    json_document,
    lines,
    ok,
    skipped,
    summary,
)
from outrider.cli.running import SYSEXITS, Interrupts, note, run
from outrider.cli.stack import Stack, start_stack
from outrider.cli.version import installed_versions
from outrider.errors import ModelRefused
from outrider.service_process import ServiceFailed
from outrider.supervisor import Supervisor

Checks = Callable[[Interrupts], AsyncIterator[Finding]]


def examine_machine(stack: Stack | ModelRefused, *, quick: bool, as_json: bool) -> int:
    """Checks this machine for a stack as `outrider up` would start it, or says why there is none to start.

    Prints the report and returns the exit code. `quick` loads no model and starts no service.
    """

    def checks(interrupts: Interrupts) -> AsyncIterator[Finding]:
        return _machine_checks(stack, interrupts, quick=quick)

    return _examine(checks, as_json=as_json)


def examine_gateway(address: str, rest_address: str | None, *, as_json: bool) -> int:
    """Checks a gateway that runs, prints the report and returns the exit code."""

    async def checks(_: Interrupts) -> AsyncIterator[Finding]:
        yield _versions()
        async for finding in check_gateway(address, rest_address, version("outrider")):
            yield finding

    return _examine(checks, as_json=as_json)


def _examine(checks: Checks, *, as_json: bool) -> int:
    findings: list[Finding] = []

    async def work(interrupts: Interrupts) -> None:
        async for finding in checks(interrupts):
            findings.append(finding)
            if not as_json:
                sys.stdout.write(lines(finding))
                sys.stdout.flush()
        ending = json_document(findings, version("outrider")) if as_json else summary(findings)
        sys.stdout.write(f"{ending}\n")
        sys.stdout.flush()

    run(work)
    return exit_code(findings)


async def _machine_checks(
    stack: Stack | ModelRefused, interrupts: Interrupts, *, quick: bool
) -> AsyncIterator[Finding]:
    """Cheap checks first, then what takes seconds."""
    yield _versions()
    if isinstance(stack, ModelRefused):
        yield failed("models", stack.message, "Name models with --target and --draft.")
        return
    ports = {"--rest-port": stack.rest_port or 0, "--port": stack.gateway_port}
    draft_port = {"--draft-port": stack.draft_port} if stack.draft else {}
    for finding in await check_ports({**ports, **draft_port, "--target-port": stack.target_port}):
        yield finding
    findings, absent = check_pair(stack)
    for finding in findings:
        yield finding

    is_refused = exit_code(findings) != 0
    model = "" if quick or is_refused or stack.target in absent else stack.target
    if model:
        _announce("Comparing rows of the target, bit by bit")
    engine = await check_engine(model, stack.dtype, stack.device, stack.threads)
    for finding in engine:
        yield finding

    if quick:
        yield skipped(SELF_TEST, "Nothing was started.", "Leave out --quick.")
    elif is_refused or exit_code(engine):
        yield skipped(SELF_TEST, "Nothing was started, because of what failed above.")
    elif absent:
        sentence = f"Nothing was started, because {' and '.join(absent)} would have to be downloaded."
        yield skipped(SELF_TEST, sentence, download_fix(absent))
    else:
        _announce("Starting a stack on free ports, to ask it twice")
        yield await _test_stack(stack, interrupts)


async def _test_stack(stack: Stack, interrupts: Interrupts) -> Finding:
    """A real stack on free ports that downloads nothing, asked with and without speculation."""
    alone = replace(stack, gateway_port=0, draft_port=0, target_port=0, rest_port=None, offline=True)
    # A report has no place for what a supervisor and services say on the way.
    async with Supervisor(lambda _sentence: None, lambda _name, _line: None) as supervisor:
        interrupts.urgent = supervisor.kill
        try:
            addresses = await start_stack(supervisor, alone)
        except ServiceFailed as error:
            fix = "Start `outrider up` with the same options to see the whole log."
            return failed(SELF_TEST, error.message, fix, error.code if error.code in SYSEXITS else SOFTWARE)
        return await self_test(addresses.gateway, has_draft=addresses.draft is not None)


def _versions() -> Finding:
    return ok(
        "versions", ", ".join(f"{name} {found or 'missing'}" for name, found in installed_versions().items()) + "."
    )


def _announce(step: str) -> None:
    """Tells who watches a terminal why nothing comes for some seconds."""
    if sys.stderr.isatty():
        note(f"{step} ...")
