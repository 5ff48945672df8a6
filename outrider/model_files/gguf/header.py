"""The header of a GGUF file, versions 2 and 3, little-endian: metadata, and where each tensor lies.

The format is described in docs/gguf.md of the ggml project. Nothing in a file is believed: every count and length is
held against what the file has left before anything is read or allocated, so that a broken or hostile file costs one
sentence. What is read is all that stands before the tensors; of these themselves nothing.
"""

import math
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from outrider.errors import ModelRefused, shown
from outrider.model_files.gguf.files import part_names
from outrider.model_files.gguf.types import TYPES, BlockType, TensorType
from outrider.model_files.stamp import Stamp

MAGIC = b"GGUF"
# What llama.cpp's gguf-split says in each part of a model: which of how many it is, and how many tensors all have.
NUMBER, COUNT, TOTAL = "split.no", "split.count", "split.tensors.count"
VERSIONS = (2, 3)
# Above any model's: vocabularies have some 300,000 tokens, and about as many merges.
MAX_HEADER_BYTES, MAX_KEYS, MAX_TENSORS, MAX_VALUES = 256 << 20, 1 << 14, 1 << 17, 1 << 22
MAX_NAME_BYTES, MAX_DIMENSIONS, MAX_ALIGNMENT, DEFAULT_ALIGNMENT = 1 << 16, 4, 1 << 16, 32
BOOL, STRING, ARRAY = 7, 8, 9
BLOCK_DTYPES = {"file": 8, "file-a15": 15}
"""Types of weights that keep a file's blocks, and the bits of the activations that these are multiplied with."""
# Rounded to eight bits, activations lose more the smaller a model is, and its rows are cheap.
MOST_PARAMETERS_OF_SMALL = 500_000_000
# Type codes of array and struct by the format's number of a value's type; a boolean is one byte.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of one tensor: its shape, outermost dimension first, and the bytes of the file that hold it."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    size: int
    file: Path
    """File that holds the numbers: of a split model one of its parts."""

    @property
    def type(self) -> TensorType:
        return TYPES[self.type_id]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of a file. Arrays of numbers are `array.array`, those of strings lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]
    data_offset: int
    """End of the header, as far as tensors are concerned."""
    stamps: Mapping[Path, Stamp]
    """The files of a split model, in order, or the one file; and what each was when its header was read."""

    @property
    def block_dtype(self) -> str:
        """The one of BLOCK_DTYPES that suits the model; empty for a file without blocks."""
        if not any(isinstance(each.type, BlockType) for each in self.tensors.values()):
            return ""
        is_small = sum(math.prod(each.shape) for each in self.tensors.values()) <= MOST_PARAMETERS_OF_SMALL
        return "file-a15" if is_small else "file"

    @classmethod
    def read(cls, path: Path) -> Self:
        """With all parts of a split model, by the name of any of them; what it says of itself stands in the first.

        Raises ModelRefused for what is no GGUF file, of another version, truncated, or otherwise unsound, and where
        parts are missing or of another model.
        """
        one = cls._read_file(path)
        count = one.metadata.get(COUNT, 1)
        if type(count) is not int or count <= 1:
            return one
        names = part_names(path.name)
        if len(names) != count:
            fault = (
                f"is {shown(count)}, but the parts of a split model are called NAME-00001-of-{count:05d}.gguf and so on"
            )
            raise one.refuse(COUNT, fault)
        parts = [path.with_name(name) for name in names]
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            found = f"it lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
            raise ModelRefused(
                f"{path} is one of {count} parts of a model, and {found}", file=path.with_name(missing[0])
            )
        files = [one if part == path else cls._read_file(part) for part in parts]
        tensors: dict[str, TensorPlace] = {}
        for number, file in enumerate(files):
            said = file.metadata.get(NUMBER), file.metadata.get(COUNT)
            if said != (number, count):
                raise file.refuse(NUMBER, f"is {shown(said[0])} of {shown(said[1])}, but must be {number} of {count}")
            twice = next((name for name in file.tensors if name in tensors), None)
            if twice is not None:
                raise ModelRefused(f"{file.path} has the tensor {shown(twice)} of another part", file=file.path)
            tensors |= file.tensors
        total = files[0].metadata.get(TOTAL, len(tensors))
        if total != len(tensors):
            raise files[0].refuse(TOTAL, f"is {shown(total)}, but its parts have {len(tensors)}")
        stamps = {part: stamp for file in files for part, stamp in file.stamps.items()}
        return replace(files[0], tensors=tensors, stamps=stamps)

    @classmethod
    def _read_file(cls, path: Path) -> Self:
        try:
            with path.open("rb") as stream:
                return cls._read(_Cursor(path, stream, Stamp.of(stream)))
        except OSError as error:
            raise ModelRefused(f"{path} cannot be read: {error.strerror}", file=path) from None

    @classmethod
    def _read(cls, cursor: "_Cursor") -> Self:
        magic = cursor.take(len(MAGIC), "magic number")
        if magic != MAGIC:
            raise cursor.refuse(f"is not a GGUF file: it begins with {magic!r}, but must begin with {MAGIC!r}")
        version = int(cursor.number("I", "version"))
        if version not in VERSIONS:
            known = " or ".join(map(str, VERSIONS))
            if version >> 16:
                raise cursor.refuse(f"is big-endian, but must be a little-endian GGUF file of version {known}")
            raise cursor.refuse(f"has the version {version} of GGUF, but must have {known}")
        num_tensors = cursor.count("number of tensors", MAX_TENSORS)
        num_keys = cursor.count("number of metadata keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
            if key in metadata:
                raise cursor.refuse(f"has the metadata key {shown(key)} twice")
            metadata[key] = cursor.value(shown(key))
        found = [cursor.tensor(index) for index in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            fault = f"is {shown(alignment)}, but must be a power of two of at most {MAX_ALIGNMENT}"
            raise cursor.refuse(f'has a "general.alignment" that {fault}')
        data_offset = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        end = 0
        for tensor in sorted(found, key=lambda each: each.offset):
            if tensor.name in tensors:
                raise cursor.refuse(f"has the tensor {shown(tensor.name)} twice")
            if tensor.offset % alignment:
                fault = f"at the offset {tensor.offset}, which is no multiple of {alignment}"
                raise cursor.refuse(f"has the tensor {shown(tensor.name)} {fault}")
            if tensor.offset < end:
                fault = f"at the offset {tensor.offset}, within the tensor before it, which ends at {end}"
                raise cursor.refuse(f"has the tensor {shown(tensor.name)} {fault}")
            end = tensor.offset + tensor.size
            start = data_offset + tensor.offset
            if start + tensor.size > (num_bytes := cursor.stamp.num_bytes):
                fault = f"that ends at byte {start + tensor.size:,}, but it has only {num_bytes:,}"
                raise cursor.refuse(f"is truncated: it has the tensor {shown(tensor.name)} {fault}")
            tensors[tensor.name] = TensorPlace(
                tensor.name, tensor.shape, tensor.type_id, start, tensor.size, cursor.path
            )
        return cls(cursor.path, metadata, tensors, data_offset, {cursor.path: cursor.stamp})

    def refuse(self, key: str, fault: str) -> ModelRefused:
        return ModelRefused(f'{self.path}: "{key}" {fault}', file=self.path, key=key)


@dataclass(slots=True)
class _Cursor:
    """Reads a header from its beginning, never past its end."""

    path: Path
    stream: BinaryIO
    stamp: Stamp
    position: int = 0
    num_values: int = 0

    def refuse(self, fault: str) -> ModelRefused:
        return ModelRefused(f"{self.path} {fault}", file=self.path)

    def take(self, length: int, what: str) -> bytes:
        left = self.stamp.num_bytes - self.position
        if length > left:
            raise self.refuse(f"is truncated: {what} takes {length:,} bytes, but only {left:,} are left")
        self.position += length
        if self.position > MAX_HEADER_BYTES:
            raise self.refuse(f"has a header of more than {MAX_HEADER_BYTES:,} bytes, at {what}")
        data = self.stream.read(length)
        if len(data) < length:
            raise self.refuse(f"became shorter while {what} was read")
        return data

    def number(self, code: str, what: str) -> int | float:
        found: int | float = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]
        return found

    def count(self, what: str, maximum: int) -> int:
        found = int(self.number("Q", what))
        if found > maximum:
            raise self.refuse(f"has {found:,} as its {what}, but there may be {maximum:,}")
        return found

    def string(self, what: str, maximum: int = MAX_HEADER_BYTES) -> str:
        length = int(self.number("Q", what))
        if length > maximum:
            raise self.refuse(f"has {length:,} bytes in {what}, but there may be {maximum:,}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.refuse(f"has bytes in {what} that are not UTF-8") from None

    def value(self, key: str) -> Any:  # noqa: ANN401 - what the format can hold
        kind = int(self.number("I", f"the type of {key}"))
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            if kind not in NUMBERS:
                raise self.refuse(f"has the type {kind} for {key}, which GGUF does not know")
            found = self.number(NUMBERS[kind], key)
            return bool(found) if kind == BOOL else found
        kind, count = int(self.number("I", f"the type of {key}")), int(self.number("Q", f"the length of {key}"))
        self.num_values += count
        if self.num_values > MAX_VALUES:
            raise self.refuse(f"has more than {MAX_VALUES:,} values in arrays, at {key}")
        if kind == STRING:
            return [self.string(key) for _ in range(count)]
        if kind not in NUMBERS:
            raise self.refuse(f"has an array of the type {kind} in {key}, but only numbers and strings are read")
        numbers = array(NUMBERS[kind])
        numbers.frombytes(self.take(count * numbers.itemsize, key))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def tensor(self, index: int) -> TensorPlace:
        """Place of the tensor at an index; its offset is that in the file's data, which begins after the header."""
        name = self.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        what = f"the tensor {shown(name)}"
        num_dimensions = int(self.number("I", what))
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise self.refuse(f"has {num_dimensions} dimensions for {what}, but there may be 1 to {MAX_DIMENSIONS}")
        # The format's order is innermost first.
        shape = tuple(int(self.number("Q", what)) for _ in range(num_dimensions))[::-1]
        type_id, offset = int(self.number("I", what)), int(self.number("Q", what))
        if type_id not in TYPES:
            names = ", ".join(each.name for each in TYPES.values())
            raise self.refuse(f"has the type {type_id} for {what}, but it must be one of {names}")
        kind = TYPES[type_id]
        if 0 in shape or shape[-1] % kind.block_len:
            rows = f"rows of a multiple of {kind.block_len} numbers"
            raise self.refuse(f"has the shape {list(shape)} for {what}, but {kind.name} needs {rows}")
        size = kind.row_bytes(math.prod(shape))
        return TensorPlace(name, shape, type_id, offset, size, self.path)
