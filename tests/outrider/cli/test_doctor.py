"""`outrider doctor` whole: its report in each form, this machine, and a gateway that runs."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console
from support.stack import RunningStack, running_stack

from outrider.cli.doctor import gateway, selftest
from outrider.cli.doctor.answering import Answerer
from outrider.cli.doctor.findings import Finding, Status, failed, ok, skipped, warning
from outrider.cli.doctor.report import JsonReport, PlainReport, Report, TerminalReport, summary
from outrider.cli.doctor.selftest import Answered, Outcome
from outrider.client import Result, SpeculationFigures
from outrider.service_process import Launch, ServiceFailed, ServiceProcess

FREE_PORTS = ("--port", "0", "--rest-port", "0", "--draft-port", "0", "--target-port", "0")
ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "doctor")
FINDINGS = [ok("a", "It is."), warning("b", "It is slow.", "Hurry."), failed("c", "It is not.", "Do it.", 69)]


def answered(*token_ids: int, rounds: int = 4, drafted: int = 8) -> Answered:
    """An answer with invented figures."""
    figures = SpeculationFigures(rounds, drafted, 3, 0.5, 0.4, 1.7, 0)
    return Answered(token_ids, Result("", "length", 7, 3, 5, figures, 1, 2, "0123456789abcdef", ("cpu-x",)))


def shown(report: Report) -> None:
    """Gives a report all findings."""
    report.begin("Looking")
    for finding in FINDINGS:
        report.add(finding)
    report.end()
    report.close()


def test_plain_report_has_a_line_for_each_finding() -> None:
    """With what to do below, and how many there were of each kind at the end."""
    output = io.StringIO()
    shown(PlainReport(output))
    lines = output.getvalue().splitlines()
    assert lines[:3] == ["ok       a: It is.", "warning  b: It is slow.", "         fix: Hurry."]
    assert lines[-1].startswith("1 ok, 1 warning, 1 failed.")


def test_json_report_is_one_object() -> None:
    """With the exit code and every finding."""
    output = io.StringIO()
    shown(JsonReport(output, "1.2.3"))
    told = json.loads(output.getvalue())
    assert (told["version"], told["exit_code"]) == ("1.2.3", 69)
    assert [each["status"] for each in told["findings"]] == ["ok", "warning", "failed"]


def test_terminal_report_fits_into_80_columns_and_needs_no_colour() -> None:
    """Words tell the result, and nothing is cut off."""
    output = io.StringIO()
    shown(TerminalReport(Console(file=output, width=80, force_terminal=False)))
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert all(word in text for word in ("failed", "It is not.", "fix: Do it."))


@pytest.mark.parametrize(
    ("speculative", "plain", "status", "code"),
    [
        (answered(1, 2, 3), answered(1, 2, 3), Status.OK, 0),
        (answered(1, 2, 3), answered(1, 9, 3), Status.FAILED, 70),
        (answered(1, 2), answered(1, 2, 3), Status.FAILED, 70),
        (answered(1, 2, rounds=1), answered(1, 2), Status.FAILED, 70),
        (answered(1, 2, drafted=0), answered(1, 2), Status.WARNING, 0),
    ],
)
def test_the_self_test_demands_equal_ids(speculative: Answered, plain: Answered, status: Status, code: int) -> None:
    """Two rounds at least, and a draft that takes part."""
    finding = selftest.judge(Outcome(speculative, plain), has_draft=True)
    assert (finding.status, finding.exit_code) == (status, code)


def test_a_self_test_without_an_answer_keeps_its_code() -> None:
    """The gateway's own sentence is the finding."""
    finding = selftest.judge(Outcome(problem="Nothing answers", code=69), has_draft=True)
    assert (finding.sentence, finding.exit_code) == ("Nothing answers.", 69)


@pytest.mark.parametrize(
    ("answerer", "code"),
    [
        (None, 69),
        (Answerer("other"), 78),
        (Answerer("rest"), 78),
        (Answerer("target", "big"), 78),
        (Answerer("gateway", "NOT_SERVING"), 69),
        (Answerer("gateway", "SERVING"), 0),
    ],
)
def test_who_may_answer_as_a_gateway(answerer: Answerer | None, code: int) -> None:
    """Nobody is unavailable, somebody else is a wrong address."""
    assert gateway.judge_answerer("h:1", answerer).exit_code == code


def test_versions_of_both_sides_are_compared() -> None:
    """Another version is a warning, no answer a failure, no address no check."""
    services = {"target": {"configured": True, "up": True, "model": "big"}, "draft": {"configured": True, "up": False}}
    rest = gateway.Rest({"gateway": {"version": "1"}, **services})
    told = [gateway.judge_rest("h:1", rest, own).status for own in ("1", "2")]
    assert told == [Status.OK, Status.WARNING]
    assert "the target big and a draft that is away" in gateway.judge_rest("h:1", rest, "1").sentence
    assert gateway.judge_rest("h:1", gateway.Rest(None), "1").exit_code == 69
    assert gateway.judge_rest(None, None, "1").status is Status.SKIPPED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0"}) as running:
        yield running


