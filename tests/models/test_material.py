"""What a target writes and computes is kept as it is: its states, its distributions, and the same bits after a stop."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from training.data import IGNORED
from training.decoding import BatchDecoder, drawn
from training.dialogue import Text
from training.head_run import draft_ids_of
from training.material import shard_path, write_shard, write_shards
from training.model import PRESETS, new_model
from training.stored import AnswerBlocks, Material, StoredTeacher

MODEL = new_model(PRESETS["tiny"], "target", 3).eval().requires_grad_(False)
VOCAB_SIZE, ROWS, LENGTH = PRESETS["tiny"].vocab_size, 3, 24


def shard(generator: torch.Generator) -> dict[str, Tensor]:
    """Three plain texts at temperatures 0, 0.7 and 1."""
    texts = [Text((5, 6 + row), temperature, None, user_writes=False) for row, temperature in enumerate((0, 0.7, 1))]
    return write_shard(BatchDecoder(MODEL, (0, 1)), texts, LENGTH, generator)


def write(folder: Path, tokens: int, made: list[int]) -> int:
    """Shards of at least so many answer tokens; `made` gets an entry for each that is computed."""

    def counted(generator: torch.Generator) -> dict[str, Tensor]:
        made.append(1)
        return shard(generator)

    return write_shards(folder, tokens, 1, counted, lambda *_: None)


@pytest.fixture(name="folder", scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two shards."""
    folder = tmp_path_factory.mktemp("texts")
    assert write(folder, ROWS * LENGTH, []) == 2
    return folder


def test_kept_states_are_those_of_the_targets_own_forward(folder: Path) -> None:
    """Residuals that enter the tapped layers and what leaves the last norm, as near as bfloat16 is."""
    for tensors in (load_file(shard_path(folder, number)) for number in range(2)):
        result = MODEL(tensors["token_ids"], output_hidden_states=True, use_cache=False)
        wanted = torch.cat([result.hidden_states[0], result.hidden_states[1]], -1)
        assert (tensors["taps"].float() - wanted).norm() < 0.01 * wanted.norm()
        normed = result.hidden_states[2]
        assert (tensors["normed"].float() - normed).norm() < 0.02 * normed.norm()


def test_tokens_are_drawn_from_the_laws(folder: Path) -> None:
    """The text at temperature 0 says the likeliest; what was given is no answer."""
    tensors = load_file(shard_path(folder, 0))
    assert tensors["token_ids"][:, :2].tolist() == [[5, 6], [5, 7], [5, 8]]
    assert tensors["is_answer"].tolist() == [[False] * 2 + [True] * (LENGTH - 2)] * ROWS
    logits = tensors["normed"][0].bfloat16() @ MODEL.lm_head.weight.bfloat16().T
    assert torch.equal(logits[1:-1].argmax(-1), tensors["token_ids"][0, 2:])


def test_the_share_of_a_token_is_its_probability() -> None:
    """Of 20,000 draws at temperature 0.5, within four deviations; at 0 always the likeliest."""
    logits = torch.tensor([0.0, 1.0, -1.0]).repeat(20_000, 1)
    found = drawn(logits, torch.full((20_000,), 0.5), torch.Generator().manual_seed(2))
    shares, wanted = torch.bincount(found, minlength=3) / 20_000, (logits[0] / 0.5).softmax(-1)
    assert ((shares - wanted).abs() < 4 * (wanted * (1 - wanted) / 20_000).sqrt()).all()
    assert (drawn(logits[:5], torch.zeros(5), torch.Generator()) == 1).all()


def test_a_stopped_writing_goes_on_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """What is there is kept, what is missing is made again as it would have been."""
    made: list[int] = []
    assert write(tmp_path, 10, made) == 1
    assert write(tmp_path, ROWS * LENGTH, made) == 2
    assert len(made) == 2
    for number in range(2):
        assert shard_path(tmp_path, number).read_bytes() == shard_path(folder, number).read_bytes()
    assert shard_path(folder, 0).read_bytes() != shard_path(folder, 1).read_bytes()


def test_lessons_are_the_targets_laws_at_answers(folder: Path) -> None:
    """A target is the answer's token after its place, where the draft vocabulary has it, with its distribution."""
    material = Material.read(folder, 2)
    ids = draft_ids_of(material.token_ids.flatten(), 40, VOCAB_SIZE)
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[ids] = True
    blocks = AnswerBlocks(material, known, 3, 2, "seed")
    seen = []
    for step in range(3):
        places, targets = blocks.at(step)
        teacher = StoredTeacher(material, MODEL.lm_head.weight[ids].bfloat16(), ids, material.feature_scale())
        rows, texts, columns, laws = teacher.lesson(places, targets, 0.7)
        seen += rows.tolist()
        for text, column, law in zip(texts.tolist(), columns.tolist(), laws, strict=True):
            assert 3 <= column < LENGTH - 1
            assert targets[text, column] == material.token_ids[rows[text], column + 1] != IGNORED
            wanted = MODEL(material.token_ids[rows[text]][None]).logits[0, column, ids]
            assert (law - (wanted / 0.7).softmax(-1)).abs().max() < 0.02
        assert len(texts) == int((known[material.token_ids[rows][:, 4:]]).sum())
    assert sorted(seen) == list(range(2 * ROWS)), "every text once in a pass"
