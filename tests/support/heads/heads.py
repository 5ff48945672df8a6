"""Drafting heads with random weights, for targets that tests make."""

from pathlib import Path

import torch

from outrider.engine.heads.block_head import METHOD, BlockHead, BlockHeadConfig
from outrider.engine.heads.block_layouts import block_tensors
from outrider.engine.heads.feature_head import FeatureHead, FeatureHeadConfig, Fuse, feature_tensors
from outrider.engine.models.config import Masks, ModelConfig
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.rope import Rope
from outrider.engine.runner import ModelRunner


def random_head(
    target: ModelRunner,
    fuse: Fuse = Fuse.WIDE,
    seed: int = 0,
    context_len: int = 640,
    normed_residual: bool = False,
    feeds_normed: bool = False,
) -> FeatureHead:
    """An EAGLE-3 head over two taps with half of the target's vocabulary, an EAGLE-1 head, or an MTP layer."""
    parts = target.parts
    is_wide = fuse is Fuse.WIDE
    law = FeatureHeadConfig(
        method={Fuse.WIDE: "eagle3", Fuse.PAIR: "eagle1", Fuse.REVERSED: "mtp"}[fuse],
        taps=(1, 2) if is_wide else (parts.num_layers,),
        hidden_size=24 if is_wide else parts.hidden_size,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        norm_epsilon=1e-6,
        rope=Rope(theta=300.0),
        context_len=context_len,
        fuse=fuse,
        normed_residual=normed_residual,
        feeds_normed=feeds_normed,
    )
    vocab_size = parts.vocab_size
    required, optional = feature_tensors(law, 40, parts.hidden_size, vocab_size, vocab_size // 2)
    norms = ("embedding_norm", "state_norm", "out_norm")
    wanted = {
        Fuse.WIDE: (*norms, "embedding.", "features.weight", "head."),
        Fuse.PAIR: ("fuse.bias",),
        # With everything that there may be.
        Fuse.REVERSED: (*norms, "layer."),
    }[fuse]
    shapes = required | {name: shape for name, shape in optional.items() if name.startswith(wanted)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if is_wide:
        # Every other id: which of them the head means must not be what it counts.
        tensors["target_ids"] = torch.arange(vocab_size // 2) * 2 + 1
    return FeatureHead(law, {name: each.to(target.device) for name, each in tensors.items()}, parts, target.ops)


def random_block(target: ModelRunner, context_len: int = 640, block_size: int = 6, first_row: int = 1) -> BlockHead:
    """A DFlash drafter over one tap with half of the target's vocabulary; one of its two layers has a window."""
    parts = target.parts
    keys = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": parts.vocab_size,
        "hidden_size": parts.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 300.0,
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    law = BlockHeadConfig(
        method=METHOD,
        taps=(1,),
        layers=ModelConfig.of(JsonKeys(Path("config.json"), keys), frozenset()),
        masks=Masks(7, block_size, first_row),
        causal=(True, False),
        context_len=context_len,
    )
    required, optional = block_tensors(law, parts, parts.vocab_size // 2)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in (required | {"head.weight": optional["head.weight"]}).items()
    }
    tensors["target_ids"] = torch.arange(parts.vocab_size // 2) * 2 + 1
    return BlockHead(law, {name: each.to(target.device) for name, each in tensors.items()}, parts, target.ops)
