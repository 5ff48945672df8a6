"""The names of sized models, their presets, and where the model inside lies."""

from pathlib import Path

import pytest

from outrider import model_names
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.weights import expected_shapes
from outrider.errors import ModelRefused
from outrider.model_names import CONTEXT_LEN, MAX_SEED, PRESETS, VOCAB_SIZE, SizedModel, parse, tokenizer_source


def test_a_bare_preset_belongs_to_the_role_first() -> None:
    """1b is a target and a draft; other sizes exist once, and an explicit name means the same to everyone."""
    assert parse("sized:1b") == SizedModel("target", "1b")
    assert parse("sized:1b", "draft") == SizedModel("draft", "1b")
    assert parse("sized:10m", "target") == SizedModel("draft", "10m")
    assert parse("sized:target-1b@7", "draft") == SizedModel("target", "1b", 7)


@pytest.mark.parametrize("model", ["sized:target-1b", "sized:draft-10m@9", f"sized:target-200m@{MAX_SEED}"])
def test_explicit_names_come_back(model: str) -> None:
    """A name that went through a service means the same model."""
    found = parse(model)
    assert found is not None
    assert found.name == model


def test_other_models_are_not_sized() -> None:
    """Folders and hub ids are left alone, by the tokenizer's place too."""
    for model in ("models/target", "someone/sized:200m", "./sized:200m", "sized"):
        assert parse(model) is None
        assert tokenizer_source(model) == model


@pytest.mark.parametrize("model", ["sized:", "sized:7b", "sized:draft-200m", "sized:200M", "sized:200m/x", "sized:-1b"])
def test_unknown_presets_are_refused_with_the_list(model: str) -> None:
    """The operator sees every preset, and the process ends with 78."""
    with pytest.raises(ModelRefused, match=r"200m, 1b, 3b, 8b, 32b for a target and 10m, 100m, 600m, 1b") as refusal:
        parse(model)
    assert refusal.value.exit_code == 78
    assert model in refusal.value.message


@pytest.mark.parametrize("seed", ["", "x", "-1", "1.5", str(MAX_SEED + 1)])
def test_a_wrong_seed_is_refused(seed: str) -> None:
    """Instead of being ignored."""
    with pytest.raises(ModelRefused, match=r"no seed behind @"):
        parse(f"sized:200m@{seed}")


@pytest.mark.parametrize("model", [f"sized:{role}-{preset}" for role, presets in PRESETS.items() for preset in presets])
def test_every_preset_holds_its_model_and_has_its_count(model: str) -> None:
    """The embedded model fits, and the number of parameters is that of the tensors."""
    sized, config = parse(model), find_checkpoint(model).config
    assert sized is not None
    shapes = expected_shapes(config).values()
    count = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)
    assert sized.shape.parameter_count == count
    assert (config.vocab_size, config.context_len) == (VOCAB_SIZE, CONTEXT_LEN)


def test_a_missing_model_inside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was looked for, and who needs it."""
    monkeypatch.setattr(model_names, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelRefused, match=r"no embedded draft model in .*; sized:10m is made of it"):
        tokenizer_source("sized:10m")


def test_the_working_directory_may_hold_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose working directory is / and whose models are mounted at /models."""
    repository = model_names.REPOSITORY
    monkeypatch.setattr(model_names, "REPOSITORY", tmp_path / "site-packages")
    monkeypatch.chdir(repository)
    assert tokenizer_source("sized:200m") == str(repository / "models" / "target")
