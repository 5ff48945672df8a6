"""A trained head as files that other engines load too: safetensors in bfloat16, and a config.json.

eagle3 and mtp have the layout of speculators, medusa that of vLLM, and mlp_speculator the one of its authors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from outrider.errors import InvalidRequest
from training.heads import HeadShape

ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "mtp": "FastMTPSpeculator",
    "medusa": "MedusaModel",
    "mlp_speculator": "MLPSpeculatorPreTrainedModel",
}
METHODS = tuple(ARCHITECTURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles:
    """Contents of a head's files beside its weights."""

    method: str
    shape: HeadShape
    taps: tuple[int, ...]
    draft_ids: Tensor
    """Ids [V'] int64, rising."""
    target: str
    """Name that the target goes by."""
    target_config: LlamaConfig | Qwen3Config

    @classmethod
    def read(cls, folder: Path, target_config: LlamaConfig | Qwen3Config, option: str = "--head") -> Self:
        """Files of an eagle3 head as they were written. Raises InvalidRequest about any that are others than these."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            layer, named = config["transformer_layer_config"], config["speculators_config"]
            with safe_open(folder / "model.safetensors", "pt") as file:
                knows_all = "d2t" not in file.keys()  # noqa: SIM118 - what it opens is no mapping
                offsets = torch.zeros(target_config.vocab_size, dtype=torch.int64)
                offsets = offsets if knows_all else file.get_tensor("d2t")
            shape = HeadShape(
                hidden_size=layer["hidden_size"],
                num_heads=layer["num_attention_heads"],
                num_kv_heads=layer["num_key_value_heads"],
                head_dim=layer["head_dim"],
                intermediate_size=layer["intermediate_size"],
                steps_ahead=named["proposal_methods"][0]["speculative_tokens"],
                norm_epsilon=layer["rms_norm_eps"],
                rope_theta=layer["rope_theta"],
                context_len=layer["max_position_embeddings"],
            )
            taps, name = tuple(config["eagle_aux_hidden_state_layer_ids"]), named["verifier"]["name_or_path"]
        except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
            limit = f"an eagle3 head as models/train_head.py writes it: {error!r}"
            raise InvalidRequest(option, str(folder), limit) from error
        draft_ids = offsets + torch.arange(len(offsets))
        files = cls(
            method="eagle3", shape=shape, taps=taps, draft_ids=draft_ids, target=name, target_config=target_config
        )
        written = files.config
        other = next((key for key in {**written, **config} if written.get(key) != config.get(key)), None)
        if other is not None:
            limit = f"an eagle3 head of this target, as models/train_head.py writes it, whose {other} differs"
            raise InvalidRequest(option, str(folder), limit)
        return files

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the method's layout."""
        shape, target = self.shape, self.target_config
        own = {"architectures": [ARCHITECTURES[self.method]], "dtype": "bfloat16", "vocab_size": target.vocab_size}
        if self.method == "medusa":
            return own | {
                "model_type": "medusa",
                "hidden_size": shape.hidden_size,
                "num_heads": shape.steps_ahead,
                "num_hidden_layers": 1,
                "medusa_fc_bias": True,
                "truncated_vocab_size": target.vocab_size,
                # All heads have the one output matrix in the file, which is the target's.
                "original_lm_head": True,
            }
        if self.method == "mlp_speculator":
            return own | {
                "model_type": "mlp_speculator",
                "emb_dim": target.hidden_size,
                "inner_dim": shape.hidden_size,
                "n_predict": shape.steps_ahead,
                "n_candidates": 1,
                "top_k_tokens_per_head": [1] * shape.steps_ahead,
                "tie_weights": True,
                "scale_input": True,
            }
        del own["vocab_size"]
        method = {"proposal_type": "greedy", "speculative_tokens": shape.steps_ahead}
        speculators = {
            "speculators_model_type": self.method,
            "speculators_config": {
                "algorithm": self.method,
                "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": self.target, "architectures": target.architectures},
            },
            "transformer_layer_config": self._layer,
            "tie_word_embeddings": False,
        }
        if self.method == "mtp":
            return own | speculators | {"num_nextn_predict_layers": 1, "num_speculative_steps": shape.steps_ahead}
        return (
            own
            | speculators
            | {
                "draft_vocab_size": len(self.draft_ids),
                "target_hidden_size": target.hidden_size,
                "eagle_aux_hidden_state_layer_ids": list(self.taps),
                "norm_before_residual": False,
                "norm_before_fc": False,
                "fc_norm": False,
                "norm_output": False,
            }
        )

    @property
    def _layer(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.target_config.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_epsilon,
            # Where it is missing readers take 10,000.
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.context_len,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    def tensors(self, weights: Mapping[str, Tensor], output: Tensor) -> dict[str, Tensor]:
        """The file's, from a head's weights and the target's output matrix."""
        prefix = "speculator." if self.method == "mlp_speculator" else ""
        named = {prefix + name: tensor.to("cpu", torch.bfloat16) for name, tensor in weights.items()}
        if self.method == "medusa":
            named["lm_heads.0.weight"] = output.to("cpu", torch.bfloat16)
        vocab_size, draft_ids = self.target_config.vocab_size, self.draft_ids
        if len(draft_ids) < vocab_size:
            named["d2t"] = draft_ids - torch.arange(len(draft_ids))
            named["t2d"] = torch.isin(torch.arange(vocab_size), draft_ids)
        return named

    def write(self, weights: Mapping[str, Tensor], output: Tensor, folder: Path) -> None:
        """Writes both files into a new folder."""
        folder.mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors(weights, output).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        # The library makes it private, and services in containers run as another user.
        (folder / "model.safetensors").chmod(0o644)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
