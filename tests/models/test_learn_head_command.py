"""A head that learns from what its target has answered: published where it is better beyond doubt, and then served."""

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.heads.untrained import write_untrained_head
from support.runs import start_training, train
from support.stack import TARGET, running_stack

from outrider.cli.bench.common import OPENINGS
from outrider.errors import InvalidRequest
from target_service.recorder import number_of, shards, versions
from target_service.server import TargetSettings, start
from training.head_files import HeadFiles
from training.idle import BlocksWhenIdle, IdleMachine
from training.model import trained_model
from training.online import Gain, check_record, different, gain_of, linked

# It waits for a machine with nothing else to do, and beside other tests that takes most of ten minutes.
pytestmark = [pytest.mark.slow, pytest.mark.grid]

COMMAND = "learn_head.py"
NUM_ANSWERS = 40
SHORT = ("--steps", "80", "--new-answers", "16", "--busy-share", "1", "--batch", "3", "--learning-rate", "1e-2")


async def record(head: Path, folder: Path) -> None:
    """Stories of the embedded target, greedy and drawn ones by turns."""
    options = {"head": str(head), "record": str(folder)}
    async with running_stack(draft=None, target_options=options, gateway={"lookup": False}) as stack:
        for seed in range(NUM_ANSWERS):
            fields: dict[str, Any] = {"seed": seed, "temperature": 0.7 * (seed % 2), "max_tokens": 64}
            await stack.generate(text=OPENINGS[seed % len(OPENINGS)], ignore_eos=True, **fields)


