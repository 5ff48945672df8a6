"""Tests of bench.tls: who has which certificate, what belongs to a round, and one real run."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.tls import PLAINTEXT, SECURED, costs, launched, render
from outrider.client import Round, RoundFacts
from outrider.process.children import Launch

COMMAND = (sys.executable, "-P", "-m", "bench.tls")


def test_only_the_secured_stack_has_certificates() -> None:
    """Each process its own, and services ask for those of clients; the two stacks have other names."""
    for role, prefix, ca in (("draft", "--tls", "--tls-client-ca"), ("gateway", "--service-tls", "--service-tls-ca")):
        launch = Launch(role, ("python", "-m", role))
        plaintext, secured = (launched(launch, way, Path("made")) for way in (PLAINTEXT, SECURED))
        assert plaintext.command == launch.command
        assert plaintext.name != secured.name
        words = secured.command[len(launch.command) :]
        assert dict(zip(words[::2], words[1::2], strict=True)) == {
            ca: f"made/{role}/ca.crt",
            f"{prefix}-cert": f"made/{role}/tls.crt",
            f"{prefix}-key": f"made/{role}/tls.key",
        }


def test_what_services_computed_is_taken_off_rounds_with_guesses() -> None:
    """Of the rounds after the first, which reads the prompt; plain ones were computed before they were asked for."""
    plain = RoundFacts(round_us=900, verify_compute_us=2000)
    asked = [
        RoundFacts(draft_count=4, round_us=each, draft_compute_us=300, verify_compute_us=500) for each in (900, 1400)
    ]
    rounds = [Round((), "", facts=each) for each in (RoundFacts(round_us=10**6), plain, *asked)]
    assert costs(rounds, 0.006) == pytest.approx({"round": 2.0, "round without computing": 0.35})
    assert costs(rounds[:2], 0.006) == pytest.approx({"round": 6.0})


def test_figures_are_those_of_neighbours() -> None:
    """A turn that was slow for both changes neither ratio nor difference."""
    text = render({"K = 4, round": {PLAINTEXT: [2.0, 4.0, 40.0], SECURED: [2.2, 4.4, 44.0]}})
    assert "| K = 4, round | 4.000 (3.000 to 22.000) | 4.400 (3.300 to 24.200) | 1.100 (1.100 to 1.100) | 400" in text


@pytest.mark.slow
def test_both_ways_answer_side_by_side() -> None:
    """With the embedded pair, and the same tokens: a row for each setting, and one for what is no computing."""
    options = ("--turns", "2", "--tokens", "16")
    ended = subprocess.run((*COMMAND, *options), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Tokens were equal both ways" in ended.stdout
    rows = [line.split(" | ")[0] for line in ended.stdout.splitlines() if line.startswith("| ")][2:]
    assert rows == ["| plain, round", "| K = 4, round", "| K = 4, round without computing"]
