"""A text made on the spot, and a tiny pair that the whole command made of it."""

import random
from pathlib import Path

import pytest
from support.runs import TINY, train

WORDS = ("fox", "king", "wood", "witch", "gold", "river", "sings", "walks", "sleeps", "the", "a", "old", "young", "and")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents of short sentences."""
    chance = random.Random(5)
    sentences = [" ".join(chance.choices(WORDS, k=7)).capitalize() + "." for _ in range(300)]
    path = tmp_path_factory.mktemp("corpus") / "tales.txt"
    path.write_text("\n\n".join("\n".join(sentences[i::3]) for i in range(3)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an unbroken run, and what it said."""
    out = tmp_path_factory.mktemp("unbroken") / "pair"
    code, output = train("--corpus", corpus, "--out", out, *TINY)
    assert code == 0, output
    return out, output
