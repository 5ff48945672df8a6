"""A recorder of the functions that run in other Python processes.

It imports nothing of the project, because processes of any version of it run this file.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType

# What a request leaves to be done comes within this time.
AFTERWARDS_S = 0.5
PATIENCE_S, POLL_S = 60.0, 0.1
SIGNAL = signal.SIGUSR2


def record(folder: str) -> None:
    """Notes which functions of this process run; at every SIGNAL writes them to PID.ran in the folder and forgets them.

    It notes calls and returns, of C too, so that a loop that began long ago is noted as well.
    """
    ran: set[tuple[CodeType, str]] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        ran.add((frame.f_code, frame.f_globals.get("__name__", "")))

    def write(*_: object) -> None:
        found = []
        for code, module in ran.copy():
            # What is generated, such as __init__ of a dataclass, belongs to the module that it is in.
            owner = sys.modules.get(module) if code.co_filename == "<string>" else None
            found.append((getattr(owner, "__file__", code.co_filename), code.co_qualname))
        ran.clear()
        part = Path(folder, f"{os.getpid()}.part")
        part.write_text(json.dumps(found))
        part.rename(part.with_suffix(".ran"))

    signal.signal(SIGNAL, write)
    threading.setprofile(note)
    sys.setprofile(note)


def write_hook(folder: Path) -> None:
    """Lets Python processes that have the folder on their path be recorded."""
    hook = f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['record']({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(hook)


def window(folder: Path, pids: Mapping[str, int], body: Callable[[], None]) -> dict[str, set[tuple[str, str]]]:
    """Files and functions that ran in each recorded process while the body did, and just after it."""
    ran_since(folder, pids)
    body()
    time.sleep(AFTERWARDS_S)
    return ran_since(folder, pids)


def ran_since(folder: Path, pids: Mapping[str, int]) -> dict[str, set[tuple[str, str]]]:
    """Files and functions that ran in each recorded process since the last call. Raises TimeoutError."""
    found: dict[str, set[tuple[str, str]]] = {}
    for role, pid in pids.items():
        os.kill(pid, SIGNAL)
        file, asked_s = folder / f"{pid}.ran", time.monotonic()
        while not file.exists():
            if time.monotonic() > asked_s + PATIENCE_S:
                raise TimeoutError(f"{role} has not told what ran, after {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        found[role] = {(path, name) for path, name in json.loads(file.read_text())}
        file.unlink()
    return found
