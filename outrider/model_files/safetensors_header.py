"""The header of a safetensors file: the names, types, shapes and places of its tensors.

The format is described in README.md of huggingface/safetensors. As there, tensors follow each other without gaps up to
the end of the file, and nothing is believed before it is held against that.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ModelRefused, shown
from outrider.model_files.stamp import Stamp

# Experts in MXFP4: two weights of four bits a byte, and their powers of two, in tensors of these endings.
MXFP4, BLOCKS, SCALES = "MXFP4", "_blocks", "_scales"
# At most this long in the format's own reader.
MAX_HEADER_BYTES = 100_000_000
# Bits of a number, of all types that the format knows.
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it: its bytes are `size` from `start` on."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int
    stamp: Stamp
    """Stamp of the file when its header was read."""

    def refuse(self, fault: str) -> ModelRefused:
        return ModelRefused(f"{self.file}: {self.name} {fault}", file=self.file, tensor=self.name)


def read_header(file: Path) -> list[StoredTensor]:
    """All tensors of a file, in the order of their bytes. Raises ModelRefused for one that is truncated or unsound."""
    try:
        with file.open("rb") as stream:
            stamp = Stamp.of(stream)
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, stamp.num_bytes - 8):
                raise _unsound(file, f"it has {stamp.num_bytes:,} bytes and a header of {length:,}")
            entries = json.loads(stream.read(length))
        if not isinstance(entries, dict):
            raise _unsound(file, "its header is no JSON object")
        # Half a character cannot be written into any message.
        "".join(entries).encode()
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}", file=file) from None
    except (ValueError, RecursionError):
        raise _unsound(file, "its header is not JSON") from None
    entries.pop("__metadata__", None)
    begin, found = 8 + length, []
    for name, entry in entries.items():
        shape, offsets = _numbers(entry, "shape"), _numbers(entry, "data_offsets")
        if shape is None or offsets is None or len(offsets) != 2 or str(entry.get("dtype")) not in ITEM_BITS:
            raise _unsound(file, f"its header does not say type, shape and place of {shown(name)}")
        first, end = offsets
        found.append(StoredTensor(file, name, shape, entry["dtype"], begin + first, end - first, stamp))
    found.sort(key=lambda tensor: (tensor.start, tensor.size))
    for tensor in found:
        needed_bits = math.prod(tensor.shape) * ITEM_BITS[tensor.dtype]
        if tensor.start != begin or 8 * tensor.size != needed_bits:
            fault = f"bytes {tensor.start:,} to {tensor.start + tensor.size:,} cannot be those of {shown(tensor.name)}"
            raise _unsound(file, f"{fault}, {tensor.dtype} {list(tensor.shape)}")
        begin += tensor.size
    if begin != stamp.num_bytes:
        raise _unsound(file, f"it has {stamp.num_bytes:,} bytes, but its header describes {begin:,}")
    return found


def _numbers(entry: object, key: str) -> tuple[int, ...] | None:
    """A list of whole numbers of at least 0 among the values of a tensor; None for anything else."""
    values: Any = entry.get(key) if isinstance(entry, Mapping) else None
    is_sound = isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)
    return tuple(values) if is_sound else None


def _unsound(file: Path, fault: str) -> ModelRefused:
    return ModelRefused(f"{file} is not a sound safetensors file: {fault}", file=file)
