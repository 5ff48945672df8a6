"""What a head and a separate draft lose against stored distributions, compared with sums over single rows."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from training.data import IGNORED
from training.draft_run import OWN_ROW_SCORE, see_own_row
from training.heads import Eagle3, HeadShape
from training.material import shard_path
from training.model import PRESETS, new_model
from training.stored import (
    ANSWER_STEP_WEIGHT,
    OVERLAP_TEMPERATURE,
    Material,
    StoredTeacher,
    draft_loss,
    head_loss,
    over_raw_features,
)

DRAFT = new_model(PRESETS["tiny"], "draft", 4)
VOCAB_SIZE, ROWS, LENGTH, TARGET_SIZE, STEPS = PRESETS["tiny"].vocab_size, 2, 14, 32, 3
IDS = torch.arange(10, 60)
SHAPE = HeadShape(
    hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, steps_ahead=STEPS,
    norm_epsilon=1e-5, rope_theta=1e4, context_len=128,
)  # fmt: skip


@pytest.fixture(name="teacher", scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredTeacher:
    """Two texts with states of no meaning."""
    folder, generator = tmp_path_factory.mktemp("texts"), torch.Generator().manual_seed(1)

    def states(width: int) -> Tensor:
        return torch.randn(ROWS, LENGTH, width, generator=generator).bfloat16()

    tensors = {
        "token_ids": torch.randint(VOCAB_SIZE, (ROWS, LENGTH), generator=generator),
        "is_answer": torch.ones(ROWS, LENGTH, dtype=torch.bool),
        "taps": states(2 * TARGET_SIZE) * torch.tensor([1.0, 20.0]).bfloat16().repeat(TARGET_SIZE),
        "normed": states(TARGET_SIZE),
    }
    save_file(tensors, shard_path(folder, 0))
    output = torch.randn(len(IDS), TARGET_SIZE, generator=generator).bfloat16()
    material = Material.read(folder, 1)
    return StoredTeacher(material, output, IDS, material.feature_scale())


def lesson() -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Places and targets of both texts, the second first, and which texts and columns are learnt."""
    places = torch.tensor([1, 0])[:, None] * LENGTH + torch.arange(LENGTH)
    learnt = [(0, 4), (0, 9), (1, 3), (1, 12)]
    targets = torch.full((ROWS, LENGTH), IGNORED)
    for text, column in learnt:
        targets[text, column] = 10
    return places, targets, learnt


def lost(law: Tensor, guessed: Tensor, *, overlap: bool) -> float:
    """Loss of a guess [V'] of one distribution [V']."""
    value = -torch.minimum(law, guessed).sum().log() if overlap else -(law * guessed.log()).sum()
    return float(value.detach())


def law_at(teacher: StoredTeacher, text: int, column: int, temperature: float) -> Tensor:
    normed = teacher.material.states("normed", torch.tensor([1 - text]))[0, column]
    return (teacher.output.float() @ normed / temperature).softmax(-1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_head_learns_each_law_from_every_step_that_reaches_it(teacher: StoredTeacher, *, overlap: bool) -> None:
    """Row m of step s guesses the distribution at row m + 1 + s; a step counts a share of the one before it."""
    places, targets, learnt = lesson()
    torch.manual_seed(2)
    head = Eagle3(SHAPE, 2, torch.randn(VOCAB_SIZE, TARGET_SIZE), torch.randn(VOCAB_SIZE, TARGET_SIZE), IDS)
    temperature = OVERLAP_TEMPERATURE if overlap else 1.0
    rows = torch.tensor([1, 0])
    expected = weights = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        served = over_raw_features(head, teacher)
        steps = [*served.guesses(teacher.material.states("taps", rows), teacher.material.token_ids[rows])]
    for step, guesses in enumerate(steps):
        weights += ANSWER_STEP_WEIGHT**step
        for text, column in learnt:
            guessed = (guesses[text, column - 1 - step].float() / temperature).softmax(-1)
            law = law_at(teacher, text, column, temperature)
            expected += ANSWER_STEP_WEIGHT**step * lost(law, guessed, overlap=overlap)
    found = head_loss(teacher, overlap=overlap)(head, places, targets)
    assert found.item() == pytest.approx(expected / weights, rel=0.01)


def test_the_scale_of_a_feature_is_the_root_of_its_mean_square(teacher: StoredTeacher) -> None:
    """Over texts and tokens; features of another size than others have another scale."""
    taps = teacher.material.states("taps", torch.arange(ROWS)).flatten(0, 1)
    scale = teacher.material.feature_scale()
    assert scale.tolist() == pytest.approx(
        [math.sqrt(sum(x * x for x in each) / len(each)) for each in taps.T.tolist()]
    )
    assert scale[1::2].min() > 5 * scale[::2].max()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_draft_gives_to_unknown_ids_is_lost(teacher: StoredTeacher, *, overlap: bool) -> None:
    """Its distribution is over all ids, those that it learns are over the draft vocabulary."""
    places, targets, learnt = lesson()
    temperature = OVERLAP_TEMPERATURE if overlap else 1.0
    logits = DRAFT(teacher.material.token_ids[torch.tensor([1, 0])]).logits
    expected = 0.0
    for text, column in learnt:
        guessed = (logits[text, column] / temperature).softmax(-1)[IDS]
        expected += lost(law_at(teacher, text, column, temperature), guessed, overlap=overlap)
    found = draft_loss(teacher, overlap=overlap)(DRAFT, places, targets)
    assert found.item() == pytest.approx(expected, rel=0.01)


def test_a_new_heads_attention_sees_its_own_row() -> None:
    """The score of a row with itself is far above those with other rows, whatever they hold, in every head."""
    shape = replace(SHAPE, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32)
    embedding = torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(1))
    head = Eagle3(shape, 1, embedding, embedding, IDS)
    see_own_row(head, shape.head_dim, 3)
    rows = torch.randn(20, 128, generator=torch.Generator().manual_seed(2))
    attention = head.layers[0].self_attn
    queries, keys = (attention[name](rows).unflatten(-1, (-1, 32)) for name in ("q_proj", "k_proj"))
    scores = torch.einsum("ihd,jhd->hij", queries, keys.repeat_interleave(2, 1)) / math.sqrt(32)
    own = scores.diagonal(dim1=1, dim2=2)
    others = scores[:, ~torch.eye(20, dtype=torch.bool)]
    assert own.mean().item() == pytest.approx(OWN_ROW_SCORE, rel=0.2)
    assert own.min() > 2 * others.abs().mean() + others.std()
