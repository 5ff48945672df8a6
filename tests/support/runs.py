"""A measured run with invented samples, to be followed by hand, and the training commands run as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.cli.bench.rounds.samples import (
    BARE,
    DRAFT,
    ENGINE,
    MEMORY,
    OPERATORS,
    PING,
    PLAIN,
    READ,
    TARGET,
    Measurements,
    ModelSize,
    RequestSample,
    RoundSample,
    TimeSample,
    fixed,
)
from outrider.cli.bench.rounds.summary import RoundsSummary

SIZES = {TARGET: ModelSize("big", step_bytes=200_000_000), DRAFT: ModelSize("small", step_bytes=2_000_000)}
STEP_MS = {(TARGET, 1): 10.0, (TARGET, 3): 11.0, (TARGET, 5): 12.0, (DRAFT, 1): 0.5, (DRAFT, 3): 0.6, (DRAFT, 5): 0.7}


def round_of(draft_count: int, num_tokens: int) -> RoundSample:
    """A round of 14.25 ms with 0.6 ms of overhead when it is speculative."""
    return RoundSample(
        num_tokens=num_tokens,
        draft_count=draft_count,
        accepted_count=num_tokens - 1,
        evaluated_count=min(num_tokens, draft_count),
        round_us=14_250,
        draft_queue_us=20,
        draft_compute_us=1_650,
        draft_wait_us=1_900,
        verify_queue_us=30,
        verify_compute_us=12_000,
        verify_wait_us=12_250,
        draft_bytes=90,
        verify_bytes=110,
    )


def request_of(setting: str, turn: int, decode_s: float, rounds: tuple[RoundSample, ...] = ()) -> RequestSample:
    """A request of 13 tokens, the first after a second."""
    return RequestSample(setting, turn, 0, 0.0, tuple(range(13)), 1.0 + decode_s, 1.0, rounds)


def summary() -> RoundsSummary:
    """Floors of 5 and 0.1 ms, pings of 0.2 ms each, K = 4 twice as fast as plain decoding, two turns."""
    found = Measurements()
    prompt, speculative = round_of(0, 1), round_of(4, 4)
    for turn, noise in ((1, 1.0), (2, 2.0)):
        found.times += [
            TimeSample(READ, TARGET, 5.0, num_bytes=200_000_000),
            TimeSample(READ, DRAFT, 0.1, num_bytes=2_000_000),
            TimeSample(READ, MEMORY, 25.0, num_bytes=10**9),
        ]
        found.times += [TimeSample(OPERATORS, role, 30.0, rows) for role in (TARGET, DRAFT) for rows in (1, 5)]
        found.times += [TimeSample(ENGINE, role, ms, rows) for (role, rows), ms in STEP_MS.items()]
        found.times += [TimeSample(PING, role, 0.2) for role in (TARGET, DRAFT)]
        # A noisy turn slows all settings down alike, so no ratio may show it.
        found.requests += [
            request_of(BARE, turn, 0.108 * noise),
            request_of(PLAIN, turn, 0.120 * noise, (prompt,) * 13),
            request_of(fixed(4), turn, 0.060 * noise, (prompt, *(speculative,) * 3)),
        ]
    return RoundsSummary(found, SIZES)


MODELS = Path(__file__).resolve().parents[2] / "models"
ROLES = ("target", "draft")
TINY = (
    "--preset", "tiny", "--threads", "1", "--checkpoint-every", "2",
    "--target-steps", "9", "--long-target-steps", "5", "--draft-steps", "7", "--long-draft-steps", "5",
)  # fmt: skip
TINY_HEAD = ("--preset", "tiny", "--threads", "1", "--checkpoint-every", "2", "--steps", "7", "--batch", "3")


def start_training(*options: str | Path, command: str = "train.py") -> subprocess.Popen[str]:
    """The command of models/ in a process of its own, with stdout and stderr in one pipe."""
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.Popen(
        [sys.executable, MODELS / command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def train(*options: str | Path, command: str = "train.py") -> tuple[int, str]:
    """Runs the command to its end; returns exit code and output."""
    with start_training(*options, command=command) as process:
        output, _ = process.communicate()
    return process.returncode, output


def weights(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of both models of a pair."""
    files = {role: load_file(out / role / "model.safetensors") for role in ROLES}
    return {f"{role} {name}": tensor for role, each in files.items() for name, tensor in each.items()}
