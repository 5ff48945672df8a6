"""Tests of bench.one_layer."""

import subprocess
import sys
from pathlib import Path

from outrider.engine.runner import ModelRunner
from outrider.vocabulary import Vocabulary


def test_it_writes_a_model_that_can_be_served(tmp_path: Path) -> None:
    """Of one layer, with the embedded target's vocabulary, the same each time."""
    digests = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        subprocess.run((sys.executable, "-P", "-m", "bench.one_layer", str(folder)), check=True)
        runner = ModelRunner.load(str(folder), kv_tokens=64, vocabulary_size=Vocabulary.read(folder).size)
        assert runner.config.num_layers == 1
        digests.add(runner.identity.model_hash)
    assert len(digests) == 1
