"""A forward in few kernels, and its recordings: bitwise what the model computes operation by operation."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.devices.graphs import PretendGraph, pretend_graphs
from support.devices.kernels import CPU, KernelOps, assert_same
from support.devices.story import tapped, tell
from support.models.engine_cases import TREE, finish, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.models import graphed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.graphed import GraphedTransformer
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops import Ops
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.ops.triton import linear
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.token_tree import EMPTY, TokenTree

BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
CHAIN = TokenTree.chain((7, 8, 9, 10))


class Tiled(Transformer):
    """Operation by operation, with the tiles of the few kernels."""

    tiles = (4, 8, 16)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room, a cache of the weights' type as on a card, and units so short that there are several."""
    monkeypatch.setattr(graphed, "WORK_NUMBERS", 1 << 13)
    monkeypatch.setattr(graphed, "PARTIAL_FLOATS", 1 << 15)
    monkeypatch.setattr(Decoder, "cache_dtype", property(lambda decoder: decoder.embedding.dtype))
    monkeypatch.setattr(linear, "UNIT", 32)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PretendGraph]]:
    with pretend_graphs(monkeypatch) as found:
        yield found


def load(folder: Path, way: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    """The model by its operations, in few kernels, or in graphs."""
    config = ModelConfig.read(folder)
    ops: Ops = ReferenceOps() if way == "reference" else KernelOps()
    kind = Tiled if way == "operations" else Transformer
    model = kind(config, load_tensors(folder, config, CPU, dtype), ops)
    identity = ModelIdentity("tiny", "", str(dtype), 1, config.vocab_size)
    runner = ModelRunner(model, identity, 1024, graphs="auto" if way == "graphs" else "off")
    if way == "operations":
        runner.model = model
    assert isinstance(runner.model, GraphedTransformer) == (way in {"kernels", "graphs"})
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    return runner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen3", vocab_size=100, num_hidden_layers=1)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)


def short(runner: ModelRunner) -> list[Tensor]:
    """A prompt beside another one's tree, a path of which is kept, and a step."""
    one, other = runner.open(random_ids(6, 1, 100), 6), runner.open(random_ids(5, 2, 100), 5)
    found = finish(runner, Feed(one), Feed(other, TREE))
    other.keep(TREE.path(7))
    one.extend([5])
    return [*found, *finish(runner, Feed(one, CHAIN), Feed(other))]


def check_family(folder: Path, dtype: torch.dtype, ways: Sequence[str] = ("kernels", "operations")) -> list[Tensor]:
    """Two ways give the same bits, which it returns."""
    found, expected = (short(load(folder, way, dtype)) for way in ways)
    same(found, expected)
    return found


BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 0.1}
FAMILIES = {"qwen3": {}, "llama": BIASED, "qwen2": {"num_key_value_heads": 1}}
QUICK = [("qwen3", torch.bfloat16), ("llama", torch.float32), ("qwen2", torch.float16)]
EVERY = [(family, dtype) for family in FAMILIES for dtype in BOUNDS]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [pytest.param(*each, id=f"{each[0]} {each[1]}", marks=() if each in QUICK else pytest.mark.slow) for each in EVERY],
)
def test_few_kernels_have_the_bits_of_the_operations(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of heads, biases, tied embeddings and groups of one to four heads; near the reference too."""
    if dtype is not torch.float32:
        monkeypatch.setattr(linear, "UNIT", 128)
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=100, num_hidden_layers=1, **FAMILIES[family])
    found, exact = check_family(folder, dtype), short(load(folder, "reference", dtype))
    errors = [float((one - two).norm() / two.norm()) for one, two in zip(found, exact, strict=True)]
    assert max(errors) < BOUNDS[dtype]
