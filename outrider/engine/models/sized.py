"""A small model inside a larger one: what the large one computes is exactly what the small one does, at its own cost.

The small residual stream lies in the first coordinates of the wide one; the others stay 0, because nothing that is
not the small model's can write: outside the small weights the embedding, `o_proj` and `down_proj` are zero. All other
weights are random, and what they compute is thrown away. Three things differ between the sizes and are undone:
- RMS norm divides by a mean over H coordinates, of which h are used: weights times sqrt(h/H), epsilon times h/H.
- Scores are scaled by the head dimension: `q_proj` times sqrt(D/d), which bfloat16 rounds unless D/d is a square.
- RoPE turns pair i of d/2 at theta^(-2i/d), which in a wider head is the pair i*D/d (rotate_half layout: the pair's
  coordinates are i and i + d/2). The other pairs of a used head add nothing to scores, because their keys are zero.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.rope import Rope
from outrider.engine.models.weights import expected_shapes
from outrider.errors import ModelRefused
from outrider.model_files.model_names import CONTEXT_LEN, Shape

FORMAT_VERSION = 1
STANDARD_DEVIATION = 0.02
# Numbers drawn at a time on the CPU: they stay in a core's own cache, and torch copies so few without a second thread,
# for which it would wait thousands of times on a busy machine.
TILE = 1 << 15


@dataclass(frozen=True, slots=True)
class Spot:
    """Place of a small matrix in the wide one, and what is around it."""

    rows: Tensor
    """The wide row of each small row."""
    columns: Tensor
    scale: float = 1.0
    is_random: bool = True
    """Whether the rest is random; else it is zero."""
    cleared_rows: int = 0
    """Rows at the beginning that are zero outside the small matrix all the same."""


def widened(small: ModelConfig, shape: Shape) -> ModelConfig:
    """The configuration of the wide model. Raises ModelRefused when the small one does not fit into the shape."""
    wide = replace(
        small,
        # A shape has fields of a configuration.
        **asdict(shape),
        norm_epsilon=small.norm_epsilon * small.hidden_size / shape.hidden_size,
        context_len=CONTEXT_LEN,
        windows=(None,) * shape.num_layers,
        ropes=small.ropes[:1] * shape.num_layers,
        score_scale=shape.head_dim**-0.5,
    )
    obstacle = _obstacle(small, wide)
    if obstacle is not None:
        raise ModelRefused(f"The small model does not fit into the large one: {obstacle}")
    return wide


def _obstacle(small: ModelConfig, wide: ModelConfig) -> str | None:
    if small.qkv_bias or small.output_bias or small.mlp_bias or small.qk_norm:
        return "it has biases or norms of heads"
    if type(small.ropes[0]) is not Rope or any(small.windows):
        return "it has a scaled rotary embedding or sliding windows"
    if wide.tied_embeddings and not small.tied_embeddings:
        return "it has an output matrix of its own"
    if wide.head_dim % small.head_dim:
        return f"its head dimension {small.head_dim} does not divide {wide.head_dim}"
    sizes = {
        "hidden size": (small.hidden_size, wide.hidden_size),
        "intermediate size": (small.intermediate_size, wide.intermediate_size),
        "number of layers": (small.num_layers, wide.num_layers),
        "number of key-value heads": (small.num_kv_heads, wide.num_kv_heads),
        "number of heads in a group": (_group_size(small), _group_size(wide)),
    }
    return next((f"its {name} is {own}, above {room}" for name, (own, room) in sizes.items() if own > room), None)


def _group_size(config: ModelConfig) -> int:
    return config.num_heads // config.num_kv_heads


def spots(small: ModelConfig, wide: ModelConfig) -> Mapping[str, Spot]:
    """The place of every kind of matrix, by the name of its layer."""
    tokens, hidden = torch.arange(small.vocab_size), torch.arange(small.hidden_size)
    neurons, keys = torch.arange(small.intermediate_size), _rows(torch.arange(small.num_kv_heads), small, wide)
    heads = torch.arange(small.num_heads)
    # A head stays in the group with its number, as the member that it was.
    group, member = heads // _group_size(small), heads % _group_size(small)
    queries = _rows(group * _group_size(wide) + member, small, wide)
    return {
        "embed_tokens": Spot(tokens, hidden, is_random=False),
        "lm_head": Spot(tokens, hidden),
        "q_proj": Spot(queries, hidden, scale=sqrt(wide.head_dim / small.head_dim)),
        "k_proj": Spot(keys, hidden, cleared_rows=small.num_kv_heads * wide.head_dim),
        "v_proj": Spot(keys, hidden),
        "o_proj": Spot(hidden, queries, is_random=False),
        "gate_proj": Spot(neurons, hidden),
        "up_proj": Spot(neurons, hidden),
        "down_proj": Spot(hidden, neurons, is_random=False),
    }


def _rows(heads: Tensor, small: ModelConfig, wide: ModelConfig) -> Tensor:
    """Wide rows of the small heads' rows, given the wide head of each small one; pairs go to those of their frequency.

    i*D/d serves both halves: d/2 + i goes to D/2 + i*D/d.
    """
    inside = torch.arange(small.head_dim) * (wide.head_dim // small.head_dim)
    return (heads[:, None] * wide.head_dim + inside).flatten()


def widen(
    tensors: Mapping[str, Tensor],
    small: ModelConfig,
    wide: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Makes the wide model's tensors one by one from the small one's: matrices in dtype, vectors in float32.

    The small ones are taken in float32. Random numbers come from the device's generator, seeded by seed and name, so
    they differ between kinds of devices and not with the order.
    """
    places = spots(small, wide)
    for name, shape in expected_shapes(wide).items():
        source = source_of(name, tensors)
        if len(shape) == 1:
            yield name, vector(source, torch.ones(shape, device=device))
            continue
        # Not held here: its reader may free it before the next one is made.
        spot, generator = places[name.split(".")[-2]], generator_of(name, seed, device)
        yield name, fill(spot, source, torch.empty(shape, dtype=dtype, device=device), generator)


