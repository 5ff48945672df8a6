"""Standard input, output and error of a process that may have been closed, may be full, or have lost their reader.

Without an output nothing starts. Without an input there is nothing to read, and without an error stream nobody to tell.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

IO_EXIT_CODE = 74
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
STDIN, STDOUT, STDERR = range(3)

NO_OUTPUT = "There is no standard output to write to; leave it open, or redirect it to a file or to /dev/null."
FULL_OUTPUT = "The output cannot be written: the disk or the quota is full."


@contextmanager
def checked_streams(prefix: str) -> Iterator[None]:
    """All three streams are there within it. Exits with 74 or 141 when the output is closed, full or without reader."""
    had_output = sys.stdout is not None
    _open_missing()
    if not had_output:
        _leave(f"{prefix}{NO_OUTPUT}", IO_EXIT_CODE)
    try:
        with _flushed():
            yield
    except SystemExit as ending:
        # The libraries that write help and tables exit by themselves, with 1, when their reader is gone.
        if isinstance(ending.__context__, BrokenPipeError):
            _leave("", BROKEN_PIPE_EXIT_CODE)
        raise
    except BrokenPipeError:
        _leave("", BROKEN_PIPE_EXIT_CODE)
    except OSError as error:
        if not is_lost_output(error):
            raise
        _leave(f"{prefix}{FULL_OUTPUT}", IO_EXIT_CODE)


def is_lost_output(error: BaseException) -> bool:
    """Whether an error says that the output cannot be written any more, which is no fault of ours."""
    return isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno in FULL)


@contextmanager
def _flushed() -> Iterator[None]:
    """Short outputs fail when they are flushed, which the interpreter would do too late to be told well."""
    try:
        yield
    finally:
        sys.stdout.flush()


def _open_missing() -> None:
    """Puts the null device in the place of every stream that was closed when the process began."""
    # Else the next files to be opened would get these numbers, and be read and written as if they were the streams.
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or _text(STDIN, "r")
    sys.stdout = sys.stdout or _text(STDOUT, "w")
    sys.stderr = sys.stderr or _text(STDERR, "w")


def _text(number: int, mode: str) -> io.TextIOWrapper:
    binary = io.FileIO(number, mode)
    buffered = io.BufferedReader(binary) if mode == "r" else io.BufferedWriter(binary)
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace")


def _leave(sentence: str, code: int) -> None:
    """Tells why, keeps the interpreter from writing to the output once more, and exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    if sentence:
        sys.stderr.write(f"{sentence}\n")
    sys.exit(code)
