"""`outrider doctor` whole: its report in each form, ports, this machine, and a gateway that runs."""

import asyncio
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.services.markov import MarkovModel
from support.services.markov_services import DraftServicer, serving
from support.stack import RunningStack, running_stack

import outrider
from outrider.cli.doctor.checks import (
    Answerer,
    check_gateway,
    check_ports,
    compare_answers,
    gateway_finding,
    rest_finding,
    rest_text,
    self_test,
    who_answers,
    with_answer,
)
from outrider.cli.doctor.policy import policy_of, print_policy
from outrider.cli.doctor.report import Finding, Report, Status, exit_code, failed, ok, skipped, summary, warning
from outrider.cli.output import console_for
from outrider.client import GeneratedToken, Origin, Result, Round, SpeculationFigures
from outrider.client.events import Sample
from outrider.process.children import Launch, ServiceFailed, ServiceProcess
from outrider.v1 import model_service_pb2 as model_pb

FREE_PORTS = ("--port", "0", "--rest-port", "0", "--draft-port", "0", "--target-port", "0")
ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "doctor")
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
FINDINGS = [ok("a", "It is."), warning("b", "It is slow.", "Hurry."), failed("c", "It is not.", "Do it.", 69)]


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that no other process gets while it is held, and on which none listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def answered(*token_ids: int, rounds: int = 4, drafted: int = 8, text: str = "") -> Sample:
    """An answer with invented figures."""
    figures = SpeculationFigures(
        rounds=rounds, draft_tokens=drafted, accepted_tokens=3, acceptance_rate=0.5, mean_acceptance_length=1.7
    )
    result = Result(
        rest="",
        finish_reason="length",
        seed=7,
        prompt_tokens=3,
        completion_tokens=5,
        speculation=figures,
        first_token_us=1,
        total_us=2,
        model_hash="0123456789abcdef",
        numerics_ids=("cpu-x",),
    )
    tokens = tuple(GeneratedToken(token_id, Origin.PLAIN, "") for token_id in token_ids)
    return Sample((Round(tokens, text),), result)


def reported(*, as_json: bool) -> str:
    """What a report prints of all findings."""
    output = io.StringIO()
    report = Report(output, as_json=as_json)
    report.add(*FINDINGS)
    report.end("1.2.3")
    return output.getvalue()


def test_plain_report_has_a_line_for_each_finding() -> None:
    """With what to do below, and how many there were of each kind at the end."""
    lines = reported(as_json=False).splitlines()
    assert lines[:3] == ["ok       a: It is.", "warning  b: It is slow.", "         fix: Hurry."]
    assert lines[-1].startswith("1 ok, 1 warning, 1 failed.")


def test_json_report_is_one_object() -> None:
    """With the exit code and every finding."""
    told = json.loads(reported(as_json=True))
    assert (told["version"], told["exit_code"]) == ("1.2.3", 69)
    assert [each["status"] for each in told["findings"]] == ["ok", "warning", "failed"]


def test_the_first_failure_names_the_exit_code() -> None:
    """Later checks often fail because of it; a warning is no failure."""
    findings = [ok("a", ""), warning("b", "", ""), failed("c", "", "", 69), failed("d", "", "", 78)]
    assert exit_code(findings) == 69
    assert exit_code(findings[:2]) == 0


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
def test_the_self_test_demands_equal_ids(speculative: Sample, plain: Sample, status: Status, code: int) -> None:
    """Two rounds at least, and a draft that takes part."""
    finding = compare_answers(speculative, plain, has_draft=True)
    assert (finding.status, finding.exit_code) == (status, code)


def test_an_answer_without_a_word_is_a_warning() -> None:
    """The answer is reported, too."""
    finding = with_answer(ok("self test", "Equal."), answered(1, text="Paris\n it is."))
    assert (finding.status, finding.sentence) == (
        Status.OK,
        "Equal. Asked 'What is the capital of France?' with its own settings, the model answers 'Paris it is.'.",
    )
    assert with_answer(ok("self test", "Equal."), answered(1)).status is Status.WARNING
    assert with_answer(failed("self test", "Unequal.", "", 70), answered(1)).exit_code == 70


async def test_a_self_test_without_an_answer_keeps_its_code(free_port: int) -> None:
    """The client's own sentence is the finding."""
    finding = await self_test(f"127.0.0.1:{free_port}", has_draft=True)
    assert (finding.status, finding.exit_code) == (Status.FAILED, 69)
    assert str(free_port) in finding.sentence
    assert finding.sentence.endswith(".")


@pytest.mark.parametrize(
    ("answerer", "code"),
    [
        (None, 69),
        (Answerer("other"), 78),
        (Answerer("rest"), 78),
        (Answerer("target", "big"), 78),
        (Answerer("gateway", is_serving=False), 69),
        (Answerer("gateway"), 0),
    ],
)
def test_who_may_answer_as_a_gateway(answerer: Answerer | None, code: int) -> None:
    """No listener is unavailable, a stranger is a wrong address."""
    assert gateway_finding("h:1", answerer).exit_code == code


