"""Which code computes which model, and which processes pay for transformers."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.models.tiny_models import FAMILIES, HF_FAMILIES, TARGET, write_tiny_model

from outrider.engine.hf_models.checkpoint import HfCheckpoint
from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint, find_checkpoint
from outrider.engine.models.fused import FusedTransformer
from outrider.engine.models.transformer import Transformer
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("family", sorted(FAMILIES | HF_FAMILIES))
def test_our_own_transformer_goes_first(tmp_path: Path, family: str) -> None:
    """The families that it knows are its own, and the others transformers'."""
    found = find_checkpoint(str(write_tiny_model(tmp_path / "tiny", family)))
    assert isinstance(found, FolderCheckpoint if family in FAMILIES else HfCheckpoint)
    assert (found.name, found.modelling == "") == ("tiny", family in FAMILIES)
    runner = ModelRunner.load(found, kv_tokens=64)
    assert isinstance(runner.model, Transformer | FusedTransformer) == (family in FAMILIES)
    assert runner.identity.model_hash == found.digest()


def test_a_sized_model_is_our_own() -> None:
    """By its name alone."""
    assert isinstance(find_checkpoint("sized:200m"), SizedCheckpoint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json cannot be read"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json does not hold a JSON object"),
        ("{}", '"architectures" is None, but must name one architecture'),
        ('{"architectures": ["A", "B"]}', "but must name one architecture"),
    ],
)
def test_a_model_without_a_sound_configuration_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    """One sentence, whatever would compute it."""
    (tmp_path / "model.safetensors").touch()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelRefused) as caught:
        find_checkpoint(str(tmp_path))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


SCRIPT = """
import sys
from outrider.engine.runner import ModelRunner
ModelRunner.load(sys.argv[1], kv_tokens=64)
print([name for name in ("gguf", "huggingface_hub.hf_api", "transformers") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "imported"), [(None, "[]"), ("gpt2", "['huggingface_hub.hf_api', 'transformers']")])
def test_only_a_model_that_needs_transformers_imports_it(tmp_path: Path, family: str | None, imported: str) -> None:
    """A service with a folder of ours pays neither its seconds nor its memory, nor for the hub and GGUF."""
    folder = TARGET if family is None else write_tiny_model(tmp_path / "tiny", family)
    command = (sys.executable, "-c", SCRIPT, str(folder))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == imported