def source_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The small tensor that is inside a wide one."""
    source = tensors.get(name)
    return tensors["model.embed_tokens.weight"] if name == "lm_head.weight" and source is None else source


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """What a wide tensor's random numbers come from."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def vector(source: Tensor | None, ones: Tensor) -> Tensor:
    """Fills a wide norm [H], which comes as ones, with the small one at its beginning."""
    if source is not None:
        ones[: len(source)] = source.to(ones.device) * sqrt(len(source) / len(ones))
    return ones


def fill(spot: Spot, source: Tensor | None, matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Fills a wide matrix, with the small one at its spot."""
    if not spot.is_random:
        # Written and not only reserved: pages that were never written to all read the same piece of the cache.
        matrix.fill_(0)
    elif matrix.device.type != "cpu":
        matrix.normal_(0, STANDARD_DEVIATION, generator=generator)
    else:
        # Through a float32 tile: drawing in bfloat16 takes twice as long on the CPU.
        tile = torch.empty(TILE)
        for part in torch.split(matrix.view(-1), TILE):
            part.copy_(tile[: len(part)].normal_(0, STANDARD_DEVIATION, generator=generator))
    if source is not None:
        matrix[: spot.cleared_rows] = 0
        values = (source * spot.scale).to(device=matrix.device, dtype=matrix.dtype)
        matrix[spot.rows.to(matrix.device)[:, None], spot.columns.to(matrix.device)] = values
    return matrix


def sized_hash(small_hash: str, shape: Shape, seed: int) -> str:
    """Thirty-two hexadecimal digits that name a sized model by what it is made from; no tensor is looked at."""
    return hashlib.sha256(f"sized {FORMAT_VERSION} {small_hash} {shape} {seed}".encode()).hexdigest()[:32]
