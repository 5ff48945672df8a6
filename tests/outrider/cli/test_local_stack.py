"""Which processes a stack has, and the supervisor against real child processes: small scripts that serve or do not."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from outrider import model_names
from outrider.cli.local_stack import (
    Launch,
    RestartPolicy,
    ServiceFailed,
    ServiceProcess,
    Stack,
    Supervisor,
    choose_models,
    free_port,
    gateway_launch,
    model_launch,
)
from outrider.cli.up import check_ports
from outrider.errors import ModelRefused, NotReady
from outrider.model_names import embedded_model

PAIR = Stack("models/target", "models/draft", threads=4, draft_threads=1)


def test_embedded_pair_is_the_default() -> None:
    """Without names both embedded models are served."""
    target, draft = choose_models(None, None, no_draft=False)
    assert (Path(target).name, Path(draft or "").name) == ("target", "draft")


def test_another_target_has_no_draft_unless_named() -> None:
    """The embedded draft fits the embedded target alone."""
    assert choose_models("big", None, no_draft=False) == ("big", None)
    assert choose_models("big", "small", no_draft=False) == ("big", "small")
    assert choose_models("big", "small", no_draft=True) == ("big", None)


def test_a_sized_target_takes_the_embedded_draft() -> None:
    """It has the same vocabulary; a preset of both roles means that of its option, in every later place."""
    target, draft = choose_models("sized:1b", None, no_draft=False)
    assert (target, Path(draft or "").name) == ("sized:target-1b", "draft")
    assert choose_models("sized:200m@3", "sized:1b", no_draft=False) == ("sized:target-200m@3", "sized:draft-1b")
    assert choose_models("sized:draft-1b", "sized:1b", no_draft=True) == ("sized:draft-1b", None)
    with pytest.raises(ModelRefused, match="200m, 1b, 3b, 8b, 32b for a target") as refusal:
        choose_models(None, "sized:7b", no_draft=False)
    assert refusal.value.exit_code == 78


def test_a_simulated_target_takes_a_simulated_draft() -> None:
    """The embedded one would be right about nothing; a draft that is named is taken, and wrong names are refused."""
    assert choose_models("sim:h100-8b", None, no_draft=False) == ("sim:h100-8b", "sim:h100-1b")
    assert choose_models("sim:h100-8b", None, no_draft=True) == ("sim:h100-8b", None)
    named = choose_models("sim:h100-70b@stretch=2.0", "sim:h100-1b@acceptance=0.9", no_draft=False)
    assert named == ("sim:h100-70b@stretch=2", "sim:h100-1b@acceptance=0.9")
    with pytest.raises(ModelRefused, match="is no simulated model"):
        choose_models("sim:h100", None, no_draft=False)


def test_missing_embedded_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says where it was looked for and which option names another."""
    monkeypatch.setattr(model_names, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelRefused, match="name a model with --draft") as refusal:
        embedded_model("draft")
    assert str(tmp_path) in refusal.value.message


@pytest.mark.parametrize("option", ["target", "draft"])
def test_a_path_that_is_no_folder_is_told_with_its_option(option: str, tmp_path: Path) -> None:
    """Before anything starts: the service would know the path only."""
    models = {"target": str(tmp_path), "draft": None, option: str(tmp_path / "nope")}
    with pytest.raises(ModelRefused, match=rf"^--{option} is '.*nope', but must be a folder"):
        choose_models(models["target"], models["draft"], no_draft=False)


def test_command_lines() -> None:
    """Each service is told its own model, threads and address, and to stop with its stdin."""
    target = model_launch("target", PAIR)
    argv = replace(target, listen="127.0.0.1:7").argv
    assert argv[1:4] == ("-P", "-m", "target_service")
    assert argv[argv.index("--model") + 1] == "models/target"
    assert argv[argv.index("--threads") + 1] == "4"
    assert argv[-3:] == ("--listen", "127.0.0.1:7", "--stop-with-stdin")
    assert target.listen == "127.0.0.1:0"
    draft = model_launch("draft", PAIR).command
    assert draft[draft.index("--threads") + 1] == "1"
    gateway = gateway_launch(PAIR, "127.0.0.1:7", None).command
    assert gateway[gateway.index("--draft") + 1] == ""


