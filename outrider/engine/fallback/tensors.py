"""Which tensor of the files is which of the model. Reads headers only, before anything is allocated."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from outrider.engine.fallback.configuration import first_line
from outrider.engine.fallback.survey import Unfit
from outrider.engine.weights import Shapes, StoredTensor, check_tensors


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names and shapes of what a model's files must and may hold, in the form in which files hold it."""

    expected: Shapes
    tied: Shapes
    """Those that are another one, and may be left out."""
    prefix: str
    """What the names of a base model begin with, with or without which files have them."""
    ignored: tuple[str, ...]
    """Patterns of what older files hold besides."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Of a model without numbers; raises Unfit when files cannot hold it."""
        try:
            # Mixtures of experts are stored one by one, and computed as one tensor.
            stored = revert_weight_conversion(model, dict(model.state_dict()))
        except Exception as error:  # what goes wrong with no expert at all has no common type
            raise Unfit(f"cannot be stored: {first_line(error)}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        tied = set(model.all_tied_weights_keys)
        return cls(
            {name: shape for name, shape in shapes.items() if name not in tied},
            {name: shape for name, shape in shapes.items() if name in tied},
            f"{model.base_model_prefix}.",
            tuple(model._keys_to_ignore_on_load_unexpected or ()),
        )

    def check(self, folder: Path, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
        """The stored tensors by the model's names; raises ModelRefused."""
        known = {self._name(tensor.name): tensor for tensor in stored if not self._is_ignored(tensor.name)}
        check_tensors(folder, known, self.expected, self.tied)
        return known

    def _name(self, stored: str) -> str:
        names = (stored, self.prefix + stored, stored.removeprefix(self.prefix))
        return next((name for name in names if name in self.expected or name in self.tied), stored)

    def _is_ignored(self, stored: str) -> bool:
        if self._name(stored) in self.expected:
            return False
        return any(re.search(pattern, stored) for pattern in self.ignored)
