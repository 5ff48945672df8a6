"""What Triton compiles a kernel for: a launch whose signature is new would be compiled on a card."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Of a model's matrices, each of which has a kernel of its own.
SIZES = {"num_inputs", "num_outputs", "size", "width"}

Part = tuple[object, ...]


def taken_apart(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Part, Part]:
    """What a launch is by its constants and types, and what makes a variant of that."""
    numbers = set(kernel.kwargs["do_not_specialize"] or ())
    places = set(kernel.kwargs["do_not_specialize_on_alignment"] or ())
    fixed, variant = [kernel.__name__], []
    for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | named).items():
        if isinstance(value, Tensor):
            fixed.append((name, value.dtype))
            if name not in places:
                variant.append((name, value.data_ptr() % 16 == 0))
        elif name.isupper() or name not in kernel.arg_names or name in SIZES:
            fixed.append((name, value))
        elif isinstance(value, int) and name not in numbers:
            variant.append((name, value == 1, value % 16 == 0))
    return tuple(fixed), tuple(variant)