async def checked(address: str, rest_address: str | None = None) -> list[Finding]:
    """All findings about a gateway."""
    return [finding async for finding in gateway.check(address, rest_address, version("outrider"))]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_gateway_passes(stack: RunningStack) -> None:
    """Reachable, its models told, and the same ids with and without speculation."""
    assert stack.gateway is not None
    found = await checked(stack.gateway.address, stack.gateway.rest_address)
    assert [(each.check, each.status) for each in found] == [
        ("gateway", Status.OK),
        ("REST", Status.OK),
        ("models", Status.OK),
        ("self test", Status.OK),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_address_of_rest_is_told_from_that_of_grpc(stack: RunningStack) -> None:
    """With the option that wants it."""
    assert stack.gateway is not None
    [finding] = await checked(stack.gateway.rest_address)
    assert (finding.exit_code, "--rest-address" in finding.fix) == (78, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_address_of_a_service_is_not_that_of_a_gateway(stack: RunningStack) -> None:
    """Told at once, with nothing asked of it."""
    [finding] = await checked(stack.target.address)
    assert (finding.status, finding.exit_code) == (Status.FAILED, 78)
    assert "the target service" in finding.sentence


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gateway_without_its_draft_passes_with_a_warning(stack: RunningStack) -> None:
    """The ids are the same; what is missing is told."""
    assert stack.gateway is not None
    await stack.stop_draft()
    found = await checked(stack.gateway.address)
    assert [each.status for each in found] == [Status.OK, Status.SKIPPED, Status.WARNING, Status.WARNING]


def test_this_machine_passes_whole() -> None:
    """The real command: the probe compares rows of the embedded target, and a real stack answers twice alike."""
    line = [*COMMAND, "--json", *FREE_PORTS]
    ended = subprocess.run(line, capture_output=True, check=False, timeout=240, cwd=ROOT, encoding="utf-8")
    assert ended.returncode == 0, ended.stdout
    found = {each["check"]: each for each in json.loads(ended.stdout)["findings"]}
    assert {"versions", "threads", "vocabulary", "memory", "kernels", "row invariance", "clock"} <= set(found)
    assert found["row invariance"]["status"] == found["self test"]["status"] == "ok"
    assert "tokens are the same with and without speculation" in found["self test"]["sentence"]


def test_a_missing_model_fails_without_starting_anything(tmp_path: Path) -> None:
    """Exit code 78; what would need the model is skipped."""
    line = [*COMMAND, "--json", "--target", str(tmp_path), "--no-draft"]
    ended = subprocess.run(line, capture_output=True, check=False, timeout=120, cwd=ROOT, encoding="utf-8")
    assert ended.returncode == 78, ended.stdout
    found = {each["check"]: each["status"] for each in json.loads(ended.stdout)["findings"]}
    assert (found["target model"], found["draft model"], found["self test"]) == ("failed", "skipped", "skipped")


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """Nobody asks the hub for a draft that is not here: what needs it is skipped with the reason, nothing failed."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        place = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": place, "HF_HUB_OFFLINE": "0"}
        line = [*COMMAND, "--json", *FREE_PORTS, "--draft", "someone/something"]
        ended = subprocess.run(
            line, capture_output=True, check=False, timeout=120, cwd=ROOT, encoding="utf-8", env=environment
        )
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert ended.returncode == 0, ended.stdout
    found = {each["check"]: each for each in json.loads(ended.stdout)["findings"]}
    assert found["row invariance"]["status"] == "ok"
    for check in ("draft model", "vocabulary", "self test"):
        assert (found[check]["status"], "someone/something" in found[check]["sentence"]) == ("skipped", True)


async def test_variables_of_a_launch_hold_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process has: the stack of a self test is offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    script = "import os, sys; sys.exit('offline ' + os.environ['HF_HUB_OFFLINE'])"
    launch = Launch("child", (sys.executable, "-c", script), environment={"HF_HUB_OFFLINE": "1"})
    with pytest.raises(ServiceFailed, match="offline 1"):
        await ServiceProcess.start(launch, launch.listen, lambda _line: None)


def test_only_an_answer_shows_that_it_works() -> None:
    """A report without a self test does not claim more than was looked at."""
    assert "Outrider works here." in summary([ok("self test", "")])
    assert "works here" not in summary([ok("versions", ""), skipped("self test", "Nothing was started.")])
