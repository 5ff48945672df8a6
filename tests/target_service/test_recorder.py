"""What a target keeps of answers for the training of its head: what the trainer reads, and nothing that is private."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.basics import check_empty, spec_of
from support.heads.untrained import write_untrained_head
from support.models.templated import templated
from support.models.tiny_models import write_tiny_model
from support.rest.rest_stack import CHAT, rest_stack
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, plain
from support.stack import TARGET, Answer, RunningStack, running_stack

from outrider.engine.batching import Feed
from outrider.engine.cache import KVCache
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb
from target_service import recorder
from target_service.recorder import Recorder, number_of, shards, versions
from target_service.server import TargetSettings
from target_service.sessions import TargetSessions
from training.stored import Material

TEXT = "The fox said to the wolf,"
WHOLE = 1 << 30


@pytest.fixture(scope="module", name="head")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained_head(Path(TARGET), tmp_path_factory.mktemp("heads") / "head")


@asynccontextmanager
async def recording(head: Path, folder: Path, **options: Any) -> AsyncIterator[RunningStack]:
    """A gateway and a target that records; whatever is pending is written when it has ended."""
    record = {"head": str(head), "record": str(folder), **options}
    async with running_stack(draft=None, target_options=record, gateway={"lookup": False}) as stack:
        yield stack


async def said(stack: RunningStack, **fields: Any) -> Answer:
    """An answer of 24 tokens."""
    fields = {"text": TEXT, "seed": 5, "temperature": 0.8, "max_tokens": 24, "ignore_eos": True, **fields}
    return await stack.generate(**fields)


async def test_a_recorded_answer_is_what_the_trainer_reads(head: Path, tmp_path: Path) -> None:
    """Its tokens, which of them were drawn, and for each the states that a forward of the whole text has."""
    async with recording(head, tmp_path / "kept", dtype="float32") as stack:
        answer = await said(stack)
        runner, taps = stack.target.runner, stack.target.runner.cache.taps
    material = Material.read(tmp_path / "kept", 1)
    assert tuple(material.token_ids[0, -24:].tolist()) == answer.token_ids
    assert material.is_answer[0].tolist() == [False] * (material.token_ids.shape[1] - 24) + [True] * 24
    assert taps == (1, 3, 5, 6)
    tokens = material.token_ids[0].tolist()
    session = runner.open(tokens, len(tokens))
    runner.forward([Feed(session)])
    rows = torch.from_numpy(session.table.slots(0, len(tokens) - 1))
    expected = runner.cache.features[rows].to(torch.bfloat16).float()
    session.free()
    found = torch.cat([material.states(name, torch.tensor([0]))[0] for name in ("taps", "normed")], 1)
    assert torch.equal(found[:-1], expected)
    # The last token was drawn and not read, and nothing is learnt after it.
    assert not found[-1].any()
    [file] = shards(tmp_path / "kept")
    assert load_file(file)["temperature"].item() == pytest.approx(0.8)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_what_is_private_leaves_nothing(head: Path, tmp_path: Path) -> None:
    """A salt, a constraint, a beam search, and a request that says so, over gRPC or as `store: false` over REST."""
    kept, target = tmp_path / "kept", {"head": str(head), "record": str(tmp_path / "kept")}
    (tmp_path / "tokenizer").mkdir()
    gateway = {"lookup": False, "tokenizer": templated(tmp_path / "tokenizer")}
    asked = {"max_tokens": 16, "ignore_eos": True}
    async with rest_stack(draft=None, target_options=target, gateway=gateway) as rest:
        stack = rest.stack
        await said(stack, cache_salt="mine")
        await said(stack, constraint=pb.Constraint(regex="[a-z ]{40,60}"), ignore_eos=False)
        await said(stack, unrecorded=True)
        await said(stack, beam_search=pb.BeamSearch(width=2), temperature=0.0)
        turn = {"messages": [{"role": "user", "content": TEXT}], **asked}
        await rest.ask(CHAT, **turn, store=False)
        await rest.ask("/v1/responses", input=TEXT, store=False, max_output_tokens=16)
        await rest.quiet()
        nothing = shards(kept)
        await rest.ask(CHAT, **turn)
        await rest.ask("/v1/responses", input=TEXT, max_output_tokens=16)
    assert nothing == []
    # The last two may be kept; that of the second may have ended early.
    assert 1 <= len(shards(kept)) <= 2
    assert int(load_file(shards(kept)[0])["is_answer"].sum()) == 16


Guessed = list[tuple[tuple[int, ...], list[int]]]


async def guessed(head: Path, **options: Any) -> Guessed:
    """Tokens of six answers, and all guesses that were refused on the way."""
    fields = {"drafter": "eagle3", "draft_count": 3, "return_rounds": True}
    found: Guessed = []
    async with running_stack(
        draft=None, target_options={"head": str(head), **options}, gateway={"lookup": False}
    ) as stack:
        for seed in range(6):
            answer = await said(stack, seed=seed, temperature=0.7 * (seed % 2), **fields)
            refused = [guess.token_id for each in answer.rounds for guess in each.rejected]
            found.append((answer.token_ids, refused))
    return found


async def test_answers_are_the_same_while_they_are_recorded(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token and guess for guess: the head reads its own of what is kept now. Where it reads another's, its
    guesses are others, and the answers the same.
    """
    plainly = await guessed(head)
    assert await guessed(head, record=str(tmp_path / "kept")) == plainly
    assert len(shards(tmp_path / "kept")) == 6
    columns = KVCache.columns
    monkeypatch.setattr(KVCache, "columns", lambda cache, taps: columns(cache, taps)[::-1].copy())
    planted = await guessed(head, record=str(tmp_path / "planted"))
    assert planted != plainly
    assert [tokens for tokens, _ in planted] == [tokens for tokens, _ in plainly]


