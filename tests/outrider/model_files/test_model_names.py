"""The names of sized and simulated models, their presets, where the model inside lies, and what a step would take."""

from pathlib import Path

import pytest

from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.weights import expected_shapes
from outrider.errors import ModelRefused
from outrider.model_files import model_names
from outrider.model_files.model_names import (
    CONTEXT_LEN,
    MAX_SEED,
    PRESETS,
    SIM_DRAFT,
    SIM_PRESETS,
    VOCAB_SIZE,
    SimulatedModel,
    SizedModel,
    parse,
    parse_simulated,
    tokenizer_source,
)


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
    monkeypatch.setattr(model_names, "PACKAGE", tmp_path)
    with pytest.raises(ModelRefused, match=r"no embedded draft model in .*; sized:10m is made of it"):
        tokenizer_source("sized:10m")


def test_an_installed_package_has_its_models_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wheel put there goes before folders beside it, and the working directory is not looked at."""
    for folder in (tmp_path / "outrider", tmp_path):
        (folder / "models" / "target").mkdir(parents=True)
        (folder / "models" / "target" / "config.json").touch()
    monkeypatch.setattr(model_names, "PACKAGE", tmp_path / "outrider")
    assert tokenizer_source("sized:200m") == str(tmp_path / "outrider" / "models" / "target")


def simulated(model: str) -> SimulatedModel:
    """The simulated model of a name that is right."""
    found = parse_simulated(model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "preset",
    [
        "h100-8b",
        "h100-70b",
        "h100-1b@acceptance=0.8",
        "h100-1b@acceptance=0,rows=0.15,stretch=4",
        "h100-600m@acceptance=0.7+0.1",
    ],
)
def test_simulated_names_come_back(preset: str) -> None:
    """A name that went through a service means the same model, and is the embedded target to a tokenizer."""
    assert simulated(f"sim:{preset}").name == f"sim:{preset}"
    assert tokenizer_source(f"sim:{preset}") == model_names.embedded_model("target")
    assert parse(f"sim:{preset}") is None


def test_what_a_preset_has_anyway_is_not_in_the_name() -> None:
    """So that two names of one model are one name, however its numbers are written."""
    assert simulated("sim:h100-1b@stretch=1.0,acceptance=0.78+0.10+0.04+0.02+0.012").name == SIM_DRAFT
    assert simulated("sim:h100-8b@stretch=0.50").name == "sim:h100-8b@stretch=0.5"
    assert simulated("sim:h100-8b@stretch=100").name == "sim:h100-8b@stretch=100"
    assert simulated("sim:h100-1b@acceptance=0.123456789").acceptance == (0.123456789,)
    assert simulated("sim:h100-1b@acceptance=0.123456789").name == "sim:h100-1b@acceptance=0.123456789"


def test_other_models_are_not_simulated() -> None:
    """Folders and hub ids are left alone."""
    for model in ("models/target", "someone/sim:h100-8b", "./sim:h100-8b", "sim", "sized:200m"):
        assert parse_simulated(model) is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("sim:", "is no simulated model; there are sim:h100-8b, sim:h100-70b, sim:h100-1b, sim:h100-600m"),
        ("sim:h100-7b", "is no simulated model; there are sim:h100-8b, sim:h100-70b, sim:h100-1b, sim:h100-600m"),
        ("sim:h100-8b/x@stretch=2", "is no simulated model"),
        ("sim:h100-8b@", "has '' behind @; there may be acceptance=NUMBER, rows=NUMBER, stretch=NUMBER, separated by"),
        ("sim:h100-8b@stretch=2,", "has '' behind @"),
        ("sim:h100-8b@speed=2", "has 'speed=2' behind @"),
        ("sim:h100-8b@stretch=-1", "has 'stretch=-1' behind @"),
        ("sim:h100-8b@stretch=nan", "has 'stretch=nan' behind @"),
        ("sim:h100-8b@stretch=0", "stretch is 0, but must be in [0.001, 1000]"),
        ("sim:h100-8b@stretch=1000.5", "stretch is 1000.5, but must be in [0.001, 1000]"),
        ("sim:h100-1b@acceptance=1.01", "acceptance is 1.01, but must be in [0, 1]"),
        ("sim:h100-1b@acceptance=0.5+1.01", "acceptance is 0.5+1.01, but must be in [0, 1]"),
        ("sim:h100-1b@acceptance=0.4+0.5", "is 0.4+0.5, but must be at most 8 falling numbers from 0.001 on"),
        ("sim:h100-1b@acceptance=0.9+0.1", "together 0.999 at most"),
        ("sim:h100-1b@acceptance=0.9+0.0005", "but must be at most 8 falling numbers from 0.001 on"),
        ("sim:h100-1b@acceptance=0.9+", "has 'acceptance=0.9+' behind @"),
        ("sim:h100-1b@stretch=2+1", "stretch is 2+1, but must be one number"),
        ("sim:h100-1b@rows=0.1+0.2", "rows is 0.1+0.2, but must be one number"),
        ("sim:h100-1b@rows=11", "rows is 11, but must be in [0, 10]"),
    ],
)
def test_wrong_simulated_names_are_refused(model: str, words: str) -> None:
    """One sentence with the name, what is wrong in it, and what there is; the tokenizer's place says so too."""
    for read in (parse_simulated, tokenizer_source):
        with pytest.raises(ModelRefused) as refusal:
            read(model)
        assert refusal.value.exit_code == 78
        assert model in refusal.value.message
        assert words in refusal.value.message


