"""A model that transformers knows and our own transformer does not: found, checked, and built on demand."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outrider.engine.fallback.configuration import PACKAGE, context_len, model_class, read_configuration
from outrider.engine.fallback.decoder import FallbackConfig, FallbackDecoder
from outrider.engine.fallback.loading import load, straighten, without_numbers
from outrider.engine.fallback.probe import rows_are_independent
from outrider.engine.fallback.survey import Unfit, survey
from outrider.engine.fallback.tensors import TensorNames
from outrider.engine.json_keys import JsonKeys, read_json
from outrider.engine.model_config import read_eos_token_ids
from outrider.engine.ops import Ops
from outrider.engine.weights import model_hash, stored_tensors
from outrider.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class FallbackCheckpoint:
    """Files on this machine; see outrider.engine.checkpoints.Checkpoint."""

    name: str
    folder: Path
    config: FallbackConfig
    kind: type[PreTrainedModel]
    configuration: PretrainedConfig
    tensors: TensorNames
    modelling: str = f"{PACKAGE}-torch-{torch.__version__.split('+')[0]}"
    """Both compute parts of a forward, and another version may do so with other low bits."""

    def build(self, device: torch.device, dtype: torch.dtype, ops: Ops) -> FallbackDecoder:
        """Reads the files; raises ModelRefused before it does where their headers do not fit."""
        stored = self.tensors.check(self.folder, stored_tensors(self.folder))
        model = load(self.kind, self.configuration, self.folder, stored, (device, dtype, ops))
        decoder = FallbackDecoder(self.config, model, ops)
        if device.type == "cpu" and not rows_are_independent(decoder):
            raise ModelRefused(f"{self.folder}: {self.kind.__name__} computes other bits for a row in other company")
        return decoder

    def digest(self) -> str:
        """Of configuration and samples of the weights."""
        return model_hash(self.folder)


def find(name: str, folder: Path) -> FallbackCheckpoint:
    """The model in a folder, with its shape read and nothing loaded. Raises ModelRefused."""
    if (folder / "adapter_config.json").exists():
        raise ModelRefused(f"{folder} is an adapter of another model; only whole models are served", folder=folder)
    configuration = read_configuration(folder)
    kind = model_class(folder)
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    limits = context_len(folder, configuration), read_eos_token_ids(folder, keys)
    try:
        model = without_numbers(kind, configuration)
        tensors = TensorNames.of(model)
        straighten(model)
        shape = survey(model)
    except Unfit as error:
        raise ModelRefused(f"{folder}: {kind.__name__} {error}", folder=folder) from error
    sizes = shape.vocab_size, shape.num_layers, shape.num_kv_heads, shape.head_dim
    return FallbackCheckpoint(name, folder, FallbackConfig(*sizes, *limits), kind, configuration, tensors)
