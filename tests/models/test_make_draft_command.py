"""The whole command for drafts: files that the services load come of a target alone, whenever it is killed."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import start_training, train

from make_draft import app
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.head import TargetParts
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.ops import choose_ops
from outrider.errors import InvalidRequest
from outrider.model_files.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

COMMAND = "make_draft.py"
TINY_DRAFT = (
    "--tokens", "600", "--texts", "6", "--text-len", "64", "--draft-vocab", "200",
    "--head-steps", "5", "--head-overlap-steps", "3", "--draft-steps", "5", "--draft-overlap-steps", "3",
    "--draft-size", "32", "--draft-layers", "1", "--checkpoint-every", "2", "--threads", "1",
)  # fmt: skip


def options_for(pair: Path, corpus: Path, out: Path) -> list[str | Path]:
    """A run of a few steps for the target of a tiny pair, which has no chat template."""
    return ["--target", pair / "target", "--out", out, "--corpus", corpus, *TINY_DRAFT]


@pytest.fixture(scope="module")
def made(corpus: Path, trained: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an unbroken run, and what it said."""
    out = tmp_path_factory.mktemp("drafts") / "made"
    code, output = train(*options_for(trained[0], corpus, out), command=COMMAND)
    assert code == 0, output
    return out, output


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    files = {name: load_file(out / name / "model.safetensors") for name in ("head", "draft")}
    return {f"{name} {key}": tensor for name, each in files.items() for key, tensor in each.items()}


def test_a_run_says_what_it_does_and_what_came_of_it(made: tuple[Path, str]) -> None:
    """Texts, every stage with its losses, and the report, which is a file too."""
    out, output = made
    for words in (
        f"Making drafts in {out}:",
        "texts: 1 files, ",
        "200 ids are ",
        "head: step 4, loss ",
        "head-overlap: step 3, loss ",
        "draft: step 4, loss ",
        "draft-overlap: step 3, loss ",
        "report: 36 of 36 texts",
        "Serve them: outrider up ",
    ):
        assert words in output
    report = (out / "report.md").read_text()
    assert report.count("| its own texts | ") == 3
    assert "Traceback" not in output


