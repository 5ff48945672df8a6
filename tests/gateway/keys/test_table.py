"""The file of keys: what it may say, and the sentence about what it may not, which never repeats a key."""

import hashlib
from pathlib import Path

import pytest
from support.keys import key_of, table_of, write_keys

from gateway.keys.table import MAX_KEYS, KeyLimits, KeysRefused, find_key, parse_keys, read_file

DIGEST, SECRET = (hashlib.sha256(text).hexdigest() for text in (b"any", b"sk-secret"))


def test_a_file_lists_names_hashes_and_limits(tmp_path: Path) -> None:
    """What is not limited is None, and only who is said to may read the figures."""
    path = write_keys(
        tmp_path / "keys.toml", alice={"requests_per_minute": 60, "max_tokens": 512}, bob={"metrics": True}
    )
    alice, bob = parse_keys(read_file(Path(path)), path)
    assert (alice.name, alice.limits, alice.metrics) == (
        "alice",
        KeyLimits(requests_per_minute=60, max_tokens=512),
        False,
    )
    assert (bob.name, bob.limits, bob.metrics) == ("bob", KeyLimits(), True)


def test_a_priority_is_any_whole_number() -> None:
    """Also below 0, which is that of a key for which none is said."""
    tables = table_of("alice", priority=-5) + table_of("bob") + table_of("nightly", priority=10**9)
    assert [key.priority for key in parse_keys(tables.encode(), "keys.toml")] == [-5, 0, 10**9]


def test_a_key_is_found_by_its_text_alone() -> None:
    """Neither a name, nor a hash, nor a part of a key, nor nothing opens."""
    keys = parse_keys((table_of("alice") + table_of("bob")).encode(), "keys.toml")
    found = [find_key(keys, key_of(name).encode()) for name in ("alice", "bob")]
    assert [key.name for key in found if key] == ["alice", "bob"]
    for wrong in ("alice", keys[0].sha256.hex(), key_of("alice")[:-1], key_of("alice") + " ", ""):
        assert find_key(keys, wrong.encode()) is None
    assert find_key(keys, keys[0].sha256) is None


def test_a_hash_is_not_shown() -> None:
    """Not even where a key is printed by mistake."""
    [key] = parse_keys(table_of("alice").encode(), "keys.toml")
    assert "alice" in repr(key)
    assert repr(key.sha256) not in repr(key)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[a]\nsha256 = @", ["not TOML", "line 2"]),
        (b"[a]\nsha256 = '\xff'", ["not TOML in UTF-8"]),
        ("sk-secret = 'sk-secret'", ["value of entry 1 is text", "must be a table"]),
        ("[a]", ["sha256 of entry 1 is missing"]),
        ("[a]\nsha256 = 'sk-secret'", ["sha256 of entry 1 is text of 9 characters", "64 hexadecimal digits"]),
        (f"[a]\nsha256 = '{DIGEST.upper()}'", ["64 hexadecimal digits in small letters"]),
        ("[a]\nsha256 = 12", ["sha256 of entry 1 is a number"]),
        (f"[a]\nsha256 = '{hashlib.sha256(b'').hexdigest()}'", ["that of an empty text"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmax_token = 1", ["field 2 of entry 1 is unknown", "max_tokens"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmax_tokens = 0", ["max_tokens of entry 1 is a number", "in [1, 1000000000]"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmax_tokens = true", ["max_tokens of entry 1 is true or false"]),
        (f"[a]\nsha256 = '{DIGEST}'\nconcurrent_samples = 1.5", ["concurrent_samples of entry 1 is a number"]),
        (f"[a]\nsha256 = '{DIGEST}'\npriority = 'high'", ["priority of entry 1 is text", "[-1000000000, 1000000000]"]),
        (f"[a]\nsha256 = '{DIGEST}'\npriority = 0.5", ["priority of entry 1 is a number"]),
        (f"[a]\nsha256 = '{DIGEST}'\npriority = 2026-11-25", ["priority of entry 1 is a date or a time"]),
        (f"[a]\nsha256 = '{DIGEST}'\npriority = -1000000001", ["priority of entry 1 is a number"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmetrics = 1", ["metrics of entry 1 is a number", "true or false"]),
        (f"[a]\nsha256 = '{DIGEST}'\n[b]\nsha256 = '{DIGEST}'", ["sha256 of entry 2 is that of another entry too"]),
        # A key in the wrong place.
        (f"['sk-secret+']\nsha256 = '{DIGEST}'", ["name of entry 1", "1 to 64 letters"]),
        ("[sk-secret]", ["sha256 of entry 1 is missing"]),
        (f"[a]\nsk-secret = '{DIGEST}'", ["field 1 of entry 1 is unknown"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmax_tokens = 'sk-secret'", ["max_tokens of entry 1 is text"]),
        (f"[a]\nsha256 = '{DIGEST}'\npriority = 'sk-secret'", ["priority of entry 1 is text"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmetrics = 'sk-secret'", ["metrics of entry 1 is text"]),
        (f"[a]\nsha256 = '{DIGEST}'\n[sk-secret]\nsha256 = '{SECRET}'", ["name of entry 2 is a key of this file"]),
        (f"[sk-secret]\nsha256 = '{DIGEST}'\n[a]\nsha256 = '{SECRET}'", ["name of entry 1 is a key of this file"]),
        (f"[{'0aF9' * 16}]\nsha256 = '{DIGEST}'", ["name of entry 1 has the shape of a key"]),
        # Names that mean something to a file system.
        (f"['.']\nsha256 = '{DIGEST}'", ["name of entry 1", "the first is a letter or a digit"]),
        (f"['..']\nsha256 = '{DIGEST}'", ["name of entry 1", "the first is a letter or a digit"]),
        # What the parser refuses in ways of its own, or takes and cannot write out again.
        (f"x = {'[' * 100_000}", ["is not TOML"]),
        (f"x = {'9' * 5000}", ["is not TOML"]),
        (f"[a]\nsha256 = '{DIGEST}'\nmax_tokens = 0x{'f' * 5000}", ["max_tokens of entry 1 is a number"]),
        ("x" * ((1 << 20) + 1), ["more than 1048576 bytes"]),
        ("".join(table_of(f"k{number}") for number in range(MAX_KEYS + 1)), ["1001 keys", "at most 1000"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(content: str | bytes, words: list[str]) -> None:
    """With the file, the number of the table, the field and the limit, and without anything that may be a key."""
    with pytest.raises(KeysRefused) as raised:
        parse_keys(content.encode() if isinstance(content, str) else content, "keys.toml")
    assert "keys.toml" in raised.value.message
    for word in words:
        assert word in raised.value.message
    assert "sk-secret" not in f"{raised.value.message} {raised.value.metadata}"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, and nothing at all."""
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(KeysRefused, match="missing, or not a regular file"):
            read_file(path)
