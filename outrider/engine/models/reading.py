"""One pass over the files of a model: every byte goes into a digest, and those of its tensors to who asked for them.

So the digest is that of the very bytes that are in memory, and a file is read once. Files are read and not mapped:
what is in memory is there once, and the system may forget the files. While a piece is taken, the next one is read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from outrider.engine.models.progress import Progress
from outrider.errors import NotReady
from outrider.model_files.stamp import Stamp

# Read at once, so that it is still in the processor's caches when it is hashed and taken; memory holds two of them.
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file that hold one tensor."""

    name: str
    start: int
    size: int
    unit: int
    """Number of bytes that are never cut apart."""


class FilePiece(NamedTuple):
    """Bytes of one tensor, which hold until the next piece is asked for."""

    span: FileSpan
    first: int
    """Place of the first byte in the span."""
    data: Tensor
    """Bytes that were read, uint8 [bytes]."""

    @property
    def is_last(self) -> bool:
        return self.first + len(self.data) == self.span.size


class _Cut(NamedTuple):
    """Bytes that are read at once: of a span, or of what lies between."""

    span: FileSpan | None
    first: int
    size: int


def no_label(_file: Path, _num_bytes: int) -> bytes:
    """Lets files go into a digest one after the other, whatever their names."""
    return b""


def read_pieces(
    files: Mapping[Path, Stamp],
    spans: Mapping[Path, Sequence[FileSpan]],
    digest: blake3,
    label: Callable[[Path, int], bytes] = no_label,
) -> Iterator[FilePiece]:
    """Reads files from their beginnings to their ends, takes them into a digest, and gives the pieces of the spans.

    The spans of a file may not overlap. A label, made of a file and its size, enters the digest before the file. Raises
    NotReady when a file is not that of its stamp, or is written to meanwhile.
    """
    action = "reading weights" if any(spans.values()) else "hashing weights"
    # One thread, because the bytes of a digest have an order.
    with (
        Progress(action, "", sum(stamp.num_bytes for stamp in files.values())) as progress,
        ThreadPoolExecutor(1, action) as reader,
    ):
        for file, stamp in files.items():
            progress.file = file.name
            try:
                opened = FileIO(file)
            except OSError as error:
                raise NotReady(f"{file} cannot be read any more: {error.strerror}", file=str(file)) from None
            with opened as stream:
                stamp.check(stream, file)
                digest.update(label(file, stamp.num_bytes))
                cuts = list(_cuts(stamp.num_bytes, spans.get(file, ())))
                if not cuts:
                    continue
                fetch = _fetching(stream.readinto, digest, [cut.size for cut in cuts], file)
                ahead = reader.submit(fetch, 0)
                for number, (span, first, size) in enumerate(cuts, 1):
                    data = ahead.result()
                    ahead = reader.submit(fetch, number) if number < len(cuts) else ahead
                    if span is not None:
                        yield FilePiece(span, first, data)
                    progress.done_bytes += size
                stamp.check(stream, file)


def _fetching(
    readinto: Callable[[memoryview], int | None], digest: blake3, sizes: Sequence[int], file: Path
) -> Callable[[int], Tensor]:
    """What reads the next bytes of a file, given the number of their size; they hold until the next but one."""
    room = max(sizes, default=0)
    buffers = torch.empty(room, dtype=torch.uint8), torch.empty(room, dtype=torch.uint8)

    def fetch(number: int) -> Tensor:
        data = buffers[number % 2][: sizes[number]]
        view = data.numpy().data
        done = 0
        while done < len(view):
            count = readinto(view[done:])
            if not count:
                raise NotReady(f"{file} became shorter while the model was loaded from it", file=str(file))
            done += count
        digest.update(view)
        return data

    return fetch


def _cuts(num_bytes: int, spans: Sequence[FileSpan]) -> Iterator[_Cut]:
    """All bytes of a file, in their order."""
    end = 0
    for span in sorted(spans, key=lambda each: each.start):
        yield from _between(end, span.start)
        step = max(1, PIECE_BYTES // span.unit) * span.unit
        for first in range(0, span.size, step):
            yield _Cut(span, first, min(step, span.size - first))
        end = span.start + span.size
    yield from _between(end, num_bytes)


def _between(start: int, end: int) -> Iterator[_Cut]:
    for first in range(start, end, PIECE_BYTES):
        yield _Cut(None, first, min(PIECE_BYTES, end - first))
