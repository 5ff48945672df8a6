"""However the tests are started, their children have all signals of a terminal; and shares of them are all of them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import IGNORED_VARIABLE, SHARE_VARIABLE, share_of

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGUSR1}
ASK = f"""
import signal
numbers = {sorted(map(int, SIGNALS))}
held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
ignored = int(status["SigIgn"], 16)
print([n for n in numbers if n in held or (ignored >> n - 1 & 1 and n != signal.SIGPIPE)])
"""


def test_children_have_the_signals_of_a_terminal() -> None:
    """None is ignored or blocked; what the run itself ignores ends it as little as before."""
    for number in os.environ[IGNORED_VARIABLE].split():
        signal.raise_signal(int(number))
    ended = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


BLOCK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_what_takes_signals_gives_them_back_to_the_run() -> None:
    """An event loop that was asked for Ctrl-C leaves Python's own handler, until the next test begins."""
    with asyncio.Runner() as runner:
        runner.get_loop().add_signal_handler(signal.SIGINT, lambda: None)
        runner.get_loop().remove_signal_handler(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_run_ignores_what_it_did_before() -> None:
    """After that one too."""
    for number in os.environ[IGNORED_VARIABLE].split():
        assert signal.getsignal(int(number)) is not signal.default_int_handler


@pytest.mark.slow
def test_a_run_in_the_background_changes_nothing() -> None:
    """Ignored as nohup and `&` in a script have it, or blocked, for the run itself and for its workers."""
    chosen = (
        test_what_takes_signals_gives_them_back_to_the_run,
        test_the_run_ignores_what_it_did_before,
        test_children_have_the_signals_of_a_terminal,
    )
    inner = [f"{Path(__file__)}::{test.__name__}" for test in chosen]
    # Without the plugins of every other package, which take seconds to import.
    plugins = [word for name in ("xdist", "pytest_timeout", "pytest_asyncio") for word in ("-p", name)]
    pytest_itself = (sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "-n", "1", *inner)
    environment = {key: value for key, value in os.environ.items() if key != IGNORED_VARIABLE}
    ended = subprocess.run(
        ["sh", "-c", 'trap "" INT QUIT HUP TERM; exec "$@"', "sh", sys.executable, "-c", BLOCK, *pytest_itself],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout


@pytest.mark.parametrize("num_shares", [1, 3])
def test_every_file_is_in_one_share(num_shares: int) -> None:
    """What one commit has no time for is run at another one; and a share that is asked for is what is collected."""
    folder = Path(__file__).parent
    expected = {path.name for path in folder.glob("test_*.py") if share_of(path, num_shares) == 1}
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", str(folder)]
    environment = {**os.environ, SHARE_VARIABLE: f"1/{num_shares}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder.parents[1])
    assert {Path(line.partition("::")[0]).name for line in ended.stdout.splitlines() if "::" in line} == expected
    assert (expected != {path.name for path in folder.glob("test_*.py")}) == (num_shares > 1)
