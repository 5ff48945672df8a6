"""A tiny random drafting head in each public layout, as its publisher would write it, and a target for all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.heads.head import TargetParts

# Awkward on purpose: heads that do not add up to the hidden size, and widths that no two tensors share by chance.
HIDDEN, VOCAB, NUM_LAYERS, CONTEXT_LEN = 48, 90, 6, 256
NARROW, INNER, HEADS, GROUPS, HEAD_DIM, DRAFT_VOCAB = 36, 88, 4, 2, 16, 33

Shapes = dict[str, tuple[int, ...]]
Json = dict[str, Any]
Writer = Callable[[Path], Path]

SIZES: Json = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
}
FLAT: Json = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **SIZES}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_target(
    hidden: int = HIDDEN, vocab: int = VOCAB, num_layers: int = NUM_LAYERS, context_len: int = CONTEXT_LEN
) -> TargetParts:
    """What heads share with a random target; the two matrices differ."""
    generator = torch.Generator().manual_seed(11)
    embedding, output = (torch.randn(vocab, hidden, generator=generator) * 0.5 for _ in range(2))
    return TargetParts(embedding, output, num_layers, context_len)


def random_tensors(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Norms near 1 and biases away from 0, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.4)
        + (1.0 if "norm" in name else 0)
        for name, shape in shapes.items()
    }


def write_head(folder: Path, config: Json, tensors: dict[str, Tensor]) -> Path:
    """Writes config.json and model.safetensors; None as a value leaves a key out. Returns the folder."""
    folder.mkdir(parents=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(tensors, folder / "model.safetensors")
    return folder


def change(folder: Path, *, config: Json | None = None, tensors: dict[str, Tensor | None] | None = None) -> Path:
    """Changes a head's config.json and tensors; None takes a key or a tensor away. Returns the folder."""
    path, file = folder / "config.json", folder / "model.safetensors"
    keys = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    held = load_file(file) | (tensors or {})
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)
    return folder


def layer_shapes(before: str, hidden: int = HIDDEN, width: int = 1, *, biased: bool = False) -> Shapes:
    """One layer whose attention reads rows of `width` hidden sizes; without norms before the attention."""
    query, key = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    shapes: Shapes = {
        f"{before}self_attn.q_proj.weight": (query, width * hidden),
        f"{before}self_attn.k_proj.weight": (key, width * hidden),
        f"{before}self_attn.v_proj.weight": (key, width * hidden),
        f"{before}self_attn.o_proj.weight": (hidden, query),
        f"{before}mlp.gate_proj.weight": (INNER, hidden),
        f"{before}mlp.up_proj.weight": (INNER, hidden),
        f"{before}mlp.down_proj.weight": (hidden, INNER),
        f"{before}post_attention_layernorm.weight": (hidden,),
    }
    if biased:
        shapes |= {
            f"{before}self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (query, key, key), strict=True)
        }
    return shapes


