"""A real run of bench.cascade with the embedded draft: a row for each text and variant, proposals all the same."""

import subprocess
import sys

COMMAND = (sys.executable, "-P", "-m", "bench.cascade")


def test_a_real_run() -> None:
    """Whatever guesses; a guesser that is always wrong saves no forward."""
    options = ("--texts", "1", "--counts", "4", "--cascade", "lookup", "useless", "models/draft+lookup")
    ended = subprocess.run((*COMMAND, *options), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines() if line.startswith("| 4")]
    assert len(rows) == 2 * 4
    forwards = {(kind, name): float(count) for _, kind, name, _, count, *_ in rows}
    for kind in ("story", "repeated"):
        assert forwards[kind, "alone"] == forwards[kind, "useless"] == 4
