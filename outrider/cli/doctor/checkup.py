"""The order of the checks: cheap ones first, then what takes seconds. Each check judges for itself; this only asks."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from outrider.cli.doctor import clock, engine, gateway, memory, models, ports, selftest, threads, versions
from outrider.cli.doctor.findings import SOFTWARE, Finding, exit_code, failed, skipped
from outrider.cli.doctor.report import Report
from outrider.cli.local_stack import ServiceFailed, Stack, Supervisor, start_stack
from outrider.cli.running import SYSEXITS, Interrupts, Work
from outrider.errors import ModelRefused

QUICK_FIX = "Leave out --quick."

Checks = Callable[[Interrupts, Report], AsyncIterator[Finding]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is to be looked at: a stack as `outrider up` would start it. `refusal` says why there is none."""

    stack: Stack | None
    refusal: ModelRefused | None = None
    quick: bool = False
    """Loads no model and starts no process."""


def examining(checks: Checks, report: Report, codes: list[int]) -> Work:
    """The work of the command: runs checks into a report, and appends the exit code."""

    async def work(interrupts: Interrupts) -> None:
        findings: list[Finding] = []
        try:
            async for finding in checks(interrupts, report):
                findings.append(finding)
                report.add(finding)
            report.end()
        finally:
            report.close()
        codes.append(exit_code(findings))

    return work


async def check_gateway(address: str, rest_address: str | None, version: str, report: Report) -> AsyncIterator[Finding]:
    """Checks of a gateway that runs, after the versions here."""
    for finding in versions.judge(versions.gather()):
        yield finding
    report.begin(f"Asking the gateway on {address}")
    async for finding in gateway.check(address, rest_address, version):
        yield finding


async def check_machine(machine: Machine, interrupts: Interrupts, report: Report) -> AsyncIterator[Finding]:
    """Checks of this machine with a stack that is to run on it."""
    started = clock.now()
    report.begin("Looking at this machine")
    for finding in versions.judge(versions.gather()):
        yield finding
    if machine.refusal is not None:
        yield failed("models", machine.refusal.message, "Name models with --target and --draft.")
    if machine.stack is None:
        return
    stack = machine.stack
    for finding in threads.judge(threads.gather(), stack.threads, stack.draft_threads):
        yield finding
    for finding in await _ports(stack):
        yield finding
    pair = _pair(stack)
    for finding in pair.findings:
        yield finding
    async for finding in _running(machine, stack, interrupts, report, pair):
        yield finding
    yield clock.judge(started, clock.now(), clock.resolution_s())


async def _ports(stack: Stack) -> list[Finding]:
    wanted = {"--rest-port": stack.rest_port or 0, "--port": stack.gateway_port}
    if stack.draft:
        wanted["--draft-port"] = stack.draft_port
    return ports.judge(await ports.gather({**wanted, "--target-port": stack.target_port}))


@dataclass(frozen=True, slots=True)
class Pair:
    """What was found about both models, and the hub ids among them that are not on this machine."""

    findings: list[Finding]
    absent: list[str]


def _pair(stack: Stack) -> Pair:
    """The files of both models, whether they fit together, and into memory."""
    dtypes = {"target": stack.dtype, "draft": stack.draft_dtype or stack.dtype}
    named = {"target": stack.target, "draft": stack.draft}
    files = {role: _files(role, model) for role, model in named.items() if model}
    findings = [models.judge_model(role, named[role], files.get(role), dtypes[role]) for role in named]
    read = {role: each for role, each in files.items() if isinstance(each, models.ModelFiles)}
    if len(read) == len(named):
        findings += models.judge_pair(read["target"], read["draft"])
    elif stack.draft:
        findings.append(models.judge_absent([model for role, model in named.items() if model and role not in read]))
    if read:
        needs = {role: memory.needed_bytes(each, dtypes[role]) for role, each in read.items()}
        findings.append(memory.judge(needs, memory.available_bytes()))
    return Pair(findings, [model for role, model in named.items() if model and files[role] is None])


def _files(role: str, model: str) -> models.ModelFiles | ModelRefused | None:
    try:
        return models.read_model(role, model)
    except ModelRefused as error:
        return error


async def _running(
    machine: Machine, stack: Stack, interrupts: Interrupts, report: Report, pair: Pair
) -> AsyncIterator[Finding]:
    """What needs processes: the engine's probe, then the whole stack."""
    has_failed = exit_code(pair.findings) != 0
    model = "" if machine.quick or has_failed or stack.target in pair.absent else stack.target
    report.begin("Comparing rows of the target, bit by bit" if model else "Asking the engine what it computes with")
    found = await engine.gather(engine.command(model, stack.dtype, stack.device, stack.threads))
    findings = engine.judge(found, engine.compiler(), stack.device)
    for finding in findings:
        yield finding
    if machine.quick:
        yield skipped(selftest.CHECK, "Nothing was started.", QUICK_FIX)
    elif has_failed or exit_code(findings):
        yield skipped(selftest.CHECK, "Nothing was started, because of what failed above.")
    elif pair.absent:
        told = f"Nothing was started, because {' and '.join(pair.absent)} would have to be downloaded."
        yield skipped(selftest.CHECK, told, models.download_fix(pair.absent))
    else:
        report.begin("Starting a stack on free ports, to ask it twice")
        yield await _self_test(stack, interrupts)


async def _self_test(stack: Stack, interrupts: Interrupts) -> Finding:
    """A real stack on free ports that downloads nothing, asked with and without speculation."""
    alone = replace(stack, gateway_port=0, draft_port=0, target_port=0, rest_port=None, offline=True)
    async with Supervisor(_unsaid, _unlogged) as supervisor:
        interrupts.urgent = supervisor.kill
        try:
            addresses = await start_stack(supervisor, alone)
        except ServiceFailed as error:
            fix = "Start `outrider up` with the same options to see the whole log."
            return failed(selftest.CHECK, error.message, fix, error.code if error.code in SYSEXITS else SOFTWARE)
        return selftest.judge(await selftest.gather(addresses.gateway), has_draft=addresses.draft is not None)


def _unsaid(sentence: str) -> None:
    """A report has no place for what a supervisor says on the way."""


def _unlogged(name: str, line: str) -> None:
    """Nor for logs."""
