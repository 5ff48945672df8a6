"""Processes as /proc shows them. What has ended meanwhile is not there, and no fault."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> dict[int, list[str]]:
    """The words with which each child of a process was started, by its id."""
    found: dict[int, list[str]] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end while it is looked at.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text().split()):
                # One that has ended and is not waited for yet has no words.
                if words := command_words(child):
                    found[child] = words
    return found


def command_words(pid: int) -> list[str]:
    """The words with which a process was started; none when it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []
