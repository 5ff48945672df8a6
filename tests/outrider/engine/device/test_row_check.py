"""What is looked at before a device's rows are promised: our kernels pass, and a library's products do not."""

from pathlib import Path

import pytest
import torch
from support.models.engine_cases import native
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops import Ops
from outrider.engine.ops.blocks import Weight
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.row_check import differing_operations

CPU = torch.device("cpu")


class ByNeighbour(ReferenceOps):
    """Products with many outputs whose bits hang on how many rows there are, as a library's may."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        product = super().linear(x, weight, bias)
        is_head = weight.shape[0] == 300
        return product * (1 + 2**-20) if is_head and x.shape[0] > 64 else product


class InRowOrder(ReferenceOps):
    """Attention that sees the rows of a tree in their order, and not in that of their positions."""

    def attention(
        self,
        query: Tensor,
        plan: RowPlan,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attended = super().attention(query, plan, key_cache, value_cache, scale, sinks)
        starts = plan.key_starts
        return attended * (1 + 2**-20) if len(starts.unique()) == 3 else attended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", "qwen3", seed=3)


def differing(folder: Path, ops: Ops) -> list[str]:
    """Names of what differs, with the weights of a folder."""
    config = ModelConfig.read(folder)
    return differing_operations(Transformer(config, load_tensors(folder, config, CPU, torch.bfloat16)[0], ops), ())


def test_compiled_kernels_and_reference_operations_pass(folder: Path) -> None:
    """Their rows are independent by construction."""
    assert differing(folder, native()) == []
    assert differing(folder, ReferenceOps()) == []


def test_a_product_that_knows_its_neighbours_is_named(folder: Path) -> None:
    """Only from 65 rows on, and only in the last place of a number."""
    assert differing(folder, ByNeighbour()) == ["head"]


def test_attention_in_the_order_of_rows_is_named(folder: Path) -> None:
    """Of a tree with three leaves."""
    assert differing(folder, InRowOrder()) == ["attention"]