def vocabulary_map(step: int = 2, first: int = 3) -> dict[str, Tensor]:
    """d2t and t2d of a head that knows every step-th id, with a gap in the middle."""
    ids = first + step * torch.arange(DRAFT_VOCAB)
    ids[DRAFT_VOCAB // 2 :] += 5
    reachable = torch.zeros(VOCAB, dtype=torch.bool)
    reachable[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": reachable}


def eagle1(
    folder: Path,
    *,
    bias: bool = True,
    para_norm: bool = False,
    input_norm: bool = False,
    embedding: bool = False,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    scale: float = 1.0,
) -> Path:
    """EAGLE 1 and 2 by their authors, and HASS with its two norms; with smaller weights it is less sure of itself."""
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes("layers.0.", hidden)}
    shapes |= {"fc.bias": (hidden,)} if bias else {}
    shapes |= {f"{name}_layernorm.weight": (hidden,) for name in ("embedding", "hidden_states") if para_norm}
    shapes |= {"layers.0.input_layernorm.weight": (hidden,)} if input_norm else {}
    shapes |= {"embed_tokens.weight": (vocab, hidden)} if embedding else {}
    config = FLAT | {"hidden_size": hidden, "vocab_size": vocab} | ({"add_para_norm": True} if para_norm else {})
    return write_head(folder, config, {name: scale * each for name, each in random_tensors(shapes, 1).items()})


def pass_embeddings(folder: Path, count: int = 3) -> Path:
    """PaSS's, as large as a token's."""
    rows = random_tensors({"pass_embeddings": (count, HIDDEN)}, seed=9)
    return write_head(folder, {"drafter": "pass"}, rows)


def speculators_config(kind: str, **keys: object) -> Json:
    """config.json as speculators writes it: the layer's sizes apart from the head's switches."""
    layer = {"model_type": "llama", **SIZES, "rope_theta": 10000.0}
    return {"speculators_model_type": kind, "speculators_version": "0.1", "transformer_layer_config": layer, **keys}


def eagle1_speculators(folder: Path, *, bias: bool = False, layernorms: bool = False) -> Path:
    """EAGLE 1 as speculators once converted it."""
    shapes = {"fusion_fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("transformer.")}
    shapes |= {"fusion_fc.bias": (HIDDEN,)} if bias else {}
    names = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
    shapes |= {f"{name}.weight": (HIDDEN,) for name in names if layernorms}
    config = speculators_config("eagle", fusion_bias=bias, layernorms=layernorms)
    return write_head(folder, config, random_tensors(shapes, 2))


def wide_shapes(layer: str, hidden: int = HIDDEN, *, taps: int = 3, draft_vocab: int = DRAFT_VOCAB) -> Shapes:
    """Tensors of an EAGLE 3 head, without its map."""
    shapes = {
        **layer_shapes(layer, hidden, 2),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    return shapes | ({"fc.weight": (hidden, taps * HIDDEN)} if taps else {})


def eagle3(folder: Path, *, narrow: bool = False, embedding: bool = False, config: Json | None = None) -> Path:
    """EAGLE 3 by its authors; narrower than its target as the one for 70B is."""
    hidden = NARROW if narrow else HIDDEN
    shapes = wide_shapes("midlayer.", hidden)
    shapes |= {"embed_tokens.weight": (VOCAB, hidden)} if narrow or embedding else {}
    sizes = {"hidden_size": hidden, "draft_vocab_size": DRAFT_VOCAB}
    sizes |= {"target_hidden_size": HIDDEN} if narrow else {}
    return write_head(folder, FLAT | sizes | (config or {}), random_tensors(shapes, 3) | vocabulary_map())


def eagle3_whole(folder: Path, *, zeros: bool = False) -> Path:
    """EAGLE 3 of the whole vocabulary; the one for Vicuna has maps of zeros."""
    tensors = random_tensors(wide_shapes("midlayer.", draft_vocab=VOCAB), 4)
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    return write_head(folder, FLAT | {"num_hidden_layers": 40}, tensors | (maps if zeros else {}))


def specforge(folder: Path, *, ids: tuple[int, ...] = (0, 2, 4), tap_norms: bool = False, **keys: object) -> Path:
    """EAGLE 3 by SpecForge and AngelSlim, which name layers whose outputs are read."""
    shapes = wide_shapes("midlayer.", taps=len(ids))
    shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(len(ids)) if tap_norms}
    eagle = {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}
    special = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, "eagle_config": eagle}
    return write_head(folder, FLAT | special | keys, random_tensors(shapes, 5) | vocabulary_map())


def eagle3_speculators(folder: Path, *, kind: str = "llama", ids: tuple[int, ...] = (1, 3, 4), **flags: bool) -> Path:
    """EAGLE 3 and 3.1 by speculators; the flags are config.json's, and bring their norms along."""
    shapes = wide_shapes("layers.0.", taps=len(ids))
    shapes |= {"input_norm.weight": (len(ids) * HIDDEN,)} if flags.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(len(ids)) if flags.get("fc_norm")}
    if kind == "qwen3":
        shapes |= {f"layers.0.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    config = speculators_config("eagle3", draft_vocab_size=DRAFT_VOCAB, **flags)
    config["eagle_aux_hidden_state_layer_ids"] = list(ids)
    config["transformer_layer_config"]["model_type"] = kind
    return write_head(folder, config, random_tensors(shapes, 6) | vocabulary_map())


def modelopt(folder: Path, *, taps: bool = True, wide: bool = True, last_norm: bool = True) -> Path:
    """EAGLE 3 by NVIDIA's Model Optimizer: of taps, of what leaves the final norm, and with one product before it."""
    eagle: Json = {"use_aux_hidden_state": taps, "use_last_layernorm": last_norm, "has_lm_head": True}
    if wide:
        shapes = wide_shapes("layers.0.", taps=3 if taps else 0)
        eagle |= {"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False}
    else:
        shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("layers.0."), "norm.weight": (HIDDEN,)}
        shapes |= {"layers.0.input_layernorm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
        eagle |= {"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False}
    if not last_norm:
        del shapes["norm.weight"]
    if taps:
        eagle["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    config = FLAT | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    tensors = random_tensors({f"model.{name}": shape for name, shape in shapes.items()}, 7)
    return write_head(folder, config | {"eagle_config": eagle}, tensors | vocabulary_map())


def mtp_shapes(before: str) -> Shapes:
    """Tensors of MiMo's layer."""
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    projected = {f"{before}input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    return projected | {f"{before}{name}.weight": (HIDDEN,) for name in norms} | layer_shapes(before, biased=True)


def mimo(folder: Path, *, modules: int = 1) -> Path:
    """MiMo: a target and its layer for multi-token prediction, in several files with an index."""
    keys = {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False, "head_dim": HEAD_DIM}
    write_tiny_model(folder, "qwen2", context_len=CONTEXT_LEN, max_shard_size="60KB", **keys)
    shapes: Shapes = {}
    for module in range(modules):
        shapes |= mtp_shapes(f"model.mtp_layers.{module}.")
    tensors = random_tensors(shapes, 8)
    save_file(tensors, folder / "mtp.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    # What the real one has, too: code of its own, which is never run.
    config |= {"architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    config |= {"model_type": "mimo", "num_nextn_predict_layers": modules}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mtp_speculators(folder: Path, *, kind: str = "qwen3") -> Path:
    """MiMo's names with the halves the other way round."""
    shapes = mtp_shapes("mtp_layers.0.")
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}
    shapes |= {f"mtp_layers.0.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    config = speculators_config("mtp", num_nextn_predict_layers=1)
    config["transformer_layer_config"]["model_type"] = kind
    return write_head(folder, config, random_tensors(shapes, 9))


def block_shapes(hidden: int = HIDDEN, *, layers: int = 3, taps: int = 2, biased: bool = False) -> Shapes:
    """Tensors of a DFlash drafter, whose matrices for tokens are the target's."""
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(layers):
        before = f"layers.{layer}."
        shapes |= layer_shapes(before, hidden, biased=biased) | {f"{before}input_layernorm.weight": (hidden,)}
        shapes |= {f"{before}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{before}self_attn.o_proj.bias": (hidden,)} if biased else {}
    return shapes


def dflash(
    folder: Path,
    *,
    layers: int = 3,
    ids: tuple[int, ...] = (3, 1),
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    mask: int = 7,
    block_size: int = 5,
    biased: bool = False,
    scale: float = 1.0,
    dflash_config: Json | None = None,
    **keys: object,
) -> Path:
    """DFlash by its authors, whose configuration is a Qwen 3's; with smaller weights it is less sure of itself."""
    tensors = random_tensors(block_shapes(hidden, layers=layers, taps=len(ids), biased=biased), 12)
    config: Json = {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "rope_theta": 1000000,
        "block_size": block_size,
        "tie_word_embeddings": True,
        "dflash_config": {"target_layer_ids": list(ids), "mask_token_id": mask, **(dflash_config or {})},
    }
    return write_head(folder, config | keys, {name: scale * each for name, each in tensors.items()})


def dflash_speculators(folder: Path, **keys: object) -> Path:
    """DFlash by speculators, which counts boundaries, and keeps an output matrix of the ids that it knows."""
    shapes = block_shapes(layers=2) | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
    config = speculators_config("dflash", draft_vocab_size=DRAFT_VOCAB, block_size=4, mask_token_id=3)
    config |= {"aux_hidden_state_layer_ids": [2, 5], "architectures": ["DFlashSpeculator"]}
    config["transformer_layer_config"] |= {"model_type": "qwen3", "num_hidden_layers": 2}
    config["transformer_layer_config"] |= keys.pop("layer", {})
    return write_head(folder, config | keys, random_tensors(shapes, 13) | vocabulary_map())
