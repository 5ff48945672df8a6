"""Whether an opened file is the one that was read before, and has not been written to since."""

import os
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple, Self

from outrider.errors import NotReady


class Stamp(NamedTuple):
    """Distinguishes a file, wherever it lies now, from another one, and itself with other bytes and another time."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: IO[bytes] | FileIO | Path) -> Self:
        """Stamp of an open file, whatever comes to lie under its name later, or of what lies under a name now."""
        found = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check(self, stream: IO[bytes] | FileIO, file: Path) -> None:
        """Raises NotReady when the open file of that name has another stamp."""
        if self != Stamp.of(stream):
            raise NotReady(f"{file} was changed while the model was loaded from it", file=str(file))
