"""The whole command: a pair comes of a text, whenever the run is killed."""

import lzma
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers
from support.basics import grid
from support.runs import ROLES, TINY, start_training, train, weights

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.model_files.vocabulary import Vocabulary

pytestmark = pytest.mark.slow


def test_a_run_says_what_it_does_and_what_came_of_it(trained: tuple[Path, str]) -> None:
    """All four stages, the held-out text, a table, and how to serve the pair."""
    out, output = trained
    for words in (
        "Making a pair",
        "3 documents",
        "held out",
        "target-long: 5 steps",
        "draft: step 7, loss",
        "behind 112",
    ):
        assert words in output
    assert f"outrider up --target {out}/target" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("role", ROLES)
def test_engine_and_transformers_load_it_alike(trained: tuple[Path, str], role: str) -> None:
    """Equal greedy tokens past the short blocks, and the whole context."""
    folder = trained[0] / role
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = [0, *tokenizer.encode("The old fox walks. " * 8)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (0, 0)
    assert not hasattr(model.config, "auto_map")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=256)
    assert (runner.context_len, runner.config.eos_token_ids) == (128, {0})
    session = runner.open(prompt, len(prompt))
    for _ in range(len(expected) - len(prompt)):
        session.extend([int(runner.forward([Feed(session)]).logits[-1].argmax())])
    assert list(session.token_ids) == expected
    assert Vocabulary.read(folder) == Vocabulary.read(trained[0] / "target")


@pytest.mark.parametrize("last_words", ["target-long: step 4,", *grid("draft-long: 5 steps")])
def test_a_killed_run_goes_on_to_the_same_weights(
    corpus: Path, trained: tuple[Path, str], tmp_path: Path, last_words: str
) -> None:
    """The same command after SIGKILL ends with bit-equal weights, and does not do again what was done."""
    options = ("--corpus", corpus, "--out", tmp_path / "pair", *TINY)
    with start_training(*options) as process:
        assert process.stdout is not None
        assert any(line.startswith(last_words) for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "pair" / "draft").exists()
    code, output = train(*options)
    assert code == 0, output
    assert "Going on with a pair" in output
    assert "target: step 2," not in output
    expected, found = weights(trained[0]), weights(tmp_path / "pair")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_finished_run_only_says_so_again(corpus: Path, trained: tuple[Path, str]) -> None:
    """The same table, and no step."""
    before = weights(trained[0])
    code, output = train("--corpus", corpus, "--out", trained[0], *TINY)
    assert code == 0, output
    assert "step 2" not in output
    assert output[output.index("Held-out loss") :] == trained[1][trained[1].index("Held-out loss") :]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trained[0]).items())


def test_a_pair_is_extended(corpus: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """Only by the long stages and with its own tokenizer, from compressed text; the table shows it as it was, too."""
    packed = tmp_path / "tales.txt.xz"
    packed.write_bytes(lzma.compress(corpus.read_bytes()))
    long = ("--preset", "tiny", "--long-target-steps", "2", "--long-draft-steps", "2", "--threads", "1")
    code, output = train("--corpus", packed, "--from-pair", trained[0], "--out", tmp_path / "longer", *long)
    assert code == 0, output
    assert "target before" in output
    assert "target: " not in output.replace("target before: ", "")
    for role in ROLES:
        assert Vocabulary.read(tmp_path / "longer" / role) == Vocabulary.read(trained[0] / role)
    changed = weights(tmp_path / "longer")
    for role in ROLES:
        name = f"{role} model.embed_tokens.weight"
        assert not torch.equal(weights(trained[0])[name], changed[name])