@pytest.fixture(name="runner")
def own_runner(tmp_path: Path) -> Iterator[ModelRunner]:
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=VOCABULARY_SIZE, context_len=2048)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=8192)
    yield runner
    check_empty(runner.pool)


def answer_into(kept: Recorder, runner: ModelRunner, seed: int, length: int = 40) -> list[int]:
    """One answer up to a length, closed as its gateway would; returns its tokens."""
    target, spec = Target(runner), spec_of(PROMPT, length, seed=seed, eos=(), temperature=1.0)
    target.sessions = TargetSessions(runner, target.table, target.device.submit, record=kept.take)
    target.open(spec)
    target.run()
    while target.held.finish_reason is None:
        target.step(1, len(target.tokens), budget=64)
        target.run()
    tokens = list(target.tokens)
    target.table.close(target.fence(1, len(tokens)), target.answers)
    return tokens


def test_the_oldest_answers_go_when_the_folder_is_full(runner: ModelRunner, tmp_path: Path) -> None:
    """What is there never takes more than the limit, numbers go on after a restart, and a removed file is none."""
    kept = Recorder(tmp_path, WHOLE, runner, (1, 2))
    texts = [answer_into(kept, runner, 0)]
    kept.close()
    [size] = [path.stat().st_size for path in shards(tmp_path)]
    kept = Recorder(tmp_path, 3 * size + 100, runner, (1, 2))
    texts += [answer_into(kept, runner, seed) for seed in range(1, 6)]
    kept.close()
    assert [number_of(path) for path in shards(tmp_path)] == [3, 4, 5]
    assert [load_file(path)["token_ids"][0].tolist() for path in shards(tmp_path)] == texts[3:]
    shards(tmp_path)[1].unlink()
    kept = Recorder(tmp_path, 3 * size + 100, runner, (1, 2))
    answer_into(kept, runner, 6)
    kept.close()
    assert [number_of(path) for path in shards(tmp_path)] == [3, 5, 6]
    assert kept.num_dropped == 0


def test_an_answer_that_cannot_be_kept_is_answered_all_the_same(runner: ModelRunner, tmp_path: Path) -> None:
    """Larger than all that may be kept, on a disk that is full or gone, and while too much waits for the disk."""
    kept = Recorder(tmp_path / "kept", 1000, runner, (1, 2))
    spec = spec_of(PROMPT, 40, seed=0, eos=(), temperature=1.0)
    assert answer_into(kept, runner, 0) == plain(runner, spec)
    kept.close()
    assert (kept.num_dropped, shards(tmp_path / "kept")) == (1, [])
    kept = Recorder(tmp_path / "kept", WHOLE, runner, (1, 2))
    for path in (tmp_path / "kept").iterdir():
        path.unlink()
    (tmp_path / "kept").rmdir()
    assert answer_into(kept, runner, 0) == plain(runner, spec)
    kept.close()
    assert kept.num_dropped == 1