def test_the_draft_may_have_a_dtype_and_a_top_n_of_its_own() -> None:
    """It takes the target's dtype and its own default unless told otherwise; the target hears of neither."""
    stack = replace(PAIR, dtype="float32")
    for role in ("target", "draft"):
        words = model_launch(role, stack).command
        assert words[words.index("--dtype") + 1] == "float32"
        assert "--top-n" not in words
    stack = replace(stack, draft_dtype="bfloat16", top_n=16)
    target, draft = (model_launch(role, stack).command for role in ("target", "draft"))
    assert (target[target.index("--dtype") + 1], "--top-n" in target) == ("float32", False)
    assert (draft[draft.index("--dtype") + 1], draft[draft.index("--top-n") + 1]) == ("bfloat16", "16")


def test_an_offline_stack_downloads_nothing() -> None:
    """The hub's library in each of its processes is told; any other stack has the environment that there is."""
    launches = [model_launch("target", PAIR), model_launch("draft", PAIR), gateway_launch(PAIR, "127.0.0.1:7", None)]
    assert [each.environment for each in launches] == [{}] * 3
    offline = replace(PAIR, offline=True)
    for launch in (model_launch("draft", offline), gateway_launch(offline, "127.0.0.1:7", None)):
        assert launch.environment == {"HF_HUB_OFFLINE": "1"}


