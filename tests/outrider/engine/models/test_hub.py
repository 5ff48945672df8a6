"""Hub ids without a hub: a cache made by hand, a closed port, and a server that says no."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import write_tiny_model

from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.weights import resolve
from outrider.errors import ModelRefused

COMMIT, OLDER_COMMIT = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloads."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 sets when the library is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Sends all requests to another hub, and forgets connections to the one before."""
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", huggingface_hub.HfApi(endpoint=endpoint, token=False).snapshot_download
    )
    huggingface_hub.close_session()


def closed_port() -> str:
    """An address without a listener."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}"


@contextmanager
def hub_that_says(status: int, code: str) -> Iterator[str]:
    """A hub that answers every request with the same error."""

    class Refusing(BaseHTTPRequestHandler):
        def answer(self) -> None:
            """Answers with a refusal."""
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_POST = answer  # noqa: N815 - the names of the base class

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Says nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def write_snapshot(cache: Path, commit: str, revision: str, seed: int = 0) -> Path:
    """A model in the cache as a download leaves it."""
    repository = cache / "models--some-org--tiny"
    folder = write_tiny_model(repository / "snapshots" / commit, "llama", seed=seed)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return folder


def write_gguf_snapshot(cache: Path, *names: str) -> Path:
    """Writes a snapshot of a repository that has GGUF files alone."""
    model = write_tiny_model(cache.parent / "tiny", "llama")
    folder = cache / "models--some-org--tiny" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(COMMIT)
    for name in names:
        write_gguf(model, folder / name)
    return folder


def refusal(name: str) -> str:
    """The sentence of a refusal."""
    with pytest.raises(ModelRefused) as caught:
        resolve(name)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(name)
    return caught.value.message


def test_what_was_downloaded_is_used_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no listener where the hub is, and none is asked."""
    point_to(monkeypatch, closed_port())
    newest = write_snapshot(cache, COMMIT, "main")
    older = write_snapshot(cache, OLDER_COMMIT, "v1", seed=1)
    assert resolve("some-org/tiny") == resolve("some-org/tiny@main") == resolve(f"some-org/tiny@{COMMIT}") == newest
    assert resolve("some-org/tiny@v1") == older
    found = find_checkpoint("some-org/tiny@v1")
    assert (found.name, found.folder) == ("tiny@v1", older)


def test_gguf_files_of_a_repository_are_used_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one by the id alone, one of several by its name after it."""
    point_to(monkeypatch, closed_port())
    folder = write_gguf_snapshot(cache, "a.gguf")
    assert resolve("some-org/tiny") == resolve("some-org/tiny:a.gguf") == folder / "a.gguf"
    assert find_checkpoint("some-org/tiny@main").name == "tiny@main"
    (folder / "b.gguf").write_bytes((folder / "a.gguf").read_bytes())
    assert resolve("some-org/tiny@main:b.gguf") == folder / "b.gguf"
    with pytest.raises(ModelRefused, match=r"has several GGUF files \(a\.gguf, b\.gguf\): name one of them"):
        resolve("some-org/tiny")
    assert "run `hf download some-org/tiny c.gguf`" in refusal("some-org/tiny:c.gguf")


class Offering:
    """A hub whose repository has some files: what snapshot_download does with them, in a folder."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.names = folder, names
        self.fetched: list[str] = []

    def __call__(
        self,
        model_id: str,
        *,
        allow_patterns: list[str],
        dry_run: bool = False,
        local_files_only: bool = False,
        **_: Any,
    ) -> Any:
        """Which files it would fetch, or the folder after it has."""
        if local_files_only:
            raise LocalEntryNotFoundError(model_id)
        wanted = [name for name in self.names if any(fnmatch(name, each) for each in allow_patterns)]
        if dry_run:
            return [SimpleNamespace(filename=name) for name in wanted]
        self.fetched += wanted
        for name in wanted:
            (self.folder / name).touch()
        return str(self.folder)


@pytest.mark.parametrize(
    ("names", "model", "fetched"),
    [
        (("config.json", "a.gguf"), "some-org/tiny", ["config.json", "a.gguf"]),
        (("config.json", "model.safetensors", "a.gguf"), "some-org/tiny", ["config.json", "model.safetensors"]),
        (("config.json", "a.gguf", "b.gguf"), "some-org/tiny:b.gguf", ["b.gguf"]),
    ],
)
def test_only_what_is_served_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], model: str, fetched: list[str]
) -> None:
    """Safetensors where a repository has them, else its only GGUF file, or the one that is named."""
    hub = Offering(tmp_path, *names)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve(model) == (tmp_path / fetched[-1] if fetched[-1].endswith(".gguf") else tmp_path)
    assert hub.fetched == fetched


def test_several_files_on_the_hub_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named instead."""
    hub = Offering(tmp_path, "a.gguf", "b.gguf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert "has several GGUF files (a.gguf, b.gguf): name one" in refusal("some-org/tiny")
    assert "is not downloaded, and the hub does not give it" in refusal("some-org/tiny:c.gguf")
    assert hub.fetched == []


def test_a_download_that_broke_off_is_not_taken_for_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached folder without weights is no answer; the hub is asked for the rest, and its answer is what counts."""
    (write_snapshot(cache, COMMIT, "main") / "model.safetensors").unlink()
    with hub_that_says(404, "RevisionNotFound") as endpoint:
        point_to(monkeypatch, endpoint)
        assert "names a revision that the hub does not have" in refusal("some-org/tiny")
    point_to(monkeypatch, closed_port())
    with pytest.raises(ModelRefused, match=r"has no model\.safetensors"):
        resolve("some-org/tiny")


def test_no_network_is_a_sentence_that_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which command, on what machine, and where its result goes."""
    point_to(monkeypatch, closed_port())
    message = refusal("some-org/tiny@v1")
    assert "the hub cannot be reached" in message
    assert "`hf download some-org/tiny --revision v1` on a machine with network" in message
    assert "HF_HOME" in message


def test_offline_mode_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that the operator has set, and the same advice."""
    offline(monkeypatch)
    message = refusal("some-org/tiny")
    assert "HF_HUB_OFFLINE forbids to download it: run `hf download some-org/tiny` on a machine" in message


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "neither a folder here nor a model of the hub: check the id, or set HF_TOKEN"),
        (401, "RepoNotFound", "neither a folder here nor a model of the hub: check the id, or set HF_TOKEN"),
        (403, "GatedRepo", "is a gated model of the hub: accept its conditions on its page and set HF_TOKEN"),
        (404, "RevisionNotFound", "names a revision that the hub does not have"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, words: str
) -> None:
    """Not there, private, gated, or of another revision."""
    with hub_that_says(status, code) as endpoint:
        point_to(monkeypatch, endpoint)
        assert words in refusal("some-org/tiny")


@pytest.mark.parametrize("name", ["no such id!", "a/b/c", "-some-/tiny@v1", "n" * 5000])
def test_what_cannot_be_an_id_is_not_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A string that no hub could know."""
    offline(monkeypatch)
    assert "is neither a folder nor the id of a model on the hub" in refusal(name)
