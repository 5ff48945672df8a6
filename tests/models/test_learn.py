"""A stage learns what it is given, and ends with the same weights wherever it was stopped."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import training
from training.data import IGNORED, TrainingBlocks
from training.learn import FINAL_RATE, Diverged, Lesson, Stage, distillation, learn, next_token, rate
from training.model import PRESETS, new_model
from training.storage import Storage, write_whole

TOKENS = torch.randint(300, (600,), generator=torch.Generator().manual_seed(2))
STAGE = Stage("target-long", 6, 3e-3, ((1, 128), (2, 32)))
MODEL = new_model(PRESETS["tiny"], "target", 3)


class Killed(Exception):
    """Stands for the end of the process."""


def lessons() -> list[Lesson]:
    """Long blocks of the text, and short ones of a teacher."""
    teacher = new_model(PRESETS["tiny"], "target", 9).requires_grad_(False)
    return [
        (TrainingBlocks(TOKENS, TOKENS, 128, 1, "long"), next_token),
        (TrainingBlocks(TOKENS, TOKENS, 32, 2, "short"), distillation(teacher)),
    ]


def learnt(storage: Storage, *, killed_after: int | None = None) -> nn.Module:
    """The model after the stage, or as far as it came."""

    def report(step: int, loss: float) -> None:
        assert math.isfinite(loss)
        if step == killed_after:
            raise Killed

    model = copy.deepcopy(MODEL)
    learn(STAGE, model, lessons(), storage, report)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 1])
def test_a_stage_ends_alike_wherever_it_was_stopped(tmp_path: Path, every: int) -> None:
    """Bit-equal weights after a stop after any step; without the optimisers' state they would differ."""
    (tmp_path / "whole" / "training").mkdir(parents=True)
    whole = learnt(Storage(tmp_path / "whole", 100)).state_dict()
    for step in range(1, STAGE.steps):
        storage = Storage(tmp_path / str(step), every)
        storage.folder.mkdir(parents=True)
        with pytest.raises(Killed):
            learnt(storage, killed_after=step)
        resumed = learnt(storage).state_dict()
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    forgetful = Storage(tmp_path / "4", every)
    kept = forgetful.checkpoint(STAGE.name)
    assert kept is not None
    fresh = [{**state, "state": {}} for state in kept["optimisers"]]
    forgetful.save_checkpoint(STAGE.name, 4, {"model": kept["model"], "optimisers": fresh})
    planted = learnt(forgetful).state_dict()
    assert not all(torch.equal(tensor, planted[name]) for name, tensor in whole.items())


def test_a_checkpoint_belongs_to_its_stage(tmp_path: Path) -> None:
    """Another stage begins at its beginning."""
    storage = Storage(tmp_path, 1)
    storage.folder.mkdir()
    storage.save_checkpoint("target", 5, {})
    assert storage.checkpoint("draft") is None
    assert storage.checkpoint("target") == {"stage": "target", "step": 5}


def test_a_write_that_dies_leaves_the_old_file(tmp_path: Path) -> None:
    """And the next write does not mind what was left."""

    def die(path: Path) -> None:
        path.write_text("half")
        raise Killed

    write_whole(tmp_path / "file", lambda path: path.write_text("old") and None)
    with pytest.raises(Killed):
        write_whole(tmp_path / "file", die)
    assert (tmp_path / "file").read_text() == "old"
    write_whole(tmp_path / "file", lambda path: path.write_text("new") and None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_loss_that_is_no_number_ends_the_stage(tmp_path: Path) -> None:
    """With one sentence that names the stage and the step."""

    def broken(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token(model, inputs, targets) * math.nan

    lesson = (TrainingBlocks(TOKENS, TOKENS, 32, 2, "short"), broken)
    with pytest.raises(Diverged, match="stage target-long is nan at step 1"):
        learn(STAGE, copy.deepcopy(MODEL), [lesson], Storage(tmp_path, 1), lambda *_: None)


def test_the_rate_rises_holds_and_falls() -> None:
    """From nearly nothing to all, and to a small share at the last step."""
    rates = [rate(step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:50] == [1.0] * 40
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(FINAL_RATE)


@pytest.mark.parametrize("kind", ["text", "teacher"])
def test_ignored_targets_teach_nothing(kind: str) -> None:
    """Neither the text's loss nor the teacher's depends on what stands at their places."""
    model = copy.deepcopy(MODEL)
    loss = next_token if kind == "text" else distillation(new_model(PRESETS["tiny"], "target", 9))
    inputs, targets = TOKENS[:64].view(2, 32), TOKENS[1:65].clone().view(2, 32)
    targets[:, 8:] = IGNORED
    short = loss(model, inputs[:, :8], targets[:, :8])
    torch.testing.assert_close(loss(model, inputs, targets), short, rtol=1e-3, atol=0)


def test_a_copy_has_nothing_to_learn_from_its_original() -> None:
    """The gradient of the distillation is that of a divergence: it vanishes between equals."""
    model = copy.deepcopy(MODEL)
    inputs, targets = TOKENS[:64].view(2, 32), TOKENS[1:65].view(2, 32)
    distillation(copy.deepcopy(model))(model, inputs, targets).backward()
    own = max(float(each.grad.abs().max()) for each in model.parameters() if each.grad is not None)
    model.zero_grad()
    distillation(new_model(PRESETS["tiny"], "target", 9))(model, inputs, targets).backward()
    other = max(float(each.grad.abs().max()) for each in model.parameters() if each.grad is not None)
    assert own < 0.01 * other


def test_shapes_that_come_once_are_not_kept() -> None:
    """Of what oneDNN compiles for each shape as much as a step needs, unless the environment says otherwise."""
    words = (sys.executable, "-c", "import training, os; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])")
    names = {"PYTHONPATH": str(Path(training.__file__).parents[1])}
    for environment, capacity in ((names, "160"), ({**names, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}, "7")):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{capacity}\n"