@pytest.mark.grid
@pytest.mark.parametrize("last_words", ["texts: 1 files", "head-overlap: step 2,"])
def test_a_killed_run_goes_on_to_the_same_weights(
    corpus: Path, trained: tuple[Path, str], made: tuple[Path, str], tmp_path: Path, last_words: str
) -> None:
    """The same command after SIGKILL ends with the same bits and the same report."""
    options = options_for(trained[0], corpus, tmp_path / "drafts")
    with start_training(*options, command=COMMAND) as process:
        assert process.stdout is not None
        assert any(line.startswith(last_words) for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    code, output = train(*options, command=COMMAND)
    assert code == 0, output
    assert "Going on with drafts" in output
    expected, found = tensors_of(made[0]), tensors_of(tmp_path / "drafts")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert (tmp_path / "drafts" / "report.md").read_text() == (made[0] / "report.md").read_text()


def test_the_engine_loads_both_drafts(made: tuple[Path, str], trained: tuple[Path, str]) -> None:
    """The head fits its target, and the draft says whose vocabulary it has without a tokenizer of its own."""
    out, _ = made
    assert sorted(each.name for each in (out / "draft").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "vocabulary.json",
    ]  # fmt: skip
    target, cpu = trained[0] / "target", torch.device("cpu")
    assert Vocabulary.read(out / "draft").difference(Vocabulary.read(target)) is None
    ops = choose_ops(cpu, 1)
    draft = find_checkpoint(str(out / "draft")).build(cpu, torch.bfloat16, ops)[0]
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    parts = TargetParts(embedding, embedding, num_layers=2, context_len=128)
    head = read_head(out / "head", parts).load(parts, cpu, torch.bfloat16, ops)[0]
    counts = [sum(each.numel() for each in model.weights) for model in (draft, head)]
    said = [int(each.replace(",", "")) for each in re.findall(r"(?:head|draft): ([\d,]+) weights", made[1])]
    assert counts == said[::-1]


def test_drafts_that_are_there_go_on(
    corpus: Path, trained: tuple[Path, str], made: tuple[Path, str], tmp_path: Path
) -> None:
    """Without a step they are what they were; with some, what they learn on other texts is new, also of other ids."""
    from_made = ("--from-head", made[0] / "head", "--from-draft", made[0] / "draft")

    def go_on(name: str, *options: str) -> dict[str, torch.Tensor]:
        out = tmp_path / name
        given = options_for(trained[0], corpus, out)
        for option in ("--draft-vocab", "--draft-size", "--draft-layers"):
            place = given.index(option)
            del given[place : place + 2]
        code, output = train(*given, *from_made, *options, command=COMMAND)
        assert code == 0, output
        return tensors_of(out)

    before = tensors_of(made[0])
    none = go_on("none", *(word for name in ("head", "draft") for word in (f"--{name}-steps", "0")),
                 "--head-overlap-steps", "0", "--draft-overlap-steps", "0")  # fmt: skip
    assert before.keys() == none.keys()
    assert all(torch.equal(tensor, none[name]) for name, tensor in before.items())
    after = go_on("after", "--seed", "7", "--head-overlap-steps", "0", "--draft-overlap-steps", "0")
    assert torch.equal(after["head d2t"], before["head d2t"])
    for name in ("head fc.weight", "head lm_head.weight", "draft model.embed_tokens.weight"):
        moved = (after[name].float() - before[name].float()).norm()
        assert 0 < moved < 0.2 * before[name].float().norm(), name


def test_what_does_not_fit_is_refused(trained: tuple[Path, str], made: tuple[Path, str], tmp_path: Path) -> None:
    """One sentence that names the option and its value, and no folder is left."""

    def refusal(*options: str | Path) -> str:
        start = ("--target", trained[0] / "target", "--out", tmp_path / "out", "--text-len", "64", "--draft-size", "32")
        with pytest.raises(InvalidRequest) as caught:
            app([str(each) for each in (*start, *options)], standalone_mode=False)
        assert not (tmp_path / "out").exists()
        return caught.value.message

    assert refusal("--temperatures", "0,hot").startswith("--temperatures is '0,hot', but must be numbers from 0 to 2")
    assert refusal("--draft-size", "48").startswith("--draft-size is 48, but must be a multiple of 32")
    assert refusal("--hidden-size", "64").startswith("--hidden-size is 64, but must be at most 32")
    assert refusal("--hidden-size", "32", "--kv-heads", "3").startswith("--kv-heads is 3")
    assert refusal("--draft-vocab", "9000").startswith("--draft-vocab is 9000, but must be at most")
    assert refusal("--text-len", "9000").startswith("--text-len is 9000, but must be at most 128")
    assert refusal("--questions", tmp_path / "none").startswith("--questions is ")
    assert refusal("--target", tmp_path).startswith("--target is ")
    head, draft = made[0] / "head", made[0] / "draft"

    def of_head(*options: str) -> str:
        start = f"--from-head is '{head}', but must be a head "
        message = refusal("--from-head", head, *options)
        assert message.startswith(start)
        return message.removeprefix(start)

    assert of_head("--taps", "0,1").startswith("that reads what enters the layers (0, 1), and not (")
    assert of_head("--mlp-size", "8").startswith("of the same method and shape")
    assert refusal("--from-head", draft).startswith(f"--from-head is '{draft}', but must be an eagle3 head")
    assert refusal("--from-head", head, "--draft-vocab", "200").startswith(
        "--draft-vocab is '200', but must be left out"
    )
    assert refusal("--from-draft", draft).startswith("--draft-size is '32', but must be left out with --from-draft")
