"""Pickled heads as safetensors: the same head afterwards, bit by bit, and nothing but tensors unpickled."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.heads import tiny_heads
from support.heads.head_rows import run_head
from support.heads.tiny_heads import HIDDEN, NUM_LAYERS, VOCAB, Writer, tiny_target
from support.models.model_cases import random_ids
from torch import Tensor

from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.convert import Converted, convert_head
from outrider.engine.ops.eager import EagerOps
from outrider.errors import InvalidRequest, ModelRefused

CPU = torch.device("cpu")


def pickled(folder: Path, name: str = "pytorch_model.bin") -> Path:
    """The head of a folder, pickled as torch.save does it."""
    torch.save(load_file(folder / "model.safetensors"), folder / name)
    (folder / "model.safetensors").unlink()
    return folder


def logits(folder: Path, theta: float | None = None) -> Tensor:
    """Logits of true and drafted rows."""
    target = tiny_target()
    head = read_head(folder, target, theta).load(target, CPU, torch.float32, EagerOps())[0]
    known = torch.randn(NUM_LAYERS + 1, 40, HIDDEN, generator=torch.Generator().manual_seed(3))
    token_ids = random_ids(44, VOCAB)
    return run_head(head, token_ids[:40], known, token_ids[40:])


def three_norms(folder: Path) -> Path:
    """EAGLE 1 with three norms, by the names that it had before speculators."""
    tiny_heads.eagle1(folder, bias=False)
    names = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
    norms = tiny_heads.random_tensors({f"{name}.weight": (HIDDEN,) for name in names}, 40)
    return tiny_heads.change(folder, tensors=dict(norms))


def linear_rope(folder: Path) -> Path:
    """EAGLE 3 with a scaled rotary embedding."""
    return tiny_heads.eagle3(
        folder, config={"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 99.0}
    )


def nested_rope(folder: Path) -> Path:
    """EAGLE 3 whose base stands where transformers 5 puts it."""
    return tiny_heads.eagle3(folder, config={"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})


EAGLES: dict[str, tuple[Writer, str, float]] = {
    "eagle1": (tiny_heads.eagle1, "speculators eagle", 10000),
    "eagle1-input-norm": (lambda folder: tiny_heads.eagle1(folder, input_norm=True), "speculators eagle", 10000),
    "hass": (lambda folder: tiny_heads.eagle1(folder, para_norm=True), "speculators eagle", 10000),
    "three-norms": (three_norms, "speculators eagle", 10000),
    "eagle3": (tiny_heads.eagle3, "speculators eagle3", 10000),
    "eagle3-narrow": (lambda folder: tiny_heads.eagle3(folder, narrow=True), "speculators eagle3", 10000),
    "eagle3-whole": (tiny_heads.eagle3_whole, "speculators eagle3", 10000),
    "eagle3-linear": (linear_rope, "speculators eagle3", 99),
    "eagle3-nested-theta": (nested_rope, "speculators eagle3", 77),
    "specforge": (tiny_heads.specforge, "speculators eagle3", 10000),
    "specforge-3.1": (
        lambda folder: tiny_heads.specforge(folder, tap_norms=True, norm_output=True, fc_norm=True),
        "speculators eagle3",
        10000,
    ),
    "modelopt": (tiny_heads.modelopt, "speculators eagle3", 10000),
    "modelopt-of-f": (lambda folder: tiny_heads.modelopt(folder, taps=False), "speculators eagle3", 10000),
    "modelopt-pair": (lambda folder: tiny_heads.modelopt(folder, taps=False, wide=False), "speculators eagle3", 10000),
}


@pytest.mark.parametrize(("write", "layout", "theta"), EAGLES.values(), ids=EAGLES.keys())
def test_a_converted_eagle_is_the_same_head(tmp_path: Path, write: Writer, layout: str, theta: float) -> None:
    """Its logits have the same bits as those of the author's layout, and its base is written down."""
    folder, out = write(tmp_path / "head"), tmp_path / "out"
    before, count = logits(folder), len(load_file(folder / "model.safetensors"))
    written = convert_head(pickled(folder), out)
    assert (written.layout, written.tensors, written.theta) == (layout, count, theta)
    config = json.loads((out / "config.json").read_text())
    assert f"speculators {config['speculators_model_type']}" == layout
    assert config["transformer_layer_config"]["rope_theta"] == theta
    assert torch.equal(logits(out), before)


def test_theta_can_be_written(tmp_path: Path) -> None:
    """The same as overriding it at every start."""
    for name, write in (("plain", tiny_heads.eagle3), ("nested", nested_rope)):
        folder, out = write(tmp_path / name), tmp_path / f"{name}-out"
        wanted = logits(folder, 1234.0)
        assert convert_head(pickled(folder), out, 1234.0).theta == 1234
        assert torch.equal(logits(out), wanted)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "hydra_lm_head.pt"])