def test_versions_of_both_sides_are_compared() -> None:
    """Another version is a warning, no answer a failure."""
    services = {"target": {"configured": True, "up": True, "model": "big"}, "draft": {"configured": True, "up": False}}
    status = {"gateway": {"version": "1"}, **services}
    told = [rest_finding("h:1", status, own).status for own in ("1", "2")]
    assert told == [Status.OK, Status.WARNING]
    assert "the target big and a draft that is away" in rest_finding("h:1", status, "1").sentence
    assert rest_finding("h:1", None, "1").exit_code == 69


def test_a_draft_that_does_not_fit_is_a_warning() -> None:
    """A user who wonders why nothing is guessed reads it there."""
    services = {"target": {"configured": True, "up": True, "model": "big"}, "draft": {"configured": True, "up": False}}
    services["draft"]["state"] = "misfit"
    found = rest_finding("h:1", {"gateway": {"version": "1"}, **services}, "1")
    assert found.status is Status.WARNING
    assert "the target big and a draft that answers, but does not fit" in found.sentence


async def test_services_of_ours_are_known_by_their_role() -> None:
    """The draft says that it is one; on its own port that is well, on another's it keeps `up` from starting."""
    async with serving(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(), (1,))) as address:
        answerer = await who_answers(address)
        number = int(address.rpartition(":")[2])
        well, in_the_way = await check_ports({"--draft-port": number, "--port": number})
    assert answerer is not None
    assert answerer.role == "draft"
    assert (well.status, in_the_way.status, in_the_way.exit_code) == (Status.OK, Status.FAILED, 69)
    assert "--port 0" in in_the_way.fix