@pytest.fixture(scope="module", name="served")
def own_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained_head(Path(TARGET), tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(scope="module", name="recorded")
def own_answers(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "answers"
    asyncio.run(record(served, folder))
    return folder


def options_of(served: Path, recorded: Path, out: Path, *options: str) -> list[str | Path]:
    return ["--target", TARGET, "--head", served, "--record", recorded, "--out", out, *SHORT, *options]


@pytest.fixture(scope="module", name="learnt")
def own_versions(served: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of an unbroken run, and what it said."""
    out = tmp_path_factory.mktemp("learnt") / "out"
    code, output = train(*options_of(served, recorded, out), command=COMMAND)
    assert code == 0, output
    return out, output


def test_a_better_head_is_published(learnt: tuple[Path, str], recorded: Path) -> None:
    """In the form of the head that it was, and said with how much better it is; what it was made of is gone."""
    out, output = learnt
    assert [path.name for path in versions(out)] == ["version-001"]
    assert "version 1 is published: +" in output
    assert f"learn-1: 80 steps of 3 of {NUM_ANSWERS - 8} answers" in output
    assert "0 new answers of 16 for the next version" in output
    assert sorted(path.name for path in (out / "training").iterdir()) == [
        "checkpoint.pt",
        "tokenizer.json",
        "version-1.pt",
    ]
    assert len(shards(recorded)) == NUM_ANSWERS


async def test_a_learnt_head_guesses_beside_the_one_it_was(learnt: tuple[Path, str], served: Path) -> None:
    """Under the name of its weights; tokens are plain decoding's, and more of its guesses are kept."""
    options = {"head": str(served), "learnt": str(learnt[0])}
    async with running_stack(draft=None, target_options=options, gateway={"lookup": False}) as stack:
        offers = {each.name: each.model_hash for each in (await stack.info(stack.target)).drafter_offers}
        first, second = offers
        assert (first, second) == ("eagle3", f"learnt-{offers[second][:8]}")
        kept = dict.fromkeys(offers, 0)
        for seed in range(6):
            fields = {"text": OPENINGS[seed], "seed": seed, "temperature": 0.7, "max_tokens": 48}
            plain = await stack.generate(enabled=False, **fields)
            for name in offers:
                answer = await stack.generate(drafter=name, draft_count=3, return_rounds=True, **fields)
                assert answer.token_ids == plain.token_ids
                tokens = [token for each in answer.rounds for token in each.tokens]
                assert {token.drafter for token in tokens} <= {name, ""}
                kept[name] += sum(token.drafter == name for token in tokens)
            # Whichever it takes of the two.
            assert (await stack.generate(**fields)).token_ids == plain.token_ids
        assert kept[second] > kept[first] + 10


async def test_a_broken_version_is_left_out(learnt: tuple[Path, str], served: Path, tmp_path: Path) -> None:
    """The target starts with its head, whether the newest version is cut, empty or of nothing yet."""
    cut, none = tmp_path / "cut", tmp_path / "none"
    shutil.copytree(learnt[0] / "version-001", cut / "version-002")
    weights = cut / "version-002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (cut / "version-003.partial").mkdir()
    none.mkdir()
    for folder in (cut, none):
        running = await start(TargetSettings(TARGET, "127.0.0.1:0", head=str(served), learnt=str(folder), threads=1))
        assert list(running.facts.drafters) == ["eagle3"]
        await running.stop(0)
    with pytest.raises(InvalidRequest, match=r"--learnt is .*, but must be empty without --head"):
        TargetSettings(TARGET, learnt=str(none))


def test_what_is_no_better_is_not_published(served: Path, recorded: Path, tmp_path: Path) -> None:
    """A step of next to nothing; and its answers are not learnt a second time."""
    options = options_of(served, recorded, tmp_path / "out", "--steps", "1", "--learning-rate", "1e-7")
    code, output = train(*options, command=COMMAND)
    assert code == 0, output
    assert "version 1 is not published: " in output
    assert not versions(tmp_path / "out")
    code, output = train(*options, command=COMMAND)
    assert (code, "version" in output.splitlines()[0]) == (0, True)
    assert "0 new answers of 16 for the next version" in output


def test_a_killed_run_goes_on_to_the_same_weights(
    learnt: tuple[Path, str], served: Path, recorded: Path, tmp_path: Path
) -> None:
    """Killed between two checkpoints, while its target has thrown all those answers away since."""
    answers, out = tmp_path / "answers", tmp_path / "out"
    shutil.copytree(recorded, answers)
    options = options_of(served, answers, out)
    with start_training(*options, command=COMMAND) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("learn-1: step 10,"):
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    for path in shards(answers):
        path.unlink()
    code, output = train(*options, command=COMMAND)
    assert code == 0, output
    assert "learn-1: step 10," not in output
    ours, theirs = (load_file(each / "version-001" / "model.safetensors") for each in (out, learnt[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_versions_follow_one_another(learnt: tuple[Path, str], served: Path, recorded: Path, tmp_path: Path) -> None:
    """The next one begins with the last, learns from what has come since too, and is compared with both."""
    answers, out = tmp_path / "answers", tmp_path / "out"
    shutil.copytree(recorded, answers)
    shutil.copytree(learnt[0], out)
    last = number_of(shards(answers)[-1])
    for number, path in enumerate(shards(recorded)[:16], last + 1):
        shutil.copy(path, answers / f"shard-{number:03}.safetensors")
    code, output = train(*options_of(served, answers, out), command=COMMAND)
    assert code == 0, output
    [line] = [line for line in output.splitlines() if line.startswith("version 2 is ")]
    assert " of head, " in line
    assert line.endswith(" of version-001")


@pytest.mark.parametrize(
    ("rounds", "weights", "wanted"),
    [
        ([(1.5, 1.6), (1.7, 1.8)], [10, 30], Gain(1.65, 0.1, 0.0)),
        ([(1.0, 1.4), (1.0, 0.8)], [1, 1], Gain(1.0, 0.1, 0.3 * 2**0.5 / 2)),
    ],
)
def test_a_gain_is_known_with_its_doubt(
    rounds: Sequence[tuple[float, float]], weights: Sequence[int], wanted: Gain
) -> None:
    """Long texts count more, and texts that disagree make it doubtful."""
    assert gain_of(rounds, weights) == pytest.approx(wanted)
    assert Gain(1.5, 0.1, 0.04).is_sure
    assert not Gain(1.5, 0.1, 0.06).is_sure
    assert not Gain(1.5, 0.014, 0.001).is_sure


def test_training_waits_for_an_idle_machine(tmp_path: Path) -> None:
    """As long as others take more than their share of what there was since the last look; what is niced is no other."""
    stat, waits = tmp_path / "stat", []
    looks = iter(["cpu 50 900 0 50 0 0 0 0", "cpu 60 1800 10 1000 30 0 0 0"])
    stat.write_text("cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0\n")

    def pause(seconds: float) -> None:
        waits.append(seconds)
        stat.write_text(next(looks))

    machine = IdleMachine(0.25, stat, pause)
    stat.write_text("cpu 40 40 10 10 0 0 0 0")
    machine.wait()
    assert len(waits) == 1

    class Steps:
        def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([step]), torch.tensor([len(waits)])

    stat.write_text("cpu 1050 900 0 50 0 0 0 0")
    assert [int(each) for each in BlocksWhenIdle(Steps(), machine).at(7)] == [7, 2]
    IdleMachine(0.25, tmp_path / "none", pause).wait()


def test_answers_and_heads_of_others_are_refused(served: Path, recorded: Path, tmp_path: Path) -> None:
    """Another target's, other taps, no folder of answers at all; a head of another law, and no head."""
    with pytest.raises(InvalidRequest, match=r"its model_hash is .* and not 'other'"):
        check_record(recorded, "other", (1, 3, 5))
    with pytest.raises(InvalidRequest, match="a folder that a target records into"):
        check_record(tmp_path, "other", (1, 3, 5))
    config = trained_model("--target", Path(TARGET)).config
    other = tmp_path / "other"
    shutil.copytree(served, other)
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"fc_norm": false', '"fc_norm": true'))
    with pytest.raises(InvalidRequest, match="whose fc_norm differs"):
        HeadFiles.read(other, config)
    with pytest.raises(InvalidRequest, match=r"an eagle3 head as models/train_head\.py writes it"):
        HeadFiles.read(tmp_path, config)


def test_what_is_held_out_has_not_been_learnt(served: Path, recorded: Path, tmp_path: Path) -> None:
    """Of equal answers the newest alone counts; where too few are left there is no version."""
    answers = tmp_path / "answers"
    shutil.copytree(recorded, answers)
    first, second, *others = shards(answers)
    for path in others:
        path.unlink()
    for number in range(2, 18):
        shutil.copy(first, answers / f"shard-{number:03}.safetensors")
    assert [number_of(path) for path in different(shards(answers))] == [1, 17]
    assert number_of(second) == 1
    code, output = train(*options_of(served, answers, tmp_path / "out"), command=COMMAND)
    assert code == 0, output
    assert "version 1 is not published: only 2 answers differ" in output
    assert not versions(tmp_path / "out")


def test_what_is_learnt_from_takes_no_second_place(recorded: Path, tmp_path: Path) -> None:
    """Files are linked, and one that is gone meanwhile is none."""
    linked([*shards(recorded)[:2], recorded / "shard-999.safetensors"], tmp_path / "texts")
    assert [path.stat().st_nlink for path in shards(tmp_path / "texts")] in ([2, 2], [1, 1])
