"""Tests of bench.keys: what its table says, and one real run."""

import subprocess
import sys

import pytest

from bench.keys import REQUESTS, Found, render

COMMAND = (sys.executable, "-P", "-m", "bench.keys")


def test_each_request_is_compared_with_the_new_one_of_its_turn() -> None:
    """A turn that was slow for all changes no ratio."""
    text = render(
        {name: [Found(scale * (index + 1), 16 * index) for scale in (1, 10)] for index, name in enumerate(REQUESTS)}
    )
    assert "| new | 5.5 (3.2 to 7.8) | 1.000 (1.000 to 1.000) | 0 to 0 |" in text
    assert "| another key | 16.5 (9.8 to 23.2) | 3.000 (3.000 to 3.000) | 32 to 32 |" in text


@pytest.mark.slow
def test_another_key_finds_nothing() -> None:
    """With the embedded pair: a key finds what it has asked itself, and no other's."""
    options = ("--turns", "2", "--prompt-tokens", "256")
    ended = subprocess.run((*COMMAND, *options), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ")][2:]
    cached = {row[0]: row[-1] for row in rows}
    assert [cached[name] for name in REQUESTS] == ["0 to 0", "240 to 240", "0 to 0", "0 to 0"]
