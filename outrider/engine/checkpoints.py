"""From a model's name to its shape, tensors and digest: a folder, a hub id, or a sized model. Knows no runner."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from outrider.embedded_models import unsized
from outrider.engine.model_config import ModelConfig
from outrider.engine.sized import sized_hash, widen, widened
from outrider.engine.weights import expected_shapes, load_tensors, model_hash, resolve
from outrider.sized_presets import Shape, parse


class Checkpoint(Protocol):
    """A model that can be loaded."""

    @property
    def name(self) -> str:
        """What it is called in logs and facts."""

    @property
    def folder(self) -> Path:
        """Where its tokenizer lies."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""

    def load(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors on the device, matrices in dtype and vectors in float32. Raises ModelRefused."""

    def digest(self) -> str:
        """Hexadecimal digest that equal models share."""


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """Files on this machine."""

    name: str
    folder: Path
    config: ModelConfig

    @classmethod
    def find(cls, model: str) -> Self:
        """A folder, or a hub id; the name is its last part. Raises ModelRefused."""
        folder = resolve(model)
        name = folder.resolve().name if Path(model).expanduser().is_dir() else model
        return cls(name.rsplit("/", 1)[-1], folder, ModelConfig.read(folder))

    def load(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Reads the files."""
        return load_tensors(self.folder, self.config, device, dtype)

    def digest(self) -> str:
        """Of configuration and samples of the weights."""
        return model_hash(self.folder)


@dataclass(frozen=True, slots=True)
class SizedCheckpoint:
    """A small model inside a larger shape, made in memory."""

    name: str
    folder: Path
    """The small model."""
    shape: Shape
    seed: int
    config: ModelConfig

    @classmethod
    def of(cls, name: str, folder: Path, shape: Shape, seed: int) -> Self:
        """Raises ModelRefused when the small model does not fit into the shape."""
        return cls(name, folder, shape, seed, widened(ModelConfig.read(folder), shape))

    def tensors(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of one after the other; a bar on stderr shows progress when it is a terminal."""
        small = ModelConfig.read(self.folder)
        source = load_tensors(self.folder, small, torch.device("cpu"), torch.float32)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            made = widen(source, small, self.config, self.seed, device, dtype)
            yield from progress.track(made, len(expected_shapes(self.config)), description=f"Making {self.name}")

    def load(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Makes all tensors."""
        return dict(self.tensors(device, dtype))

    def digest(self) -> str:
        """Of the small model, the shape and the seed."""
        return sized_hash(model_hash(self.folder), self.shape, self.seed)


def find_checkpoint(model: str) -> Checkpoint:
    """The model that a name means, with its shape read and nothing loaded. Raises ModelRefused."""
    sized = parse(model)
    if sized is None:
        return FolderCheckpoint.find(model)
    return SizedCheckpoint.of(sized.name, Path(unsized(model)), sized.shape, sized.seed)
