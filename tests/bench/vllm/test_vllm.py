"""bench.vllm without vLLM: the folder that it writes, and what its report says of known figures."""

from pathlib import Path

import torch
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_models import TARGET

from bench.gguf.write import WrittenWords, write_model
from bench.vllm.__main__ import OURS, AskedBlocks, render
from bench.vllm.folders import write_draft, write_folder
from outrider.cli.bench.common import PLAIN
from outrider.engine.models.checkpoints import FolderCheckpoint, find_checkpoint
from outrider.engine.runner import ModelRunner
from outrider.model_files.vocabulary import Vocabulary


def test_a_folder_is_the_file_s_model(tmp_path: Path) -> None:
    """Its tokenizer and, to the bit, its logits; a draft gets its target's tokenizer."""
    model, file, folder = find_checkpoint(str(TARGET)), tmp_path / "model.gguf", tmp_path / "folder"
    assert isinstance(model, FolderCheckpoint)
    write_model(model, WrittenWords.of_folder(TARGET, model.config), file)
    write_folder(file, folder)
    assert Vocabulary.read(folder) == Vocabulary.read(file)
    token_ids = random_ids(24, 4096)
    written, made = (
        all_logits(ModelRunner.load(str(each), dtype="float32", kv_tokens=256), token_ids, 8)[1]
        for each in (folder, file)
    )
    assert torch.equal(written, made)
    write_draft(TARGET, folder, tmp_path / "draft")
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_report_compares_each_block_with_the_plain_one() -> None:
    plain, ours = AskedBlocks(), AskedBlocks()
    for seconds, answers in ((1.0, [[1, 2], [3, 4]]), (2.0, [[5, 6], [7, 8]])):
        plain.add({"answers": answers, "seconds": seconds, "row_steps": 4})
    for seconds, answers in ((0.5, [[1, 2], [3, 9]]), (1.0, [[5, 6], [7, 8]])):
        ours.add({"answers": answers, "seconds": seconds, "row_steps": 2})
    lines = render({8: {PLAIN: plain, OURS: ours}}).splitlines()[2:]
    assert lines == [
        "| 8 | plain | 3.0 (2.0 to 4.0) | 1.00 (1.00 to 1.00) | 1.00 | 4 of 4 |",
        f"| 8 | {OURS} | 6.0 (4.0 to 8.0) | 2.00 (2.00 to 2.00) | 2.00 | 3 of 4 |",
    ]
