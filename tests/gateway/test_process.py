"""The gateway as a process: its line on stdout, its end, its exit codes, and what it never imports."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from support.basics import eventually
from support.keys import write_keys
from support.services.markov import MarkovModel
from support.services.markov_services import TargetServicer, serving

from gateway import server
from outrider.cli.up import memory_bytes
from outrider.model_files.vocabulary import Vocabulary
from outrider.v1 import model_service_pb2 as model_pb

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
# Runs the module as `python -m gateway` does, and prints at the end which forbidden modules the process has loaded.
WATCHED = """
import os, runpy, sys
leave = os._exit
def tell(code):
    heavy = {"torch", "transformers", "safetensors"} | {"outrider.engine"}
    # Not to sys.stdout, which the process has finished.
    os.write(1, f"heavy: {sorted(heavy & set(sys.modules))}\\n".encode())
    os.write(1, f"serving: {sorted({'fastapi', 'tokenizers', 'uvicorn'} & set(sys.modules))}\\n".encode())
    leave(code)
os._exit = tell
runpy.run_module("gateway", run_name="__main__")
"""


async def gateway_process(target: str, *flags: str) -> asyncio.subprocess.Process:
    """A gateway on a free port that ends with its stdin."""
    pipe = asyncio.subprocess.PIPE
    words = ("--target", target, "--tokenizer", TOKENIZER, "--listen", "127.0.0.1:0", "--stop-with-stdin", *flags)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", WATCHED, *words, stdin=pipe, stdout=pipe, stderr=pipe
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "serving_with"), [(1, ["fastapi", "tokenizers", "uvicorn"]), (2, [])])
async def test_says_where_it_listens_and_ends_with_its_stdin(workers: int, serving_with: list[str]) -> None:
    """One line of JSON when it serves, exit code 0 when stdin ends, and nothing heavy was ever imported.

    The parent of workers does not even import what they serve with.
    """
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(TOKENIZER).digests)
    target.vocabulary_size = 4096
    async with serving(target) as address:
        process = await gateway_process(address, "--rest-listen", "127.0.0.1:0", "--workers", str(workers))
        assert process.stdout is not None
        event = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        assert event["event"] == "listening"
        assert event["address"].startswith("127.0.0.1:")
        output, _ = await asyncio.wait_for(process.communicate(b""), 120)
        assert output.decode() == f"heavy: []\nserving: {serving_with}\n"
        assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "flags", "code", "words"),
    [
        (model_pb.SERVICE_ROLE_TARGET, (), 78, "does not fit the tokenizer"),
        (model_pb.SERVICE_ROLE_DRAFT, (), 78, "but a target service is wanted there"),
        (None, ("--target-wait-seconds", "0.1"), 69, "did not answer within 0.1 seconds"),
    ],
)
async def test_exits_with_one_sentence(role: int | None, flags: tuple[str, ...], code: int, words: str) -> None:
    """A target that does not fit, is a draft, or is not there ends the start with the error's code and sentence."""
    target = TargetServicer(role or model_pb.SERVICE_ROLE_TARGET, MarkovModel(), (1, 2, 3, 4))
    target.vocabulary_size = 4096
    async with serving(target) as address:
        process = await gateway_process("127.0.0.1:1" if role is None else address, *flags)
        _, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == code
        assert words in errors.decode().splitlines()[-1]


async def test_memory_that_large_requests_took_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what lies in pieces below what is in use, which the C library would keep."""
    monkeypatch.setattr(server, "GIVE_BACK_S", 0.0)
    pieces = [b"x" * (60_000 + number % 7) for number in range(4_000)]
    full, kept = memory_bytes(os.getpid()) or 0, pieces[::100]
    del pieces
    giving = asyncio.create_task(server.give_back_memory())
    await eventually(lambda: (memory_bytes(os.getpid()) or 0) < full - 200_000_000)
    giving.cancel()
    assert len(kept) == 40


@pytest.mark.slow
async def test_workers_without_a_folder_for_their_counts_say_which_variable_helps(tmp_path: Path) -> None:
    """Where no temporary folder can be written, a sentence and 74 is all."""
    keys = write_keys(tmp_path / "keys.toml", alice={})
    words = ("--target", "127.0.0.1:1", "--tokenizer", TOKENIZER, "--listen", "127.0.0.1:0", "--rest-listen", "")
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-m", "gateway", *words),
        *("--workers", "2", "--api-keys", keys),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 120)
    [sentence] = errors.decode().splitlines()
    assert process.returncode == 74
    assert "No usable temporary directory found" in sentence
    assert sentence.endswith("Set TMPDIR to a folder that can be written.")
