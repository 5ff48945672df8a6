"""What the sections measure: the kinds of operations of this checkout, models of a shape, sessions of a length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.sizes import Sizes
from outrider.engine.batching import Feed, RowPlan, build_batch
from outrider.engine.cache import BLOCK_SIZE, BlockPool, BlockTable, KVCache
from outrider.engine.models.checkpoints import Checkpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import expected_shapes
from outrider.engine.ops import Ops, choose_ops, triton_missing
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.model_files.model_names import Shape, embedded_model
from outrider.token_tree import EMPTY, TokenTree

STANDARD_DEVIATION = 0.02
KV_ROOM = 64
# Rows that may share an item of work, as models of these shapes have them: a token has four of the 16, 32 or 64 rows
# of a tile.
TILES: tuple[int, ...] = (4, 8, 16)


def available_ops(device: torch.device) -> dict[str, Ops]:
    """Every kind of operations that runs on a device here, by name."""
    if device.type != "cuda" or triton_missing() is not None:
        return {"eager": EagerOps()}
    return {"eager": EagerOps(), "triton": choose_ops(device, 1, kernels="triton")}


def attention_kinds(device: torch.device) -> dict[str, tuple[Ops, tuple[int, ...]]]:
    """Every kind of attention, with the rows that share an item of work; none where every row is computed by itself."""
    ops = available_ops(device)
    kinds: dict[str, tuple[Ops, tuple[int, ...]]] = {
        name: (each, TILES if name == "triton" else ()) for name, each in ops.items()
    }
    return kinds | ({"triton-alone": (ops["triton"], ())} if "triton" in ops else {})


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to load a model, by the options of ModelRunner.load."""

    name: str
    kernels: str


def variants(device: torch.device) -> list[Variant]:
    """Plain torch, our kernels, and our kernels replayed as graphs, as far as this device has them."""
    if device.type != "cuda":
        return [Variant("cpu", "auto")]
    if triton_missing() is not None:
        return [Variant("eager", "eager")]
    return [Variant("eager", "eager"), Variant("triton", "triton"), Variant("graphs", "graphs")]


@dataclass(frozen=True, slots=True)
class ShapedCheckpoint:
    """A model of random weights, made on the device; its vocabulary and context are those of the sizes."""

    name: str
    config: ModelConfig
    folder: Path
    modelling: str = ""
    block_dtype: str = ""

    @classmethod
    def of(cls, name: str, shape: Shape, sizes: Sizes) -> "ShapedCheckpoint":
        """Takes what a shape does not say from the embedded target."""
        folder = Path(embedded_model("target"))
        small = ModelConfig.read(folder)
        config = replace(
            small,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tied_embeddings=shape.tied_embeddings,
            vocab_size=sizes.vocab_size,
            context_len=sizes.context_len,
            windows=(None,) * shape.num_layers,
            ropes=small.ropes[:1] * shape.num_layers,
            score_scale=shape.head_dim**-0.5,
        )
        return cls(name, config, folder)

    def build(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[Transformer, str]:
        """Matrices in dtype, norms in float32."""
        generator = torch.Generator(device).manual_seed(0)
        tensors = {}
        for name, shape in expected_shapes(self.config).items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, device=device)
            else:
                matrix = torch.empty(shape, dtype=dtype, device=device)
                tensors[name] = matrix.normal_(0, STANDARD_DEVIATION, generator=generator)
        return Transformer(self.config, tensors, ops), self.digest()

    def digest(self) -> str:
        return f"random {self.name}"


def load_shaped(name: str, sizes: Sizes, device: torch.device, variant: Variant, num_layers: int = 0) -> ModelRunner:
    """A runner of a shape, with all its layers or so many, in bfloat16; all its cache holds random numbers."""
    shape = sizes.shapes[name]
    shape = replace(shape, num_layers=num_layers or shape.num_layers)
    runner = load(ShapedCheckpoint.of(f"{name}-shape", shape, sizes), sizes.kv_tokens[name], device, variant)
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.normal_()
    return runner


def load(model: str | Checkpoint, kv_tokens: int, device: torch.device, variant: Variant) -> ModelRunner:
    """A model in bfloat16 on a device."""
    return ModelRunner.load(
        model,
        device=str(device),
        dtype="bfloat16",
        kv_tokens=kv_tokens,
        kernels=variant.kernels,
    )


def tree_of(num_rows: int) -> TokenTree:
    """A tree in which every row has two children, of so many rows."""
    return TokenTree(tuple(range(1, num_rows + 1)), tuple(row // 2 for row in range(num_rows)))


def chain_of(num_rows: int) -> TokenTree:
    """A chain of so many rows."""
    return TokenTree.chain(tuple(range(1, num_rows + 1)))


def cached_session(runner: ModelRunner, length: int) -> Session:
    """A session of so many tokens that count as cached: what their slots hold are the cache's random numbers."""
    session = runner.open([1 + index % 200 for index in range(length)], length)
    session.reserve(KV_ROOM)
    session.advance(length, EMPTY)
    return session


class LayerCache:
    """The cache of a single layer of a shape, in bfloat16 on a device, with sessions in it."""

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        sizes = (1, num_blocks * BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.shape, self.device = shape, device
        self.pool = BlockPool(num_blocks)
        self.cache = KVCache(*sizes, torch.bfloat16, device)
        self.keys, self.values = self.cache.keys[0].normal_(), self.cache.values[0].normal_()

    def feed(self, length: int, tree: TokenTree) -> Feed:
        """A session of so many cached tokens, with a tree."""
        session = Session(BlockTable(self.pool, self.cache), range(length), length)
        session.reserve(len(tree))
        session.advance(length, EMPTY)
        return Feed(session, tree)

    def plan(self, feeds: Sequence[Feed], tiles: Sequence[int] = (), num_rows: int | None = None) -> RowPlan:
        """The plan of one forward with all rows of these, or with the first so many of each."""
        grants = [feed.num_rows if num_rows is None else min(num_rows, feed.num_rows) for feed in feeds]
        return build_batch(feeds, grants, self.device, tiles).plan

    def queries(self, num_rows: int, seed: int = 0) -> Tensor:
        """Random queries [R, H, D]."""
        size = num_rows, self.shape.num_heads, self.shape.head_dim
        return torch.randn(size, device=self.device, generator=torch.Generator(self.device).manual_seed(seed))

    def attend(self, ops: Ops, query: Tensor, plan: RowPlan) -> Tensor:
        """Attention of the layer; the scale is the usual one."""
        return ops.attention(query, plan, self.keys, self.values, self.shape.head_dim**-0.5)


def random_weights(size: tuple[int, int], device: torch.device, count: int) -> Iterator[Tensor]:
    """Matrices in bfloat16 that differ."""
    for _ in range(count):
        yield torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, STANDARD_DEVIATION)
