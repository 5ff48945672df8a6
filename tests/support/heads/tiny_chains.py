"""Tiny random checkpoints of heads without attention of their own, one for each layout and flag, and their target."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.heads.head import TargetParts
from outrider.engine.ops import Ops

# No multiples of a register: 48 and 51 leave something over after whole vectors.
HIDDEN, VOCAB, NUM_LAYERS, CONTEXT_LEN, INNER = 48, 300, 2, 96, 51
Written = tuple[dict[str, Any], dict[str, Tensor], str]


class Random:
    """Tensors from one seed, of sizes that keep what they make near 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5

    def table(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def vector(self, size: int, mean: float = 0.0) -> Tensor:
        return mean + 0.3 * torch.randn(size, generator=self._generator)

    def linear(self, name: str, num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": self.matrix(num_outputs, num_inputs), f"{name}.bias": self.vector(num_outputs)}


def tiny_target(ops: Ops, dtype: torch.dtype = torch.float32) -> TargetParts:
    """Embedding and output matrix of a target that nothing else is needed of."""
    random = Random(100)
    embedding, output = random.table(VOCAB, HIDDEN).to(dtype), random.matrix(VOCAB, HIDDEN).to(dtype)
    return TargetParts(embedding, ops.stack([output]), NUM_LAYERS, CONTEXT_LEN)


def mlp_speculator(inner: int = INNER, tied: bool = False, copied: bool = False, **flags: object) -> Written:
    """Three cells; copied: tied ones are all in the file, as some writers leave them."""
    random, size, count = Random(1), inner or HIDDEN, 3
    tensors: dict[str, Tensor] = {}
    for index in range(count):
        made = {
            f"emb.{index}.weight": random.table(VOCAB, size),
            f"proj.{index}.weight": random.matrix(size, HIDDEN if index == 0 else size),
            f"head.{index}.weight": random.matrix(VOCAB, size),
            f"ln.{index}.weight": random.vector(size, 1.0),
            f"ln.{index}.bias": random.vector(size),
        }
        for name, tensor in made.items():
            kind, _, rest = name.partition(".")
            own = min(index, 1 if kind == "proj" else 0) if tied else index
            original = f"speculator.{kind}.{rest.replace(str(index), str(own), 1)}"
            if own == index or copied:
                tensors[f"speculator.{name}"] = tensor if own == index else tensors[original].clone()
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": count}
    config |= {"vocab_size": VOCAB, "emb_dim": HIDDEN, "inner_dim": inner, "tie_weights": tied}
    return config | {"top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5, **flags}, tensors, "model.safetensors"


def hydra(
    layers: int = 1,
    grounded: bool = True,
    prefixed: bool = False,
    embedding: bool = False,
    offset: int = 0,
    **keys: object,
) -> Written:
    """Three heads whose blocks are all different; embedding: with one of its own."""
    random, count = Random(2), 3
    tensors: dict[str, Tensor] = {}
    for index in range(count):
        for layer in range(layers):
            name, is_wide = f"hydra_mlp.{index}.{2 * layer + 1 if prefixed else layer}", grounded and layer == 0
            tensors |= random.linear(f"{name}.linear", HIDDEN, (2 + index) * HIDDEN if is_wide else HIDDEN)
            tensors |= random.linear(f"{name}.res_connection", HIDDEN, (2 + index) * HIDDEN) if is_wide else {}
        tensors |= random.linear(f"hydra_lm_head.{index}{'.1' if prefixed else ''}", VOCAB, HIDDEN)
    if embedding:
        tensors["input_embed_fn.weight"] = random.table(VOCAB, HIDDEN)
    config: dict[str, Any] = {"hydra_num_heads": count, "hydra_num_layers": layers, "grounded_heads": grounded}
    config |= {"hydra_head_arch": "prefix-mlp" if prefixed else "mlp", "hidden_state_offset": offset}
    if prefixed:
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 50.0, "rms_norm_eps": 1e-5}
        tensors |= _llama_layer(random)
    return config | keys, tensors, "hydra_lm_head.safetensors"


def _llama_layer(random: Random) -> dict[str, Tensor]:
    query, key, inner = 4 * 12, 2 * 12, 88
    sizes = {"self_attn.q_proj": (query, HIDDEN), "self_attn.k_proj": (key, HIDDEN), "self_attn.v_proj": (key, HIDDEN)}
    sizes |= {"self_attn.o_proj": (HIDDEN, query), "mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN)}
    layer, prefix = "prefix_embeding_layer.layers.0", "prefix_embeding_layer"
    tensors = {f"{layer}.{name}.weight": random.matrix(*shape) for name, shape in sizes.items()}
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", f"{prefix}.norm")
    return tensors | {
        f"{layer}.mlp.down_proj.weight": random.matrix(HIDDEN, inner),
        f"{layer}.self_attn.rotary_emb.inv_freq": random.vector(6),
        f"{prefix}.embed_tokens.weight": random.table(VOCAB, HIDDEN),
        **{f"{name}.weight": random.vector(HIDDEN, 1.0) for name in norms},
    }


def medusa(layers: int = 1, own: bool = True, **keys: object) -> Written:
    """Four heads, of which config.json says that they are two; own: with matrices of their own."""
    random = Random(3)
    tensors: dict[str, Tensor] = {}
    for index in range(4):
        for layer in range(layers):
            tensors |= random.linear(f"{index}.{layer}.linear", HIDDEN, HIDDEN)
        tensors |= {f"{index}.{layers}.weight": random.matrix(VOCAB, HIDDEN)} if own else {}
    return {"medusa_num_heads": 2, "medusa_num_layers": layers, **keys}, tensors, "medusa_lm_head.safetensors"


def vllm_medusa(
    known: int = VOCAB, whole: bool = False, bias: bool = False, original: str = "", **keys: object
) -> Written:
    """Three heads that know some tokens; whole: with rows for all; original: the name of the one matrix, or "none"."""
    random, count, layers = Random(4), 3, 2
    tensors: dict[str, Tensor] = {}
    for index in range(count):
        for layer in range(layers):
            made = random.linear(f"blocks.{index}.layers.{layer}", HIDDEN, HIDDEN)
            tensors |= {name: tensor for name, tensor in made.items() if bias or name.endswith("weight")}
    names = [f"lm_heads.{index}.weight" for index in range(count)]
    for name in {"": names, "none": []}.get(original, [original]):
        tensors[name] = random.matrix(VOCAB if whole else known, HIDDEN)
    if known < VOCAB:
        tensors["token_map"] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:known]
    config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": count}
    config |= {"num_hidden_layers": layers, "truncated_vocab_size": known, "medusa_fc_bias": bias}
    return config | {"original_lm_head": bool(original), **keys}, tensors, "model.safetensors"


def bpd(own: bool = False, **keys: object) -> Written:
    """Three heads; own: with an output matrix of their own."""
    random, count = Random(6), 3
    tensors = {"lm_head.weight": random.matrix(VOCAB, HIDDEN)} if own else {}
    for index in range(count):
        tensors |= random.linear(f"heads.{index}.up", INNER, HIDDEN) | random.linear(
            f"heads.{index}.down", HIDDEN, INNER
        )
    return {"drafter": "bpd", "num_heads": count, "intermediate_size": INNER, **keys}, tensors, "model.safetensors"


CHAINS: dict[str, Callable[[], Written]] = {
    "mlp": mlp_speculator,
    "mlp-as-wide": partial(mlp_speculator, inner=0),
    "mlp-narrow": partial(mlp_speculator, inner=21),
    "mlp-scaled": partial(mlp_speculator, scale_input=True),
    "mlp-tied": partial(mlp_speculator, tied=True),
    "mlp-tied-copies": partial(mlp_speculator, tied=True, copied=True, scale_input=True),
    "hydra": hydra,
    "hydra-blocks": partial(hydra, layers=3),
    "hydra-embedding": partial(hydra, embedding=True),
    "hydra-ungrounded": partial(hydra, layers=2, grounded=False, embedding=True),
    "hydra-lower": partial(hydra, offset=1),
    "hydra++": partial(hydra, layers=2, prefixed=True, embedding=True),
    "hydra++-ungrounded": partial(hydra, layers=2, prefixed=True, grounded=False),
    "medusa": medusa,
    "medusa-blocks": partial(medusa, layers=2),
    "medusa-shared": partial(medusa, own=False),
    "vllm": vllm_medusa,
    "vllm-bias": partial(vllm_medusa, bias=True),
    "vllm-map": partial(vllm_medusa, known=37),
    "vllm-map-whole": partial(vllm_medusa, known=37, whole=True),
    "vllm-original": partial(vllm_medusa, original="lm_heads.0.weight"),
    "vllm-original-map": partial(vllm_medusa, original="lm_head.weight", known=37, whole=True),
    "vllm-original-absent": partial(vllm_medusa, original="none"),
    "vllm-original-absent-map": partial(vllm_medusa, original="none", known=37),
    "bpd": bpd,
    "bpd-own": partial(bpd, own=True),
}


def write_chain(folder: Path, written: Written) -> Path:
    """Writes what one of the functions here made; returns the folder."""
    config, tensors, file = written
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / file)
    return folder
