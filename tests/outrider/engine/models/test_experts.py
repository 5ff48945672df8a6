"""Models with experts: both layouts of their files, types of their weights, and what more rows of them read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.engine_cases import native
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_gguf import Metadata, Tensors, with_experts_together, write_gguf
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Feed, build_batch
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import LayeredDecoder
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops import Experts
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.estimates.row_costs import RowCosts
from outrider.model_service.row_costs import measure_rows

IDS = random_ids(40, 300)


def loaded(place: Path, dtype: str = "float32") -> ModelRunner:
    return ModelRunner.load(str(place), dtype=dtype, num_threads=2, kv_tokens=1024)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen3_moe", seed=3)


def stack_experts(folder: Path) -> None:
    """Writes a folder's weights anew as transformers has them in memory: two tensors for all experts of a layer."""
    tensors = with_experts_together(load_file(folder / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        halves = [tensors.pop(f"{stem}{kind}_proj.weight") for kind in ("gate", "up")]
        tensors[f"{stem}gate_up_proj"] = torch.cat(halves, 1)
        tensors[f"{stem}down_proj"] = tensors.pop(f"{stem}down_proj.weight")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_both_layouts_of_a_folder_are_one_model(folder: Path, dtype: str) -> None:
    """Experts one by one and all in one; in each type a row's bits are its own."""
    decoded, at_once = all_logits(loaded(folder, dtype), IDS, 20)
    assert torch.equal(decoded, at_once)
    stack_experts(folder)
    assert torch.equal(all_logits(loaded(folder, dtype), IDS, 20)[0], decoded)


def test_a_router_is_never_quantised(folder: Path) -> None:
    """It decides, and is a thousandth of the weights."""
    model = loaded(folder, "int4").model
    routers = [each for each in model.weights if isinstance(each, Tensor) and each.shape == (6, 48)]
    assert [each.dtype for each in routers] == [torch.bfloat16] * 2


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "lacks one": (
        without("model.layers.0.mlp.experts.5.up_proj.weight"),
        "lacks the tensor model.layers.0.mlp.experts.5.up_proj.weight",
    ),
    "one too many": (
        lambda tensors: tensors.update({"model.layers.0.mlp.experts.6.up_proj.weight": torch.zeros(40, 48)}),
        "holds the tensor model.layers.0.mlp.experts.6.up_proj.weight, which config.json does not ask for",
    ),
    "in a layer without": (
        lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": torch.zeros(6, 48)}),
        "holds the tensor model.layers.1.mlp.gate.weight",
    ),
    "another shape": (
        lambda tensors: tensors.update({"model.layers.2.mlp.experts.0.down_proj.weight": torch.zeros(48, 41)}),
        "has the shape [48, 41], but config.json asks for [48, 40]",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_files_that_do_not_fit_are_refused(folder: Path, fault: str) -> None:
    """Before anything is read, by the tensor's name."""
    change, words = BROKEN[fault]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused) as caught:
        loaded(folder)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_count", None, '"qwen3moe.expert_count" is missing'),
        ("expert_used_count", 7, '"qwen3moe.expert_used_count" is 7, but must be an integer from 1 to 6'),
        ("expert_feed_forward_length", 32, "ffn_down_exps.weight has the shape [6, 48, 40], but its configuration"),
        ("expert_shared_count", 1, '"qwen3moe.expert_shared_count" is 1, a key that is not known here'),
    ],
)
def test_gguf_files_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, key: str, value: int | None, words: str
) -> None:
    """By the key of the file, its value and the limit."""

    def change(metadata: Metadata, _: Tensors) -> None:
        metadata.pop(f"qwen3moe.{key}", None)
        metadata.update({} if value is None else {f"qwen3moe.{key}": value})

    file = write_gguf(folder, tmp_path / "model.gguf", edit=change)
    with pytest.raises(ModelRefused) as caught:
        loaded(file)
    assert words in caught.value.message


def test_layers_can_be_cut_and_tapped(folder: Path) -> None:
    """What enters layer 1, between two with experts, is what the rest goes on from, in one call and op by op."""
    runner = loaded(folder)
    runner.tap([1, 2])
    assert isinstance(runner.config, ModelConfig)
    tensors = load_tensors(folder, runner.config, torch.device("cpu"), torch.float32)[0]
    for model in (runner.model, Transformer(runner.config, tensors, native())):
        assert isinstance(model, LayeredDecoder)
        session, wanted = runner.open(IDS, len(IDS)), torch.arange(len(IDS))
        session.reserve()
        plan = build_batch([Feed(session)], [len(IDS)], torch.device("cpu")).plan
        # A buffer of logits may hold until the next forward only.
        whole = model.forward(plan, runner.cache, wanted).clone()
        model.forward_layers(plan, runner.cache, wanted, range(1))
        assert torch.equal(model.forward_layers(plan, runner.cache, wanted, range(1, 3)), whole)
        session.free()


class NotingOps(NativeOps):
    """Notes how many experts each call reads."""

    noted: list[int]

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        ids, _ = experts.choose(self.linear(x, experts.router, experts.router_bias))
        self.noted.append(len(ids.unique()))
        return super().experts(x, experts)


def test_rows_that_are_measured_read_more_experts(tmp_path: Path) -> None:
    """The rows that a service measures at its start are different tokens: each doubling reads more of 32 experts."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 2, "mlp_only_layers": [], "num_hidden_layers": 1}
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe", **sizes)
    runner, ops = loaded(folder), native()
    ops.__class__, config = NotingOps, ModelConfig.read(folder)
    assert isinstance(ops, NotingOps)
    ops.noted = []
    runner.model = Transformer(config, load_tensors(folder, config, torch.device("cpu"), torch.float32)[0], ops)
    rows = list(measure_rows(runner, budget_s=60.0))
    read = [max(ops.noted[start : start + 3]) for start in range(1, len(ops.noted), 3)]
    assert rows[:4] == [1, 2, 4, 8]
    assert read[0] == 2
    assert read[:5] == sorted(set(read[:5]))


def test_a_table_that_grows_is_believed() -> None:
    """A union of experts costs more for each row at first and less later; between and beyond is a straight line."""
    costs = RowCosts()
    costs.begin({1: 100.0, 2: 180.0, 4: 300.0, 8: 440.0})
    assert [costs.at(rows) for rows in (1, 2, 3, 4, 6, 8)] == pytest.approx([100, 180, 240, 300, 370, 440])
    for _ in range(200):
        costs.add(4, 330.0)
    assert costs.at(4) / costs.at(1) > 3


def test_a_config_without_experts_is_a_dense_model(folder: Path) -> None:
    """num_experts 0 makes all layers dense, and a file with experts does not fit then."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 0}))
    with pytest.raises(ModelRefused, match=r"holds the tensor model\.layers\.0\.mlp\.experts\.0"):
        loaded(folder)
