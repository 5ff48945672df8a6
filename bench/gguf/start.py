"""How long a file takes from the start of a service to a first token, and the memory that the service has then."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gguf.lab import Llama
from bench.gguf.subjects import Subject
from outrider.cli.bench.common import markdown, spread
from outrider.cli.local_stack import start_stack
from outrider.cli.running import Interrupts, note, service_log
from outrider.client import AsyncClient, Speculation
from outrider.process.children import Supervisor

# So few that the cache is no part of the memory that counts.
KV_TOKENS = 512
PIECE_BYTES = 8 << 20
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Started:
    """Seconds until all serve and until the first token is there; bytes in memory then, and the most until then."""

    serves_s: float
    first_s: float
    resident_bytes: int
    peak_bytes: int


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory, and the most that it had."""
    told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", told, re.MULTILINE))
    return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10


def warm(file: Path) -> None:
    """Reads a file to its end, so that it lies in the system's memory where there is room."""
    with file.open("rb") as stream:
        while stream.read(PIECE_BYTES):
            pass


async def ours(subject: Subject, dtype: str, threads: int, interrupts: Interrupts) -> Started:
    """Target service and gateway, with nothing that guesses."""
    stack = replace(subject.stack(dtype, threads), draft=None, target_flags={}, kv_tokens=KV_TOKENS)
    [prompt] = await subject.prompts(0, 1)
    await asyncio.to_thread(warm, subject.file)
    began_s = time.perf_counter()
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        addresses = await start_stack(supervisor, stack)
        serves_s = time.perf_counter() - began_s
        async with AsyncClient(addresses.gateway) as client:
            plain = Speculation(enabled=False)
            await client.generate(prompt, max_tokens=1, speculation=plain, timeout_s=TIMEOUT_S).result()
        first_s = time.perf_counter() - began_s
        return Started(serves_s, first_s, *memory_of(supervisor.pid("target")))


async def theirs(subject: Subject, threads: int) -> Started:
    """llama.cpp in a process of its own, which maps the file."""
    [prompt] = await subject.prompts(0, 1)
    warm(subject.file)
    began_s = time.perf_counter()
    with Llama() as llama:
        llama.ask("load", file=str(subject.file), threads=threads)
        serves_s = time.perf_counter() - began_s
        llama.ask("generate", prompt=list(prompt), tokens=1)
        return Started(serves_s, time.perf_counter() - began_s, *memory_of(llama.pid))


async def measure(
    subject: Subject, dtype: str, threads: int, turns: int, interrupts: Interrupts
) -> dict[str, list[Started]]:
    """Starts of both, in turns."""
    found: dict[str, list[Started]] = {"ours": [], "llama.cpp": []}
    for turn in range(turns):
        note(f"{subject}, start {turn + 1} of {turns}")
        found["ours"].append(await ours(subject, dtype, threads, interrupts))
        found["llama.cpp"].append(await theirs(subject, threads))
    return found


def render(results: dict[Subject, dict[str, list[Started]]]) -> str:
    """A table with a row for each file and program."""
    rows = []
    for subject, sides in results.items():
        size = subject.file.stat().st_size
        for name, starts in sides.items():
            rows.append([str(subject), name, f"{size / 1e9:.2f}", *cells(starts, size)])
    head = [
        "file",
        "by",
        "GB",
        "serves, s",
        "first token, s",
        "resident over file",
        "peak over file",
        "resident - file, MB",
    ]
    words = f"From a file that was read before; a cache of {KV_TOKENS} tokens. Medians with quartiles."
    return f"{markdown(head, rows)}\n\n{words}"


def cells(starts: Sequence[Started], size: int) -> list[str]:
    """Times of a program and its memory over the file's bytes."""
    return [
        spread(each.serves_s for each in starts).show(".2f"),
        spread(each.first_s for each in starts).show(".2f"),
        spread(each.resident_bytes / size for each in starts).show(".2f"),
        spread(each.peak_bytes / size for each in starts).show(".2f"),
        spread((each.resident_bytes - size) / 1e6 for each in starts).show(".0f"),
    ]
