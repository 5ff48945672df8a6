"""An embedding wider than the tokenizer's vocabulary, as Qwen's sizes have them: what lies past it is never said."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.parameters import SamplingParameters, SessionSpec

NUM_KNOWN, NUM_ROWS = 257, 300
EMBEDDING = "model.embed_tokens.weight"


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A model whose padding has by far the largest logits, and the same without it."""
    padded, bare = folder / "padded", folder / "bare"
    write_tiny_model(padded, "qwen2", vocab_size=NUM_ROWS, seed=5, tie_word_embeddings=True)
    tensors = load_file(padded / "model.safetensors")
    tensors[EMBEDDING][NUM_KNOWN:] = 100 * tensors[EMBEDDING][: NUM_ROWS - NUM_KNOWN]
    save_file(tensors, padded / "model.safetensors")
    shutil.copytree(padded, bare)
    save_file(tensors | {EMBEDDING: tensors[EMBEDDING][:NUM_KNOWN].clone()}, bare / "model.safetensors")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"vocab_size": NUM_KNOWN}))
    return padded, bare


def said(model: Path, vocabulary_size: int) -> list[tuple[int, ...]]:
    """Twenty tokens at each of three temperatures."""
    runner = ModelRunner.load(str(model), dtype="float32", kv_tokens=1024, vocabulary_size=vocabulary_size)
    prompt = (1, 2, 3)
    inputs = []
    for temperature in (0.0, 0.7, 2.0):
        sampling = SamplingParameters(temperature=temperature, ignore_eos=True)
        spec = SessionSpec(prompt, len(prompt), sampling, 3, 4096, frozenset(), frozenset())
        inputs.append(DrawInput(Feed(runner.open(prompt, len(prompt))), spec))
    for _ in range(20):
        for draw_input, outcome in zip(inputs, forward_and_draw(runner, inputs), strict=True):
            assert isinstance(outcome, list)
            draw_input.feed.session.extend(outcome)
    return [tuple(draw_input.feed.session.token_ids) for draw_input in inputs]


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """Logits are as wide as the embedding; tokens are those of the model without the padding, at any temperature."""
    padded, bare = write_pair(tmp_path)
    assert ModelRunner.load(str(padded), kv_tokens=64).vocabulary_size == NUM_ROWS
    texts = said(padded, NUM_KNOWN)
    assert texts == said(bare, NUM_KNOWN)
    # Were it not left out, the padding would win.
    assert max(map(max, texts)) < NUM_KNOWN <= max(map(max, said(padded, NUM_ROWS)))
