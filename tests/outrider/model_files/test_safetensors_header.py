"""Headers of safetensors files: the verdict of the format's own package, and one sentence about what is unsound."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.errors import ModelRefused
from outrider.model_files.safetensors_header import read_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.ones(5),
    "c": torch.zeros(4, 1, 2, dtype=torch.int64),
    "d": torch.ones(3, dtype=torch.bool),
}
Header = dict[str, Any]


def written(file: Path) -> tuple[Header, bytes]:
    """A sound file's header and numbers."""
    save_file(TENSORS, file, {"format": "pt"})
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(file: Path, header: object, numbers: bytes) -> None:
    """A file of this header and these numbers."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def test_tensors_are_where_the_header_says(tmp_path: Path) -> None:
    """Names, shapes, types and bytes of all, in the order in which they lie."""
    file = tmp_path / "a.safetensors"
    written(file)
    data, found = file.read_bytes(), {each.name: each for each in read_header(file)}
    assert found.keys() == TENSORS.keys()
    assert [each.start for each in found.values()] == sorted(each.start for each in found.values())
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        stored = bytearray(data[found[name].start : found[name].start + found[name].size])
        assert torch.equal(torch.frombuffer(stored, dtype=tensor.dtype).view(tensor.shape), tensor)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda header: header["a"].pop("shape"), "does not say type, shape and place of 'a'"),
        (lambda header: header["a"].update(shape=[2, -3]), "does not say type, shape and place of 'a'"),
        (lambda header: header["a"].update(shape=[True, 6]), "does not say type, shape and place of 'a'"),
        (lambda header: header["a"].update(shape=[2, 4]), "cannot be those of 'a', BF16 [2, 4]"),
        (lambda header: header["b"].update(data_offsets=[0, 20]), "cannot be those of"),
        (lambda header: header["b"].update(data_offsets=[20, 0]), "cannot be those of 'b'"),
        (lambda header: header.update(a=[]), "does not say type, shape and place of 'a'"),
        (lambda header: header.pop("c"), "cannot be those of"),
        (lambda header: header.update({"\ud800": header.pop("a")}), "its header is not JSON"),
    ],
)
def test_what_is_unsound_is_one_sentence(tmp_path: Path, edit: Callable[[Header], object], words: str) -> None:
    """With the file and the tensor."""
    file = tmp_path / "a.safetensors"
    header, numbers = written(file)
    edit(header)
    write(file, header, numbers)
    with pytest.raises(ModelRefused) as caught:
        read_header(file)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{file} is not a sound safetensors file")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 1 << 62), struct.pack("<Q", 2) + b"[]", bytes(8)])
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes) -> None:
    """Whatever its length claims; and so is one that is not there."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(ModelRefused, match="is not a sound safetensors file"):
        read_header(file)
    file.unlink()
    with pytest.raises(ModelRefused, match="cannot be read"):
        read_header(file)


def is_sound(file: Path) -> bool:
    """The verdict of the format's own package."""
    try:
        with safe_open(file, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def test_nothing_is_taken_that_the_package_refuses(tmp_path: Path) -> None:
    """Of two thousand files with a byte of the header changed, or bytes added or cut off."""
    file, random = tmp_path / "a.safetensors", Random(0)
    written(file)
    whole = file.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    taken = refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        data[random.randrange(length)] = random.choice(b'0123456789[]{}",: \x00\xff' + bytes(range(97, 123)))
        change = random.randrange(8)
        data = data[: random.randrange(len(data))] if change == 0 else data + b"x" if change == 1 else data
        file.write_bytes(data)
        try:
            read_header(file)
            taken += 1
            assert is_sound(file), bytes(data[:length])
        except ModelRefused:
            refused += 1
    assert min(taken, refused) > 50
