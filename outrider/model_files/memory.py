"""What is free of this machine's memory, and how much of it the keys and values of a model take on a CPU."""

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidRequest, ModelRefused

# What a cache takes where it may, though one context be less; and the share of what is free that it takes by itself:
# of two services on one machine each sees the same memory, and each needs some for its steps.
DEFAULT_KV_BYTES, CPU_MEMORY_SHARE = 512 << 20, 0.4
# Whole blocks of a cache, and fewer tokens than these serve no request.
BLOCK_TOKENS, LEAST_TOKENS = 16, 256
ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What was decided for a cache, and why."""

    num_tokens: int
    context_len: int
    """Most tokens of one session."""
    reason: str
    """Sentence without its full stop."""


def fit_cache(
    token_bytes: int,
    model_len: int,
    free_bytes: int | None,
    kv_tokens: int | None = None,
    context_len: int | None = None,
) -> CacheSize:
    """The size of a cache whose tokens take so many bytes, of a model that reads model_len tokens.

    free_bytes is what is free beside the weights, None if unknown. kv_tokens and context_len are what was asked
    for: it is taken as long as there is any room. Else the cache has room for one context, or 512 MiB, within a share
    of what is free, and a context is no longer than the cache. Raises InvalidRequest for what has no room, and
    ModelRefused where nothing has.
    """
    most = None if free_bytes is None else free_bytes // token_bytes
    free = "" if free_bytes is None else f"{gibibytes(free_bytes)} are free beside the weights"
    why = f": a token takes {gibibytes(token_bytes)}, and {free}"
    for name, asked in (("kv_tokens", kv_tokens), ("context_len", context_len if kv_tokens is None else None)):
        if asked is not None and most is not None and asked > most:
            raise InvalidRequest(name, asked, f"at most {most} here{why}")
    if most is not None and most < LEAST_TOKENS and kv_tokens is None:
        message = f"there is no room for a cache of {LEAST_TOKENS} tokens{why}"
        raise ModelRefused(message, free_bytes=free_bytes, token_bytes=token_bytes)
    longest = context_len or model_len
    wanted = max(DEFAULT_KV_BYTES // token_bytes // BLOCK_TOKENS, -(-longest // BLOCK_TOKENS)) * BLOCK_TOKENS
    room = wanted if most is None else max(LEAST_TOKENS, int(most * CPU_MEMORY_SHARE) // BLOCK_TOKENS * BLOCK_TOKENS)
    num_tokens = kv_tokens or max(min(wanted, room), context_len or 0)
    what, free = f"{num_tokens:,} tokens in {gibibytes(num_tokens * token_bytes)}", f"; {free}" if free else ""
    if kv_tokens is not None:
        return CacheSize(kv_tokens, longest, f"{what}, as asked for{free}")
    if num_tokens >= longest:
        return CacheSize(num_tokens, longest, f"{what}, room for a whole context of {longest:,}{free}")
    reason = f"{what}, {CPU_MEMORY_SHARE:.0%} of what is free, though the model reads {longest:,}{free}"
    return CacheSize(num_tokens, num_tokens, reason)


def available_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process may still take, by the system and by its control groups; None where none of them says.

    What files only have in memory because they were read counts as free.
    """
    info = _text(root / "proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", info, re.MULTILINE)
    known = [int(found[1]) * 1024] if found else []
    # In a container the path is the top of what it sees; elsewhere each group above may have a limit, too.
    own = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    group = top / own[1] if own and ".." not in own[1] else top
    for place in (group, *group.parents):
        limit, used = (_text(place / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdecimal() and used.isdecimal():
            files = re.findall(r"^(?:in)?active_file (\d+)$", _text(place / "memory.stat"), re.MULTILINE)
            known.append(max(0, int(limit) - int(used) + sum(map(int, files))))
        if place == top:
            break
    return min(known, default=None)


def _text(file: Path) -> str:
    """What a file of the system says; nothing where there is no such file."""
    try:
        return file.read_text()
    except OSError:
        return ""


def gibibytes(count: int) -> str:
    """A number of bytes in GiB, for people; fewer in MiB or KiB."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):.0f} KiB"