async def test_strangers_are_told_as_such() -> None:
    """A web server that knows nothing of Outrider fails the check, as it would `up`; its answer can be read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(HELLO)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        number = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(rest_text, f"127.0.0.1:{number}", "/") == "hi"
        assert await who_answers(f"127.0.0.1:{number}") == Answerer("other")
        [finding] = await check_ports({"--port": number})
    assert (finding.status, finding.exit_code) == (Status.FAILED, 69)
    assert "--port 0" in finding.fix


async def test_a_free_port(free_port: int) -> None:
    """No process answers, it can be bound, and 0 needs no look."""
    assert await who_answers(f"127.0.0.1:{free_port}") is None
    found = await check_ports({"--port": free_port, "--target-port": 0})
    assert found == [ok("ports", f"{free_port} is free.")]


async def test_a_port_that_cannot_be_had(free_port: int) -> None:
    """It fails, because `up` would, though no process answers there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = await check_ports({"--port": free_port, "--target-port": held.getsockname()[1]})
    assert [each.status for each in found] == [Status.OK, Status.FAILED]
    assert (found[1].exit_code, "cannot be used" in found[1].sentence) == (69, True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0"}) as running:
        yield running


async def checked(address: str, rest_address: str | None = None) -> list[Finding]:
    """All findings about a gateway."""
    return [finding async for finding in check_gateway(address, rest_address, outrider.__version__)]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_gateway_passes(stack: RunningStack) -> None:
    """Reachable, its models named, and the same ids with and without speculation."""
    assert stack.gateway is not None
    found = await checked(stack.gateway.address, stack.gateway.rest_address)
    assert [(each.check, each.status) for each in found] == [
        ("gateway", Status.OK),
        ("REST", Status.OK),
        ("self test", Status.OK),
    ]
    assert "Asked 'What is the capital of France?' with its own settings, the model answers" in found[-1].sentence


@pytest.mark.asyncio(loop_scope="module")
async def test_the_policy_of_a_running_gateway_is_shown(stack: RunningStack) -> None:
    """Its choice with the reason, and a row for each number of guesses; looking changes nothing of it."""
    assert stack.gateway is not None
    for seed in range(3):
        await stack.client.generate("Once upon a time", max_tokens=48, seed=seed).result()
    before = pickle.dumps(stack.gateway.backend.policies.latest)
    found = await policy_of(stack.gateway.rest_address)
    assert isinstance(found, dict)
    shown = io.StringIO()
    print_policy(console_for(shown), found)
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("On the target: 1 session. A token of plain decoding takes ")
    assert lines[2] == found["choice"]["reason"]
    counts = [line.split()[0] for line in lines if re.match(r" +[0-9]+ ", line)]
    assert counts[:8] == [str(count) for count in range(1, 9)]
    assert pickle.dumps(stack.gateway.backend.policies.latest) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rest_from_guesses_is_shown(stack: RunningStack) -> None:
    """With the plain tokens that it still takes; elsewhere there is no word of it."""
    assert stack.gateway is not None
    found = await policy_of(stack.gateway.rest_address)
    assert isinstance(found, dict)
    shown = []
    for rest in (0.0, 512.4):
        console = io.StringIO()
        print_policy(console_for(console), {**found, "rest_tokens": rest})
        shown.append("for the next 512 plain tokens there are none" in console.getvalue())
    # A machine that was busy in the meantime may have one.
    assert (found["rest_tokens"] >= 0, shown) == (True, [False, True])


async def test_a_policy_is_asked_of_gateways_alone(free_port: int) -> None:
    """Where none answers REST, the exit code says that it is unavailable, and the sentence where it was looked for."""
    found = await policy_of(f"127.0.0.1:{free_port}")
    assert isinstance(found, Finding)
    assert (found.exit_code, str(free_port) in found.sentence) == (69, True)


def test_the_policy_of_no_gateway_is_an_error(free_port: int) -> None:
    """In one sentence on stderr, with nothing on stdout; an option that starts something has no place beside it."""
    for words, code, said in (
        (("--rest-port", str(free_port)), 69, f"127.0.0.1:{free_port}"),
        (("--quick",), 64, "left out with --policy"),
    ):
        ran = subprocess.run([*COMMAND, "--policy", *words], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (code, "", 1)
        assert said in ran.stderr


@pytest.mark.asyncio(loop_scope="module")
async def test_the_address_of_rest_is_told_from_that_of_grpc(stack: RunningStack) -> None:
    """With the option that wants it."""
    assert stack.gateway is not None
    [finding] = await checked(stack.gateway.rest_address)
    assert (finding.exit_code, "--rest-address" in finding.fix) == (78, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_address_of_a_service_is_not_that_of_a_gateway(stack: RunningStack) -> None:
    """Reported at once, with nothing asked of it."""
    [finding] = await checked(stack.target.address)
    assert (finding.status, finding.exit_code) == (Status.FAILED, 78)
    assert "the target service" in finding.sentence


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gateway_without_its_draft_passes_with_a_warning(stack: RunningStack) -> None:
    """The ids are the same; what is missing is named."""
    assert stack.gateway is not None
    await stack.stop_draft()
    found = await checked(stack.gateway.address)
    assert [each.status for each in found] == [Status.OK, Status.SKIPPED, Status.WARNING]


@pytest.mark.slow
def test_this_machine_passes_whole() -> None:
    """The real command: the probe compares rows of the embedded target, and a real stack answers twice alike."""
    line = [*COMMAND, "--json", *FREE_PORTS]
    ended = subprocess.run(line, capture_output=True, check=False, timeout=240, cwd=ROOT, encoding="utf-8")
    assert ended.returncode == 0, ended.stdout
    found = {each["check"]: each for each in json.loads(ended.stdout)["findings"]}
    assert {"versions", "vocabulary", "memory", "kernels", "row invariance"} <= set(found)
    assert found["row invariance"]["status"] == found["self test"]["status"] == "ok"
    assert "tokens are the same with and without speculation" in found["self test"]["sentence"]


@pytest.mark.slow
def test_a_missing_model_fails_without_starting_anything(tmp_path: Path) -> None:
    """Exit code 78; what would need the model is skipped."""
    line = [*COMMAND, "--json", "--target", str(tmp_path), "--no-draft"]
    ended = subprocess.run(line, capture_output=True, check=False, timeout=120, cwd=ROOT, encoding="utf-8")
    assert ended.returncode == 78, ended.stdout
    found = {each["check"]: each["status"] for each in json.loads(ended.stdout)["findings"]}
    assert (found["target model"], found["draft model"], found["self test"]) == ("failed", "skipped", "skipped")


@pytest.mark.slow
def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """The hub is not asked for a draft that is not here: what needs it is skipped with the reason, nothing failed."""
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


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--pair", "tales")])
def test_the_pair_that_up_would_fetch_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Before it is there: another one is looked at, and the report says so, unless that one was asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_PAIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    line = [*COMMAND, "--json", "--quick", *FREE_PORTS, *words]
    ended = subprocess.run(line, capture_output=True, check=True, timeout=120, cwd=ROOT, text=True, env=environment)
    told = [each for each in json.loads(ended.stdout)["findings"] if each["check"] == "pair"]
    if words:
        assert told == []
    else:
        [pair] = told
        assert pair["status"] == "warning"
        assert pair["sentence"].startswith("`outrider up` fetches smollm2 first and serves that; what is")
    assert "Serving" not in ended.stderr


async def test_variables_of_a_launch_hold_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process has: the stack of a self test is offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    script = "import os, sys; sys.exit('offline ' + os.environ['HF_HUB_OFFLINE'])"
    launch = Launch("child", (sys.executable, "-c", script), environment={"HF_HUB_OFFLINE": "1"})
    with pytest.raises(ServiceFailed, match="offline 1"):
        await ServiceProcess.start(launch, lambda _line: None)


def test_only_an_answer_shows_that_it_works() -> None:
    """A report without a self test does not claim more than was looked at."""
    assert "Outrider works here." in summary([ok("self test", "")])
    assert "works here" not in summary([ok("versions", ""), skipped("self test", "Nothing was started.")])