def test_other_heads_keep_names_and_config(tmp_path: Path, name: str) -> None:
    """Blocks that are one object in the author's code become one copy each."""
    folder, out = tmp_path / "head", tmp_path / "out"
    folder.mkdir()
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    block = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).T
    held = {"0.0.linear.weight": block, "0.1.linear.weight": block, "0.2.weight": block.bfloat16()}
    torch.save(held, folder / name)
    assert convert_head(folder, out) == Converted("unchanged", 3, 2 * 144 + 72, None)
    assert json.loads((out / "config.json").read_text()) == config
    written = load_file(out / "model.safetensors")
    assert written.keys() == held.keys()
    assert all(torch.equal(written[key], held[key]) and written[key].dtype == held[key].dtype for key in held)


def test_several_files_are_one_head(tmp_path: Path) -> None:
    """As transformers writes large ones; what a training run left beside them is passed over."""
    folder, out = tiny_heads.eagle3(tmp_path / "head"), tmp_path / "out"
    before, tensors = logits(folder), load_file(folder / "model.safetensors")
    names = sorted(tensors)
    torch.save({name: tensors[name] for name in names[:4]}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({name: tensors[name] for name in names[4:]}, folder / "pytorch_model-00002-of-00002.bin")
    (folder / "training_args.bin").write_bytes(b"nothing")
    (folder / "model.safetensors").unlink()
    convert_head(folder, out)
    assert torch.equal(logits(out), before)
    torch.save({names[0]: tensors[names[0]]}, folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ModelRefused, match=f"holds {names[0]}, which another file holds too"):
        convert_head(folder, tmp_path / "other")


class Code:
    """What an attacker would pickle."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("never"),)


@pytest.mark.parametrize("content", [b"", b"not a pickle", None], ids=["empty", "garbage", "code"])
def test_what_holds_more_than_tensors_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    folder, out = tmp_path / "head", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = folder / "pytorch_model.bin"
    torch.save({"fc.weight": Code()}, file) if content is None else file.write_bytes(content)
    with pytest.raises(ModelRefused) as caught:
        convert_head(folder, out)
    assert caught.value.message == f"{file} is damaged, or holds more than tensors, which could run code"
    assert not out.exists()
    assert not (tmp_path / "never").exists()


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    """One sentence each."""
    folder = tiny_heads.eagle3(tmp_path / "head")
    with pytest.raises(ModelRefused, match=r"head has no .bin, .pt, .pth to convert"):
        convert_head(folder, tmp_path / "out")
    with pytest.raises(ModelRefused, match=r"none/config.json cannot be read: No such file or directory"):
        convert_head(tmp_path / "none", tmp_path / "out")
    torch.save([torch.ones(1)], folder / "list.pt")
    with pytest.raises(ModelRefused, match=r"list.pt does not hold tensors by their names"):
        convert_head(folder, tmp_path / "out")
    torch.save({"step": 3}, folder / "list.pt")
    with pytest.raises(ModelRefused, match=r"list.pt does not hold tensors by their names"):
        convert_head(folder, tmp_path / "out")
    torch.save({}, folder / "other.pt")
    with pytest.raises(ModelRefused, match=r"has list.pt, other.pt, and nobody can tell which one is the head"):
        convert_head(folder, tmp_path / "out")


def test_values_that_have_no_effect_or_no_place(tmp_path: Path) -> None:
    """A used folder, a theta that is no base, and one for a head that stays as it is."""
    folder = pickled(tiny_heads.eagle3(tmp_path / "head"))
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    for out in (used, used / "file"):
        with pytest.raises(InvalidRequest, match="but must be a folder that is empty, or not there yet"):
            convert_head(folder, out)
    for theta in (0.0, -1.0, float("inf")):
        with pytest.raises(InvalidRequest, match=r"--theta is .*, but must be a positive number"):
            convert_head(folder, tmp_path / "out", theta)
    medusa = tmp_path / "medusa"
    medusa.mkdir()
    (medusa / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": torch.ones(2, 2)}, medusa / "medusa_lm_head.pt")
    with pytest.raises(InvalidRequest, match=r"--theta is 5.0, but must be left out"):
        convert_head(medusa, tmp_path / "out", 5.0)
    for eagle in (7, {"eagle_aux_hidden_state_layer_ids": ["low"]}):
        (folder / "config.json").write_text(json.dumps(tiny_heads.FLAT | {"eagle_config": eagle}))
        with pytest.raises(ModelRefused, match="must be an object with ids of layers"):
            convert_head(folder, tmp_path / "out")
