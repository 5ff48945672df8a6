"""How a cache is fitted to the memory there is, and what systems and containers say of it."""

from pathlib import Path

import pytest

from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.memory import CacheSize, available_bytes, fit_cache, gibibytes

# Llama 3.1 8B's keys and values in float32.
TOKEN_BYTES, CONTEXT_LEN = 256 << 10, 131_072
GIB = 1 << 30


def size(fit: CacheSize) -> tuple[int, int]:
    """Tokens of the cache, and of a session."""
    return fit.num_tokens, fit.context_len


@pytest.mark.parametrize(
    ("model_len", "free", "expected", "words"),
    [
        (1000, 64 * GIB, (2048, 1000), "2,048 tokens in 512 MiB, room for a whole context of 1,000"),
        (131_072, 100 * GIB, (131_072, 131_072), "131,072 tokens in 32.0 GiB, room for a whole context of 131,072"),
        (131_072, 10 * GIB, (16_384, 16_384), "16,384 tokens in 4.0 GiB, 40% of what is free, though the model reads"),
        (
            1000,
            GIB,
            (1632, 1000),
            "1,632 tokens in 408 MiB, room for a whole context of 1,000; 1.0 GiB are free beside",
        ),
        (1000, 100 << 20, (256, 256), "256 tokens in 64 MiB, 40% of what is free, though the model reads 1,000"),
        (131_072, None, (131_072, 131_072), "131,072 tokens in 32.0 GiB, room for a whole context of 131,072"),
    ],
)
def test_a_cache_has_room_for_one_context_or_what_is_there(
    model_len: int, free: int | None, expected: tuple[int, int], words: str
) -> None:
    """At least 512 MiB where they are free; and no session is longer than the cache."""
    found = fit_cache(TOKEN_BYTES, model_len, free)
    assert size(found) == expected
    assert found.reason.startswith(words)


def test_what_is_asked_for_is_taken_as_long_as_there_is_room() -> None:
    """More than by default, or less; a context takes a cache of its length."""
    assert size(fit_cache(TOKEN_BYTES, CONTEXT_LEN, 10 * GIB, kv_tokens=40_960)) == (40_960, CONTEXT_LEN)
    assert size(fit_cache(TOKEN_BYTES, CONTEXT_LEN, 10 * GIB, kv_tokens=16, context_len=8)) == (16, 8)
    assert size(fit_cache(TOKEN_BYTES, CONTEXT_LEN, 10 * GIB, context_len=40_960)) == (40_960, 40_960)
    assert size(fit_cache(TOKEN_BYTES, CONTEXT_LEN, 10 * GIB, context_len=100)) == (2048, 100)
    assert size(fit_cache(TOKEN_BYTES, CONTEXT_LEN, None, kv_tokens=10**9)) == (10**9, CONTEXT_LEN)


@pytest.mark.parametrize("name", ["kv_tokens", "context_len"])
def test_what_has_no_room_is_refused_by_name_value_and_limit(name: str) -> None:
    """With what a token takes and what is free."""
    with pytest.raises(InvalidRequest) as refused:
        fit_cache(TOKEN_BYTES, CONTEXT_LEN, 10 * GIB, **{name: 40_961})
    assert refused.value.message == (
        f"{name} is 40961, but must be at most 40960 here: a token takes 256 KiB, and 10.0 GiB are free beside the "
        "weights"
    )


def test_without_any_room_the_model_is_refused() -> None:
    """A cache of a few tokens would serve nobody."""
    with pytest.raises(ModelRefused, match="no room for a cache of 256 tokens: a token takes 256 KiB, and 63 MiB are"):
        fit_cache(TOKEN_BYTES, CONTEXT_LEN, 63 << 20)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine that says this in its files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


INFO = {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable:   4096000 kB\n"}
STAT = "anon 1\nfile 800\nactive_file 300\ninactive_file 500\n"
TOP, SLICE = "sys/fs/cgroup", "sys/fs/cgroup/user.slice"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (INFO, 4096000 << 10),
        # A container, and what it has read of files.
        (INFO | {f"{TOP}/memory.max": "10000\n", f"{TOP}/memory.current": "9000\n"}, 1000),
        (
            INFO
            | {f"{TOP}/memory.max": "10000\n", f"{TOP}/memory.current": "9000\n", f"{TOP}/memory.stat": STAT}
            | {"proc/self/cgroup": "0::/\n"},
            1800,
        ),
        ({f"{TOP}/memory.max": "10000\n", f"{TOP}/memory.current": "12000\n"}, 0),
        (INFO | {f"{TOP}/memory.max": "max\n", f"{TOP}/memory.current": "9000\n"}, 4096000 << 10),
        # A limit of the group above counts as well.
        (
            {"proc/self/cgroup": "0::/user.slice/app.scope\n"}
            | {f"{SLICE}/memory.max": "5000", f"{SLICE}/memory.current": "1000"}
            | {f"{SLICE}/app.scope/memory.max": "8000", f"{SLICE}/app.scope/memory.current": "500"},
            4000,
        ),
        # What lies outside of what a container sees.
        (INFO | {"proc/self/cgroup": "0::/../../other\n"}, 4096000 << 10),
    ],
)
def test_what_is_free_is_the_least_of_what_system_and_groups_say(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    """None where nothing says it."""
    assert available_bytes(machine(tmp_path, files)) == expected


def test_bytes_for_people() -> None:
    """In the unit that has few digits."""
    assert [gibibytes(count) for count in (3 << 29, 92 << 20, 45 << 10, 0)] == ["1.5 GiB", "92 MiB", "45 KiB", "0 KiB"]
