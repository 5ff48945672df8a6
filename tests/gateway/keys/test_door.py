"""The file of keys is looked at with every key that comes: what was written last holds at once."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.keys import key_of, samples_of, table_of, write_keys

from gateway.keys import door as door_module
from gateway.keys.door import REST, Door
from gateway.keys.table import Key, KeysRefused, parse_keys
from outrider.errors import InvalidKey


def let_in(door: Door, name: str) -> bool:
    """Whether the key of a name opens."""
    try:
        door.enter(REST, [f"Bearer {key_of(name)}".encode()], [])
    except InvalidKey:
        return False
    return True


@contextmanager
def no_descriptors() -> Iterator[None]:
    """While it is open, this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_key_comes_by_either_header(tmp_path: Path) -> None:
    """In any spelling of the scheme, and beside others that are none; a key elsewhere, or no key, does not count."""
    door, key = Door(write_keys(tmp_path / "keys.toml", alice={})), key_of("alice").encode()
    for authorization, x_api_key in (
        ([b"Bearer " + key], []),
        ([b"bearer  " + key + b" "], []),
        ([], [key]),
        ([b"Bearer none"], [key]),
        ([b"Bearer " + key], [b"none"]),
        ([b"Basic x", b"BEARER " + key], []),
    ):
        assert door.enter(REST, authorization, x_api_key).name == "alice"
    for authorization, x_api_key in (
        ([], []),
        ([b"Bearer"], []),
        ([b"Bearer "], [b" "]),
        ([key], []),
        ([b"Basic " + key], []),
    ):
        with pytest.raises(InvalidKey, match="No API key came"):
            door.enter(REST, authorization, x_api_key)
    with pytest.raises(InvalidKey, match="none that this gateway knows") as refused:
        door.enter(REST, [], [b"sk-wrong"])
    assert "sk-wrong" not in f"{refused.value} {refused.value.metadata}"


def test_a_key_that_is_taken_out_opens_nothing_any_more(tmp_path: Path) -> None:
    """Whether the file is written again or replaced, and however soon after the writing before."""
    path = tmp_path / "keys.toml"
    door = Door(write_keys(path, alice={}, bobby={}))
    assert (let_in(door, "alice"), let_in(door, "bobby")) == (True, True)
    for _ in range(50):
        write_keys(path, alice={})
        assert (let_in(door, "alice"), let_in(door, "bobby")) == (True, False)
        # As long as the one before.
        write_keys(tmp_path / "new.toml", bobby={})
        os.replace(tmp_path / "new.toml", path)
        assert (let_in(door, "alice"), let_in(door, "bobby")) == (False, True)
    write_keys(path)
    assert not let_in(door, "bobby")


def test_a_broken_file_keeps_the_keys_and_is_told_once(tmp_path: Path) -> None:
    """Half an edit locks no client out; nor does a file that is away for a moment. What comes next holds again."""
    path = tmp_path / "keys.toml"
    door = Door(write_keys(path, alice={}))
    with capture_logs() as lines:
        path.write_text(table_of("bobby") + "[half")
        assert [let_in(door, name) for name in ("alice", "bobby", "alice")] == [True, False, True]
        path.unlink()
        assert [let_in(door, name) for name in ("alice", "bobby", "alice")] == [True, False, True]
        write_keys(path, bobby={})
        assert [let_in(door, name) for name in ("alice", "bobby")] == [False, True]
    assert [line["log_level"] for line in lines] == ["error", "error", "warning"]
    assert "is not TOML" in lines[0]["problem"]
    assert "missing" in lines[1]["problem"]
    assert lines[2]["keys"] == 1


def test_a_file_that_cannot_be_read_for_once_is_read_with_the_next_key(tmp_path: Path) -> None:
    """Nothing that was written meanwhile is missed, however long the file stays as it is."""
    path, now = tmp_path / "keys.toml", [1000.0]
    door = Door(write_keys(path, alice={}, bobby={}), lambda: now[0])
    write_keys(path, alice={})
    with capture_logs() as lines:
        for _ in range(3):
            now[0] += 10.0
            with no_descriptors():
                assert let_in(door, "bobby")
        assert [let_in(door, name) for name in ("alice", "bobby")] == [True, False]
    assert [line["log_level"] for line in lines] == ["error", "warning"]
    assert "cannot be read" in lines[0]["problem"]


def test_a_file_that_stays_as_it_is_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was read after the time in which its date says nothing, whatever that date is; nor is it parsed before,
    as long as it says the same.
    """
    path, now, done = tmp_path / "keys.toml", [1000.0], list[str]()
    door = Door(write_keys(path, alice={}), lambda: now[0])
    read_file = door_module.read_file

    def reading(path: Path) -> bytes:
        done.append("read")
        return read_file(path)

    def parsing(content: bytes, path: str) -> list[Key]:
        done.append("parsed")
        return parse_keys(content, path)

    monkeypatch.setattr(door_module, "read_file", reading)
    monkeypatch.setattr(door_module, "parse_keys", parsing)
    for date_s in (time.time(), time.time() + 1e6, 1.0):
        os.utime(path, (date_s, date_s))
        assert [let_in(door, "alice") for _ in range(3)] == [True] * 3
        now[0] += 1.0
        assert done == ["read"] * 3
        assert [let_in(door, "alice") for _ in range(3)] == [True] * 3
        assert done == ["read"] * 4
        done.clear()
    write_keys(path, alice={}, bobby={})
    assert let_in(door, "bobby")
    assert done == ["read", "parsed"]


def test_a_request_with_many_keys_is_refused_before_they_are_compared(tmp_path: Path) -> None:
    """Two may come, one by each header, and each as often as it will."""
    door, key = Door(write_keys(tmp_path / "keys.toml", alice={})), key_of("alice").encode()
    assert door.enter(REST, [b"Bearer a"] * 1000, [key] * 1000).name == "alice"
    with pytest.raises(InvalidKey, match="3 different API keys came, but a request must have at most 2"):
        door.enter(REST, [b"Bearer a", b"Bearer b"], [key])


async def test_what_was_used_outlives_a_change_of_the_file(tmp_path: Path) -> None:
    """Also that of a name which was away for a while, and with a new key."""
    path = tmp_path / "keys.toml"
    door = Door(write_keys(path, alice={"concurrent_samples": 3}))
    tenant = door.enter(REST, [], [key_of("alice").encode()])
    async with tenant.spending(2, 1, 1):
        write_keys(path, bobby={})
        assert not let_in(door, "alice")
        path.write_text(table_of("bobby", concurrent_samples=2).replace("[bobby]", "[alice]"))
        again = door.enter(REST, [], [key_of("bobby").encode()])
        assert (again.name, await samples_of(again), again.limits.concurrent_samples) == ("alice", 2, 2)


def test_a_gateway_does_not_begin_with_a_broken_file(tmp_path: Path) -> None:
    """One without keys is in order, but the log says that no client comes in."""
    path = tmp_path / "keys.toml"
    with pytest.raises(KeysRefused):
        Door(str(path))
    path.write_text("# nobody yet\n")
    with capture_logs() as lines:
        door = Door(str(path))
    assert [line["log_level"] for line in lines] == ["warning"]
    assert not let_in(door, "alice")
