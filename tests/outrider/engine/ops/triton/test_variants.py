"""A kernel is compiled once for its constants: what varies from forward to forward makes no variant of it.

Triton compiles anew where a number is 1 or a multiple of 16, or where a tensor begins at a multiple of 16 bytes, unless
it is told that this is no matter. A server would stand still for it, in the middle of its answers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.kernels import CPU, KernelOps
from support.devices.story import tapped, tell
from support.devices.variants import Part, taken_apart
from support.models.engine_cases import attention_case, rotate
from support.models.tiny_models import write_tiny_model
from triton.runtime.interpreter import InterpretedFunction

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.graphed import GraphedTransformer
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops.triton import attention
from outrider.engine.runner import ModelIdentity, ModelRunner

pytestmark = pytest.mark.early

Variants = Mapping[Part, set[Part]]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """The variants of each kernel that is launched."""
    found: defaultdict[Part, set[Part]] = defaultdict(set)
    run = InterpretedFunction.run

    def noted(kernel: Any, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        fixed, variant = taken_apart(kernel, args, named)
        found[fixed].add(variant)
        run(kernel, *args, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


def check(variants: Variants) -> None:
    """Fails with the names in which variants of a kernel differ."""
    for (name, *_), found in variants.items():
        first = min(found, key=str)
        assert [set(each) - set(first) for each in found if each != first] == [], name


def model(folder: Path) -> ModelRunner:
    """With an odd number of heads, in few kernels."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
    config = ModelConfig.read(write_tiny_model(folder / "model", "qwen3", vocab_size=257, **sizes))
    made = Transformer(config, load_tensors(folder / "model", config, CPU, torch.float32)[0], KernelOps())
    return ModelRunner(made, ModelIdentity("tiny", "", "float32", 1, config.vocab_size), 1024)


def test_forwards_of_all_sizes_are_compiled_once(
    tmp_path: Path, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, trees, chains and steps, with features that are kept."""
    monkeypatch.setattr(GraphedTransformer, "check_rows", lambda _: None)
    monkeypatch.setattr(Decoder, "cache_dtype", property(lambda decoder: decoder.embedding.dtype))
    tell(tapped(model(tmp_path)))
    assert {"embed", "split_heads", "store_rows", "sum_shared_chunks", "linear_units"} <= {
        name for name, *_ in variants
    }
    check(variants)


def test_operations_are_compiled_once(variants: Variants) -> None:
    """By the lists of rows that share no work, and choices of any number of rows."""
    ops = KernelOps()
    for num_rows in (1, 2, 3, 5, 16, 17):
        case = attention_case(num_rows, 3, 1, 16)
        query = rotate(ops, case)
        ops.attention(query, case.plan, case.key_cache, case.value_cache, 0.25)
        logits, keys = torch.randn(num_rows, 48), torch.arange(num_rows + 1)[1:]
        ops.choose(logits, torch.ones(num_rows, dtype=torch.float64), keys, 40)
    check(variants)


def test_a_variant_is_found(variants: Variants, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody says that it is no matter how many chunks there are."""
    monkeypatch.setitem(attention.sum_own_chunks.kwargs, "do_not_specialize", [])
    with pytest.raises(AssertionError, match="sum_own_chunks"):
        test_operations_are_compiled_once(variants)