@pytest.mark.parametrize(
    ("preset", "parameters", "multiplied", "token_bytes", "kv_tokens"),
    [
        # Published sizes; all but the embedding of 128,256 rows, where it is not the output matrix too.
        ("h100-8b", 8_030_261_248, 7_504_924_672, 131_072, 426_784),
        ("h100-70b", 70_553_706_496, 69_503_033_344, 327_680, 448_280),
        ("h100-1b", 1_235_814_400, 1_235_814_400, 32_768, 2_121_837),
        # With the vocabulary that all of them have here.
        ("h100-600m", 571_794_432, 571_794_432, 114_688, 617_818),
    ],
)
def test_presets_have_the_sizes_of_their_models(
    preset: str, parameters: int, multiplied: int, token_bytes: int, kv_tokens: int
) -> None:
    """Of Llama 3.1 and 3.2; the cache takes what is left of nine tenths of 80 GB a device."""
    model = SIM_PRESETS[preset]
    assert (model.parameter_count, model.multiplied_parameters) == (parameters, multiplied)
    assert (model.token_bytes, model.kv_tokens) == (token_bytes, kv_tokens)


def test_few_rows_take_the_time_of_their_bytes() -> None:
    """Weights, and keys and values of 1,000 tokens, at 77 % of 3.35 TB/s, and half a millisecond."""
    weights, keys = 2 * 7_504_924_672, 1000 * 131_072
    expected = (weights + keys) / (0.77 * 3.35e12) + 0.0005
    assert SIM_PRESETS["h100-8b"].step_s(4, 1000, 4000) == pytest.approx(expected, rel=1e-12)


def test_each_doubling_of_rows_may_cost_memory_the_same_share() -> None:
    """With rows=0.13 thirty-two rows read 1.13 times as long as one, and four 1.052 times; the launch is none of it."""
    model, launch = simulated("sim:h100-8b@rows=0.13"), 0.0005
    alone = SIM_PRESETS["h100-8b"].step_s(1, 0, 0) - launch
    for rows, factor in ((1, 1.0), (4, 1.052), (32, 1.13)):
        assert model.step_s(rows, 0, 0) == pytest.approx(factor * alone + launch, rel=1e-12)


def test_many_rows_take_the_time_of_their_products() -> None:
    """Two operations a parameter and row, and for each score two products of 4,096 numbers in each of 32 layers."""
    flops = 2 * 7_504_924_672 * 512 + 4 * 32 * 4096 * 512 * 300
    expected = flops / (0.65 * 989.4e12) + 0.0005
    assert SIM_PRESETS["h100-8b"].step_s(512, 512, 512 * 300) == pytest.approx(expected, rel=1e-12)


def test_four_devices_share_the_weights_and_exchange() -> None:
    """A quarter of the time of 139 GB, and 160 exchanges of 12 microseconds."""
    expected = 2 * 69_503_033_344 / (4 * 0.77 * 3.35e12) + 0.0005 + 160 * 12e-6
    assert SIM_PRESETS["h100-70b"].step_s(1, 0, 0) == pytest.approx(expected, rel=1e-12)


def test_the_8b_preset_is_as_fast_as_its_source() -> None:
    """158.34 tokens a second on one device, for one stream of SGLang."""
    assert 1 / SIM_PRESETS["h100-8b"].step_s(1, 300, 300) == pytest.approx(158.34, rel=0.005)


def test_stretch_multiplies_every_time() -> None:
    """The launch among it."""
    model = SIM_PRESETS["h100-1b"]
    slow = simulated("sim:h100-1b@stretch=4")
    assert slow.step_s(7, 70, 490) == 4 * model.step_s(7, 70, 490)
