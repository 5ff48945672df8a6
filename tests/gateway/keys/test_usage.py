"""What the workers of a gateway count together, in files that real processes read and write at once."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.basics import eventually

from gateway.keys.usage import SharedUsage

NUM_PROCESSES = 4
TIMES = 500
# Takes one sample so often, each only if fewer than the limit are taken, and says how many it got.
TAKES = """
import sys
from gateway.keys.usage import SharedUsage

folder, worker, times, limit = sys.argv[1], *map(int, sys.argv[2:])
usage, count = SharedUsage(folder, worker), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    with usage.account("alice") as account:
        if account.samples + account.other_samples < limit:
            account.samples += 1
            account.requests.take(1)
            count += 1
print(count, flush=True)
"""


def takers(folder: Path, times: int, limit: int) -> list[subprocess.Popen[str]]:
    """Processes that all begin when they are asked to."""
    words = (str(folder),)
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", TAKES, *words, str(worker), str(times), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for worker in range(1, NUM_PROCESSES + 1)
    ]
    for each in begun:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    return begun


def test_workers_see_what_the_others_used(tmp_path: Path) -> None:
    """Of each key, whichever of them counted it."""
    one, other = SharedUsage(str(tmp_path), 0), SharedUsage(str(tmp_path), 1)
    with one.account("alice") as account:
        account.samples += 2
        account.requests.take(5)
    with other.account("alice") as account:
        assert (account.samples, account.other_samples, account.requests.used) == (0, 2, 5)
        account.samples += 3
        account.held_tokens += 40
        account.tokens.take(7.5)
    with one.account("alice") as account:
        assert (account.samples, account.other_samples, account.tokens.used) == (2, 3, 7.5)
        assert (account.held_tokens, account.other_held_tokens) == (0, 40)
    with one.account("bobby") as account:
        assert (account.samples, account.other_samples, account.requests.used) == (0, 0, 0)


def test_what_fails_in_between_counts_nothing(tmp_path: Path) -> None:
    """And the account is open to the next one."""
    usage = SharedUsage(str(tmp_path), 0)

    def fail() -> None:
        with usage.account("alice") as account:
            account.samples += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with usage.account("alice") as account:
        assert account.samples == 0


def test_a_worker_that_begins_again_has_no_samples_yet(tmp_path: Path) -> None:
    """Those of the one before it have died with it, with the tokens that they held; what it used of a minute stays
    used.
    """
    for number in range(2):
        with SharedUsage(str(tmp_path), number).account("alice") as account:
            account.samples += 4
            account.held_tokens += 500
            account.requests.take(3)
    again = SharedUsage(str(tmp_path), 0)
    with again.account("alice") as account:
        assert (account.samples, account.other_samples, account.requests.used) == (0, 4, 6)
        assert (account.held_tokens, account.other_held_tokens) == (0, 500)


def test_an_account_grows_and_shrinks(tmp_path: Path) -> None:
    """Nothing of a longer record stands after a shorter one, and the file does not grow for ever."""
    usage = SharedUsage(str(tmp_path), 0)
    for used in (1 / 3, 0.0, 1e9 / 7, 2.0):
        with usage.account("alice") as account:
            account.tokens.used = used
        with usage.account("alice") as account:
            assert account.tokens.used == used
    assert (tmp_path / "alice").stat().st_size < 200


@pytest.mark.slow
def test_processes_that_count_at_once_lose_nothing(tmp_path: Path) -> None:
    """All together take as many as there are, to the last one."""
    limit = NUM_PROCESSES * TIMES // 2 + 1
    begun = takers(tmp_path, TIMES, limit)
    for each in begun:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    counts = [int(each.communicate(timeout=60)[0]) for each in begun]
    assert sum(counts) == limit
    record = json.loads((tmp_path / "alice").read_text())
    assert sum(samples for samples, _ in record["under_way"].values()) == limit
    with SharedUsage(str(tmp_path), 0).account("alice") as account:
        assert (account.requests.used, account.other_samples) == (limit, limit)


@pytest.mark.slow
async def test_a_process_that_is_killed_leaves_its_account_whole(tmp_path: Path) -> None:
    """In the middle of its counting, again and again: the others read it, and wait for no other."""
    usage = SharedUsage(str(tmp_path), 0)
    for _ in range(3):
        begun = takers(tmp_path, 10**9, 10**9)
        with usage.account("alice") as account:
            before = account.requests.used
        for each in begun:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()

        def are_counting(before: float = before) -> bool:
            with usage.account("alice") as account:
                return account.requests.used > before + 50

        await eventually(are_counting)
        for each in begun:
            each.kill()
            each.communicate(timeout=60)
        with usage.account("alice") as account:
            assert account.requests.used > before + 50
            assert account.other_samples > 0


# Takes a sample and a request for each line, and says what it has, and what it has of others.
TAKES_EACH = """
import sys
from gateway.keys.usage import SharedUsage

usage = SharedUsage(sys.argv[1], 1)
for _ in sys.stdin:
    with usage.account("alice") as account:
        account.samples += 1
        account.requests.take(1)
        print("has", account.samples, int(account.requests.used), flush=True)
"""


def test_a_full_disk_lets_each_count_for_itself(tmp_path: Path) -> None:
    """Nothing fails, nothing is forgotten, and the others hear of it when there is room again."""
    line = ("bash", "-c", 'ulimit -S -f 0; exec "$@"', "bash", sys.executable, "-c", TAKES_EACH, str(tmp_path))
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as taker:
        assert taker.stdin is not None
        assert taker.stdout is not None

        def take() -> str:
            assert taker.stdin is not None
            assert taker.stdout is not None
            taker.stdin.write("\n")
            taker.stdin.flush()
            # Between them are lines of the log.
            return next(line for line in taker.stdout if line.startswith("has"))

        assert [take(), take()] == ["has 1 1\n", "has 2 2\n"]
        assert (tmp_path / "alice").read_bytes() == b""
        resource.prlimit(taker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert take() == "has 3 3\n"
        with SharedUsage(str(tmp_path), 0).account("alice") as account:
            assert (account.other_samples, account.requests.used) == (3, 3)


def test_a_folder_that_is_gone_ends_no_request(tmp_path: Path) -> None:
    """A worker counts on for itself, and says so once; half a record counts as none."""
    folder = tmp_path / "folder"
    folder.mkdir()
    usage = SharedUsage(str(folder), 0)
    with usage.account("alice") as account:
        account.samples += 1
    (folder / "alice").write_bytes(b'{"requests": [1')
    with usage.account("alice") as account:
        assert account.samples == 1
    shutil.rmtree(folder)
    with capture_logs() as logs:
        for _ in range(2):
            with usage.account("alice") as account:
                account.samples += 1
        with usage.account("alice") as account:
            assert account.samples == 3
    assert [line["event"] for line in logs] == ["limits of keys are counted by each worker alone"]
