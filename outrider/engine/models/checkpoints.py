"""From a model's name to a decoder in memory: a folder, a GGUF file, a hub id, a sized model, or a simulated one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, Self

import torch

from outrider.engine.models.config import DecoderFacts, ModelConfig, is_ours
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.experts import are_packed
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.models.progress import Progress
from outrider.engine.models.simulated import SimulatedCheckpoint
from outrider.engine.models.sized import sized_hash, widen, widened
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import (
    BESIDE_BLOCKS,
    kept,
    load_tensors,
    model_hash,
    resolve,
    stored_tensors,
    weight_files,
)
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.native import NativeOps
from outrider.errors import ModelRefused
from outrider.model_files.drafter_layouts import refused_drafter
from outrider.model_files.gguf.files import HubName, model_stem
from outrider.model_files.model_names import Shape, parse, parse_simulated, tokenizer_source

# Imported by name, here and nowhere else, because an import at the top would make everybody pay: for transformers
# seconds and hundreds of megabytes, for what reads GGUF files a fiftieth of the start.
HF_MODELS = "outrider.engine.hf_models.checkpoint:find"
GGUF = "outrider.engine.models.gguf:GgufCheckpoint"


class Checkpoint(Protocol):
    """A model that can be loaded."""

    @property
    def name(self) -> str:
        """Name in logs and facts."""

    @property
    def folder(self) -> Path:
        """Place of its tokenizer: a folder, or a GGUF file."""

    @property
    def config(self) -> DecoderFacts: ...

    @property
    def modelling(self) -> str:
        """Library that computes the model, as it stands in the numerics id; empty for our own code."""

    @property
    def block_dtype(self) -> str:
        """Type of the weights that keeps the blocks of its files as they are; empty where they have none."""

    def build(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[Decoder, str]:
        """The model on a device, matrices in dtype and vectors in float32, and the digest of what it was made of.

        Without a dtype matrices are kept as the file has them, where it has blocks. Raises ModelRefused, and NotReady
        when its files change meanwhile.
        """

    def digest(self) -> str:
        """Hexadecimal digest that equal models share, of what there is now."""


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """Files on this machine, of a family that our own transformer knows."""

    name: str
    folder: Path
    config: ModelConfig
    modelling: str = ""

    @property
    def block_dtype(self) -> str:
        if not self.config.experts:
            return ""
        return "file" if are_packed(each.name for each in stored_tensors(weight_files(self.folder))) else ""

    def load(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[dict[str, Weight], str]:
        """All tensors, and the digest; reads the files. Raises ModelRefused and NotReady."""
        native = ops if dtype is None and isinstance(ops, NativeOps) else None
        return load_tensors(self.folder, self.config, device, dtype or BESIDE_BLOCKS, ops, native)

    def build(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[Decoder, str]:
        tensors, digest = self.load(device, dtype, ops)

        def remaining() -> int:
            # The transformer takes them out one by one.
            return sum(tensor.nbytes for tensor in list(tensors.values()))

        with Progress("arranging weights", self.name, remaining(), remaining):
            return Transformer(self.config, tensors, ops), digest

    def digest(self) -> str:
        return model_hash(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedCheckpoint(FolderCheckpoint):
    """A small model, that of the folder, inside a larger shape, made in memory."""

    shape: Shape
    seed: int

    @classmethod
    def of(cls, name: str, folder: Path, shape: Shape, seed: int) -> Self:
        """Raises ModelRefused when the small model does not fit into the shape."""
        return cls(name, folder, widened(ModelConfig.read(folder), shape), shape=shape, seed=seed)

    def load(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[dict[str, Weight], str]:
        dtype = dtype or BESIDE_BLOCKS
        small = ModelConfig.read(self.folder)
        source, small_hash = load_tensors(self.folder, small, torch.device("cpu"), torch.float32)
        made: dict[str, Weight] = {}
        with Progress("making weights", self.name, self.shape.parameter_count * dtype.itemsize) as progress:
            for name, tensor in widen(source, small, self.config, self.seed, device, dtype):
                made[name] = kept(ops, name, tensor)
                progress.done_bytes += tensor.nbytes
        return made, sized_hash(small_hash, self.shape, self.seed)

    def digest(self) -> str:
        return sized_hash(model_hash(self.folder), self.shape, self.seed)


def find_checkpoint(model: str) -> Checkpoint:
    """The model that a name means, with its shape read and nothing loaded. Raises ModelRefused."""
    sized, simulated = parse(model), parse_simulated(model)
    if simulated is not None:
        return SimulatedCheckpoint.of(simulated)
    if sized is not None:
        return SizedCheckpoint.of(sized.name, Path(tokenizer_source(model)), sized.shape, sized.seed)
    folder, given = resolve(model), Path(model).expanduser()
    # A file's suffix says nothing that a reader of logs would miss.
    own_name = model_stem(given.name) if given.is_file() else given.resolve().name
    hub = HubName.parse(model)
    hub_name = model_stem(hub.file) if hub.file else model.rsplit("/", 1)[-1]
    name = own_name if os.path.exists(given) else hub_name
    if folder.is_file():
        read: Callable[[str, Path], Checkpoint] = resolve_name(GGUF).of
        return read(name, folder)
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    refused = refused_drafter(keys.values)
    if refused is not None:
        raise ModelRefused(f"{folder} holds {refused}", folder=folder)
    if is_ours(keys):
        return FolderCheckpoint(name, folder, ModelConfig.read(folder))
    find: Callable[[str, Path], Checkpoint] = resolve_name(HF_MODELS)
    return find(name, folder)