def test_little_waits_for_a_slow_disk(runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer whatever its size, and no second one that would be too much."""
    kept = Recorder(tmp_path, WHOLE, runner, (1, 2))
    monkeypatch.setattr(recorder, "MAX_PENDING_BYTES", 1)
    go_on, write = threading.Event(), kept._write
    monkeypatch.setattr(kept, "_write", lambda data: (go_on.wait(60), write(data)))
    first = answer_into(kept, runner, 0)
    answer_into(kept, runner, 1)
    go_on.set()
    kept.close()
    assert [load_file(path)["token_ids"][0].tolist() for path in shards(tmp_path)] == [first]
    assert kept.num_dropped == 1


def test_a_long_answer_is_cut_into_rows_of_the_trainer(runner: ModelRunner, tmp_path: Path) -> None:
    """Each of at most 512 tokens, all of the answer in them, and as much before it as there is room for."""
    kept = Recorder(tmp_path, WHOLE, runner, (1, 2))
    tokens = answer_into(kept, runner, 0, 1100)
    kept.close()
    rows = [load_file(path) for path in shards(tmp_path)]
    assert [row["token_ids"].shape[1] for row in rows] == [512, 512, 76]
    assert [token for row in rows for token in row["token_ids"][0].tolist()] == tokens
    assert sum(int(row["is_answer"].sum()) for row in rows) == 1100 - len(PROMPT)


def test_a_folder_belongs_to_one_target(runner: ModelRunner, tmp_path: Path) -> None:
    """At a time, and for all answers in it, whatever taps they have."""
    kept = Recorder(tmp_path, WHOLE, runner, (1, 2))
    with pytest.raises(InvalidRequest, match="that no other target records into"):
        Recorder(tmp_path, WHOLE, runner, (1, 2))
    kept.close()
    with pytest.raises(InvalidRequest, match="must be empty, or have answers of tiny with the taps"):
        Recorder(tmp_path, WHOLE, runner, (0, 2))
    (tmp_path / recorder.FACTS).write_text("{")
    with pytest.raises(InvalidRequest, match="must be empty, or have answers of tiny"):
        Recorder(tmp_path, WHOLE, runner, (1, 2))


def test_nothing_is_recorded_without_a_head(tmp_path: Path) -> None:
    """Whose taps and whose training it would be for."""
    with pytest.raises(InvalidRequest, match=r"--record is '.*kept', but must be empty without --head"):
        TargetSettings(TARGET, record=str(tmp_path / "kept"))


DYING = """
import builtins, os, signal, sys
from pathlib import Path
from outrider.engine.runner import ModelRunner
from target_service import recorder
from test_recorder import WHOLE, answer_into

class Dying:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def write(self, data):
        if "002" in self.file_name():
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.write(data)
    def file_name(self):
        return os.readlink(f"/proc/self/fd/{self.file.fileno()}")

recorder.open = lambda *arguments: Dying(builtins.open(*arguments))
model, folder = sys.argv[1:]
runner = ModelRunner.load(model, dtype="float32", kv_tokens=8192)
kept = recorder.Recorder(Path(folder), WHOLE, runner, (1, 2))
for seed in range(4):
    answer_into(kept, runner, seed)
kept.close()
"""


@pytest.mark.slow
def test_a_killed_target_leaves_whole_files(runner: ModelRunner, tmp_path: Path) -> None:
    """Killed with half of an answer written: those before it are whole, and the next start removes the half."""
    kept = tmp_path / "kept"
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", DYING, str(tmp_path / "tiny"), str(kept)]
    ended = subprocess.run(words, env=os.environ | paths, cwd=Path(__file__).parent, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in kept.glob("*.partial")] == ["shard-002.safetensors.partial"]
    assert [load_file(path)["token_ids"].shape for path in shards(kept)] == [(1, 40)] * 2
    again = Recorder(kept, WHOLE, runner, (1, 2))
    tokens = answer_into(again, runner, 9)
    again.close()
    assert not [*kept.glob("*.partial")]
    assert [number_of(path) for path in shards(kept)] == [0, 1, 2]
    assert load_file(shards(kept)[2])["token_ids"][0].tolist() == tokens


def test_the_newest_version_has_the_highest_number(tmp_path: Path) -> None:
    """Also from the thousandth on; one that is being written, or has another name, is none."""
    for name in ("version-1000", "version-999", "version-001", "version-1001.partial", "version-x1"):
        (tmp_path / name).mkdir()
    assert [path.name for path in versions(tmp_path)] == ["version-001", "version-999", "version-1000"]
