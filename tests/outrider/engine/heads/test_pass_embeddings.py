"""The embeddings of PaSS: read as they are, or refused with one sentence."""

import json
from pathlib import Path

import pytest
import torch
from support.heads.tiny_heads import HIDDEN, change, pass_embeddings, tiny_target

from outrider.engine.heads.pass_embeddings import is_pass, read_pass
from outrider.errors import ModelRefused


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    """In float32, whatever they are kept in."""
    folder = pass_embeddings(tmp_path / "pass", 5)
    assert is_pass(folder)
    rows = read_pass(folder, tiny_target())
    assert (rows.shape, rows.dtype) == ((5, HIDDEN), torch.float32)
    change(folder, tensors={"pass_embeddings": rows.bfloat16()})
    assert torch.equal(read_pass(folder, tiny_target()), rows.bfloat16().float())


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"pass_embeddings": torch.zeros(3, 5)}, f"has the shape [3, 5], but the target asks for [3, {HIDDEN}]"),
        ({"pass_embeddings": torch.zeros(HIDDEN)}, f"but the target asks for [{HIDDEN}, {HIDDEN}]"),
        ({"pass_embeddings": None, "other": torch.zeros(1)}, "the tensor other, which the target does not ask for"),
        ({"pass_embeddings": torch.zeros(65, HIDDEN)}, "has 65 rows of pass_embeddings, but must have 1 to 64"),
        ({"pass_embeddings": torch.zeros(0, HIDDEN)}, "has 0 rows of pass_embeddings, but must have 1 to 64"),
        ({"bias": torch.zeros(HIDDEN)}, "holds the tensor bias, which the target does not ask for"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor | None], sentence: str) -> None:
    folder = change(pass_embeddings(tmp_path / "pass"), tensors=tensors)
    with pytest.raises(ModelRefused) as caught:
        read_pass(folder, tiny_target())
    assert sentence in caught.value.message


def test_another_drafter_s_folder_is_told_apart(tmp_path: Path) -> None:
    """By config.json alone, which must be there."""
    folder = pass_embeddings(tmp_path / "pass")
    change(folder, config={"drafter": "bpd"})
    assert not is_pass(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelRefused):
        is_pass(folder)
