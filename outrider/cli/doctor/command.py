"""`outrider doctor`: which checks there are, in which order, and the exit code."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module

import outrider
from outrider.cli.doctor.checks import check_ends, check_engine, check_gateway, check_ports, self_test
from outrider.cli.doctor.report import SELF_TEST, SOFTWARE, Finding, Report, exit_code, failed, ok, skipped, warning
from outrider.cli.local_stack import Stack, start_stack
from outrider.cli.modules import NotInstalled, installed_versions
from outrider.cli.pairs import Pair
from outrider.cli.running import SYSEXITS, Interrupts, note, run
from outrider.errors import InvalidRequest, ModelRefused
from outrider.process.children import HOST, ServiceFailed, Supervisor
from outrider.rpc.tls import Tls

# Reads tokenizers, which those who only have the client lack; so it is loaded by its name.
MODELS = "outrider.cli.doctor.models"


def examine_machine(
    stack: Stack | ModelRefused | NotInstalled, not_fetched: str, api_key: str | None, *, quick: bool, as_json: bool
) -> int:
    """Checks this machine for a stack as `outrider up` would start it, or says why there is none to start.

    `not_fetched` says why the stack is not of the pair that `up` would fetch first, if it is not. Prints the report and
    returns the exit code. `quick` loads no model and starts no service. Cheap checks come first, then what takes
    seconds.
    """

    async def check(report: Report, interrupts: Interrupts) -> None:
        if isinstance(stack, NotInstalled):
            fix = "Install that, or look at a gateway elsewhere with --address."
            report.add(failed("versions", stack.message, fix))
            return
        if isinstance(stack, ModelRefused):
            report.add(failed("models", stack.message, "Name models with --target and --draft."))
            return
        if not_fetched:
            sentence = (
                f"`outrider up` fetches {Pair.SMOLLM2} first and serves that; what is looked at here is {Pair.TALES}, "
                f"the embedded pair, which it serves where that cannot be had: {not_fetched}."
            )
            report.add(warning("pair", sentence, "Run `outrider up` once and then this again, or say --pair."))
        ports = {"--rest-port": stack.rest_port or 0, "--port": stack.gateway_port}
        draft_port = {"--draft-port": stack.draft_port} if stack.draft else {}
        report.add(*await check_ports({**ports, **draft_port, "--target-port": stack.target_port}, stack.host))
        models = import_module(MODELS)
        findings, absent, token_bytes = models.check_pair(stack)
        report.add(*findings)

        is_refused = exit_code(findings) != 0
        place = None if is_refused else models.place_of(stack.target)
        if place is not None:
            report.add(await check_ends(place))
        model = "" if quick or is_refused or stack.target in absent else stack.target
        if model:
            _announce("Comparing rows of the target, bit by bit")
        engine = await check_engine(model, stack.dtype, stack.device, stack.threads, token_bytes)
        report.add(*engine)

        if quick:
            report.add(skipped(SELF_TEST, "Nothing was started.", "Leave out --quick."))
        elif is_refused or exit_code(engine):
            report.add(skipped(SELF_TEST, "Nothing was started, because of what failed above."))
        elif absent:
            sentence = f"Nothing was started, because {' and '.join(absent)} would have to be downloaded."
            report.add(skipped(SELF_TEST, sentence, models.download_fix(absent)))
        else:
            _announce("Starting a stack on free ports, to ask it twice")
            report.add(await check_stack(stack, interrupts, api_key))

    return _examine(check, as_json=as_json)


def examine_gateway(
    address: str, rest_address: str | None, api_key: str | None, tls: Tls | None, *, as_json: bool
) -> int:
    """Checks a gateway that runs, prints the report and returns the exit code."""

    async def check(report: Report, _: Interrupts) -> None:
        async for finding in check_gateway(address, rest_address, outrider.__version__, api_key, tls):
            report.add(finding)

    return _examine(check, as_json=as_json)


def _examine(check: Callable[[Report, Interrupts], Awaitable[None]], *, as_json: bool) -> int:
    report = Report(sys.stdout, as_json=as_json)

    async def work(interrupts: Interrupts) -> None:
        installed = ", ".join(f"{name} {found or 'missing'}" for name, found in installed_versions().items())
        report.add(ok("versions", f"{installed}."))
        await check(report, interrupts)
        report.end(outrider.__version__)

    run(work)
    return exit_code(report.findings)


async def check_stack(stack: Stack, interrupts: Interrupts, api_key: str | None) -> Finding:
    """A real stack on free ports that downloads nothing, with one request with and one without speculation."""
    alone = replace(stack, host=HOST, gateway_port=0, draft_port=0, target_port=0, rest_port=None, offline=True)
    # A report has no place for what a supervisor and services say on the way.
    async with Supervisor(lambda _sentence: None, lambda _name, _line: None) as supervisor:
        interrupts.urgent = supervisor.kill
        try:
            addresses = await start_stack(supervisor, alone)
        except InvalidRequest as error:
            return failed(SELF_TEST, error.message, "Unset it, or start the three processes by hand.", error.exit_code)
        except ServiceFailed as error:
            fix = "Start `outrider up` with the same options to see the whole log."
            return failed(SELF_TEST, error.message, fix, error.code if error.code in SYSEXITS else SOFTWARE)
        return await self_test(addresses.gateway, api_key, has_draft=addresses.draft is not None)


def _announce(step: str) -> None:
    if sys.stderr.isatty():
        note(f"{step} ...")