def test_taken_port_is_told_with_the_way_out() -> None:
    """A port in use ends `up` before anything starts, also when its owner would share it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(NotReady, match=rf"Port {port} is taken.*--draft-port") as taken:
            check_ports(Stack("t", "d", draft_port=port))
    assert taken.value.exit_code == 69
    check_ports(Stack("t", "d", draft_port=port))


# Serves where it is told to until its stdin ends.
SERVES = """
import concurrent.futures, os, signal, sys, grpc
from grpc_health.v1 import health, health_pb2_grpc
signal.signal(signal.SIGUSR1, lambda *_: os._exit(70))
server = grpc.server(concurrent.futures.ThreadPoolExecutor())
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(sys.argv[sys.argv.index("--listen") + 1])
server.start()
print("listens on a port of its own", flush=True)
sys.stdin.read()
print("drained", file=sys.stderr, flush=True)
server.stop(0)
"""
REFUSES = """
import sys
print("a log line", file=sys.stderr)
print("The model is of a kind that cannot be truncated.\\n\\n", file=sys.stderr)
sys.exit(78)
"""
SILENT = "import sys; sys.stdin.read()"
DEAF = SERVES.replace("sys.stdin.read()", "while True: signal.pause()")
LONG_LINE = """
import sys
print("x" * 200_000, file=sys.stderr)
sys.exit(3)
"""
QUICK = RestartPolicy(first_s=0.01, longest_s=0.02, healthy_s=30.0)


def launch(script: str, name: str = "child", ready_timeout_s: float = 30.0) -> Launch:
    """A service made of a script."""
    return Launch(name, (sys.executable, "-c", script), ready_timeout_s=ready_timeout_s)


@dataclass
class Record:
    """What a supervisor said; `changed` is set with every sentence."""

    reports: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)
        self.changed.set()

    async def until(self, words: str) -> None:
        """Waits until a sentence contains the words."""
        while not any(words in sentence for sentence in self.reports):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def supervisor(record: Record) -> AsyncIterator[Supervisor]:
    async with Supervisor(record.report, lambda name, line: record.log.append((name, line)), QUICK) as running:
        yield running


def test_delays_double_to_a_limit_and_start_anew_after_a_healthy_run() -> None:
    """0.5 s, doubled up to 10 s, and 0.5 s again for a service that ran 30 s."""
    policy = RestartPolicy()
    delays, delay_s = [], None
    for _ in range(7):
        delay_s = policy.delay_s(delay_s, ran_s=1.0)
        delays.append(delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert policy.delay_s(10.0, ran_s=29.9) == 10.0
    assert policy.delay_s(10.0, ran_s=30.0) == 0.5


async def test_starts_and_stops_in_order(record: Record) -> None:
    """Services serve on addresses of their own, and the last started drains first."""
    async with Supervisor(record.report, lambda name, line: record.log.append((name, line)), QUICK) as supervisor:
        addresses = await supervisor.start(launch(SERVES, "target"), launch(SERVES, "draft"))
        addresses += await supervisor.start(launch(SERVES, "gateway"))
        assert len(set(addresses)) == 3
    assert record.log == [("gateway", "drained"), ("draft", "drained"), ("target", "drained")]


async def test_refusal_carries_sentence_and_code(supervisor: Supervisor, record: Record) -> None:
    """A child that exits 78 ends the start with its code and last sentence, told once, and takes the others along."""
    serving = launch(SERVES, "draft")
    with pytest.raises(ServiceFailed, match="kind that cannot be truncated") as failure:
        await supervisor.start(serving, launch(REFUSES, "target"))
    assert failure.value.code == 78
    assert "a log line" not in failure.value.message
    assert record.log == [("target", "a log line")]


async def test_not_ready_in_time(supervisor: Supervisor) -> None:
    """A child that never says that it serves is killed when its time is up."""
    with pytest.raises(ServiceFailed, match="not ready within") as failure:
        await supervisor.start(launch(SILENT, ready_timeout_s=0.3))
    assert failure.value.code == 69


HESITATES = SERVES.replace(
    "server = ",
    "from grpc_health.v1 import health_pb2\n"
    "class Hesitant(health.HealthServicer):\n"
    "    asked = 0\n"
    "    def Check(self, request, context):\n"
    "        self.asked += 1\n"
    "        print('asked', self.asked, file=sys.stderr, flush=True)\n"
    "        return health_pb2.HealthCheckResponse(status=1 if self.asked == 3 else 2)\n"
    "server = ",
).replace("health.HealthServicer(), server", "Hesitant(), server")


async def test_serving_is_what_the_health_service_says(supervisor: Supervisor, record: Record) -> None:
    """A child that answers but does not serve yet is asked again, until it says SERVING."""
    await supervisor.start(launch(HESITATES))
    await supervisor.stop()
    assert [line for _, line in record.log if "asked" in line] == ["asked 1", "asked 2", "asked 3"]


def test_free_ports_differ_and_can_be_taken() -> None:
    """Nobody is given the same port again, and who names it has it."""
    ports = [free_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


async def test_long_lines_are_read(supervisor: Supervisor) -> None:
    """A log line longer than any buffer neither blocks nor breaks the reading."""
    with pytest.raises(ServiceFailed, match=r"x{1000}"):
        await supervisor.start(launch(LONG_LINE))


async def test_lines_without_an_end_are_not_held(supervisor: Supervisor, record: Record) -> None:
    """They come in pieces, none of them much longer than a megabyte, and nothing of them is lost."""
    endless = LONG_LINE.replace("200_000", "5_000_000")
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.start(launch(endless))
    pieces = [line for _, line in record.log]
    assert max(map(len, pieces)) < 1_200_000
    assert sum(map(len, pieces)) + failure.value.message.count("x") == 5_000_000


async def test_dead_service_comes_back_on_its_port(supervisor: Supervisor, record: Record) -> None:
    """SIGKILL twice: each time the service is back on the same address, and each death and return is told."""
    [address] = await supervisor.start(launch(SERVES, "draft"))
    watching = asyncio.create_task(supervisor.watch())
    for _ in range(2):
        record.reports.clear()
        killed = supervisor.pid("draft")
        os.kill(killed, signal.SIGKILL)
        await record.until(f"is back on {address}")
        assert record.reports[0].startswith("The draft service was ended by signal 9")
        assert supervisor.pid("draft") != killed
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_keeps_trying_when_a_restart_fails(supervisor: Supervisor, record: Record, tmp_path: Path) -> None:
    """A service that cannot come back at once is tried again, and the reason is told each time."""
    mark = tmp_path / "mark"
    once = f"import os, sys\nif os.path.exists('{mark}'): os.remove('{mark}'); sys.exit('The disk is busy.')\n"
    await supervisor.start(launch(once + SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    mark.touch()
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    await record.until("is back")
    assert "The disk is busy." in record.reports[1]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("code", [64, 78])
async def test_gives_up_what_a_restart_cannot_change(
    supervisor: Supervisor, record: Record, tmp_path: Path, code: int
) -> None:
    """A restart that ends with wrong usage or bad configuration ends the watch, with the child's sentence and code."""
    mark = tmp_path / "mark"
    once = f"import os, sys\nif os.path.exists('{mark}'): print('It is a Mamba.', file=sys.stderr); sys.exit({code})\n"
    await supervisor.start(launch(SERVES, "draft"), launch(once + SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    mark.touch()
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    with pytest.raises(ServiceFailed, match="It is a Mamba") as failure:
        await asyncio.wait_for(watching, 30)
    assert failure.value.code == code
    assert len(record.reports) == 1


async def test_a_service_that_gave_itself_up_is_started_again(supervisor: Supervisor, record: Record) -> None:
    """Exit code 70 is what a watchdog leaves: another incarnation may do better."""
    await supervisor.start(launch(SERVES, "target"))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(supervisor.pid("target"), signal.SIGUSR1)
    await record.until("is back")
    assert "ended with code 70" in record.reports[0]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_stop_kills_what_does_not_drain(record: Record) -> None:
    """A child that ignores the end of its stdin is killed after the grace."""
    child = await ServiceProcess.start(launch(DEAF), lambda line: None)
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL


async def test_kill_cuts_a_stop_short(supervisor: Supervisor) -> None:
    """A second Ctrl-C ends services that are slow to drain."""
    await supervisor.start(launch(DEAF, "target"))
    stopping = asyncio.create_task(supervisor.stop())
    supervisor.kill()
    await asyncio.wait_for(stopping, 5)


async def test_child_ends_with_its_parent() -> None:
    """A child loses its stdin with a parent that is killed, and ends by itself."""
    parent = (
        "import asyncio, sys\nfrom outrider.cli.local_stack import Launch, ServiceProcess\n"
        f"launch = Launch('child', (sys.executable, '-c', {SERVES!r}))\n"
        "async def main():\n"
        "    child = await ServiceProcess.start(launch, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child_pid = int(await process.stdout.readline())
    child = os.pidfd_open(child_pid)
    process.kill()
    await process.wait()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, ended.set)
    await asyncio.wait_for(ended.wait(), 10)
    asyncio.get_running_loop().remove_reader(child)
    os.close(child)


TAKES_A_PORT = """
import sys
from outrider.process.run import ProcessSettings, run_service
from outrider.rpc.channels import serve
run_service("child", lambda _: serve(sys.argv[sys.argv.index("--listen") + 1], {}), ProcessSettings())
"""


async def test_a_taken_port_is_told_by_the_child_alone(supervisor: Supervisor, record: Record) -> None:
    """gRPC's own lines about it stay out of the log, unless the operator's environment asks for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        refused = Launch("child", (sys.executable, "-c", TAKES_A_PORT), address)
        with pytest.raises(ServiceFailed, match=f"Cannot listen on {address}: it is taken") as failure:
            await supervisor.start(refused)
    assert failure.value.code == 69
    assert record.log == []


SERVES_METRICS = SERVES.replace(
    "server.start()",
    "import socket\n"
    'place = sys.argv[sys.argv.index("--metrics-listen") + 1]\n'
    'metrics = socket.create_server(("127.0.0.1", int(place.rpartition(":")[2])))\n'
    "server.start()",
)


async def test_a_restart_keeps_all_ports(supervisor: Supervisor, record: Record) -> None:
    """Also that of the metrics, which was any free one, so that whoever scrapes it goes on."""
    child = Launch("target", (sys.executable, "-c", SERVES_METRICS), further={"metrics": "127.0.0.1:0"})
    await supervisor.start(child)
    before = dict(supervisor.addresses("target"))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(supervisor.pid("target"), signal.SIGKILL)
    await record.until("is back on")
    assert dict(supervisor.addresses("target")) == before
    assert before["metrics"] != before["address"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
