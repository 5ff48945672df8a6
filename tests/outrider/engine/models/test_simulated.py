"""Simulated models: tokens by a hash that looks at the cache, times by a formula, and books that are the real ones."""

import time

import numpy as np
import pytest
import torch
from support.models.engine_cases import TREE, assert_like_fresh, close, decoded, finish, fresh, random_ids
from support.models.tiny_models import TARGET

from outrider.engine.batching import Feed
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.simulated import SHARPNESS, WINDOW, SimulatedCheckpoint, SimulatedDecoder
from outrider.engine.ops import choose_ops
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary
from outrider.model_service.row_probe import compare
from outrider.token_tree import TokenTree

FAST_TARGET, FAST_DRAFT = "sim:h100-8b@stretch=0.001", "sim:h100-1b@stretch=0.001"
SAMPLES = 20_000


@pytest.fixture(params=[FAST_TARGET, FAST_DRAFT])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """A target and a draft with a small cache."""
    return ModelRunner.load(request.param, kv_tokens=4096)


def decoder(model: str) -> SimulatedDecoder:
    """A decoder by its name."""
    found = find_checkpoint(model)
    assert isinstance(found, SimulatedCheckpoint)
    return found.build(torch.device("cpu"), torch.bfloat16, choose_ops(torch.device("cpu"), 1))[0]


def contexts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and tokens that rows see, from a fixed seed."""
    random = np.random.default_rng(5)
    return random.integers(0, 4096, count), random.integers(0, 4096, (count, WINDOW)).astype(np.uint64)


def first_choices(model: str, positions: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What a model names first."""
    return decoder(model).choices(positions, seen)[0][:, 0]


def test_rows_are_independent(runner: ModelRunner) -> None:
    """Alone and among others, at once and token by token, proposed and plainly decoded."""
    for each in compare(runner):
        assert each.equal_rows == each.rows > 0, each.name


def test_rows_of_a_tree_see_their_own_path(runner: ModelRunner) -> None:
    """Each is that of the tokens on its path alone, and what is kept of the tree is cached."""
    prompt = random_ids(40)
    session = runner.open(prompt, 1)
    logits = finish(runner, Feed(session, TREE))[0]
    for row in range(len(TREE) + 1):
        path = [TREE.token_ids[step - 1] for step in TREE.path(row)]
        assert torch.equal(logits[row], fresh(runner, [*prompt, *path])[0][0])
    runner.forward([Feed(session, TREE)])
    session.keep((1, 3))
    assert_like_fresh(runner, session)
    close(runner, session)


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1])
def test_short_prompts_have_logits_too(runner: ModelRunner, length: int) -> None:
    """A row that sees fewer tokens than the hash looks at."""
    token_ids = random_ids(length, seed=3)
    assert torch.equal(fresh(runner, token_ids)[0], decoded(runner, token_ids, 1)[-1:])


def test_a_wrong_block_is_seen(runner: ModelRunner) -> None:
    """Tokens come out of the cache, so that a test that compares them tests blocks, prefixes and truncation."""
    session = runner.open(random_ids(20), 1)
    right = finish(runner, Feed(session))[0]
    session.truncate(19)
    slots = torch.from_numpy(session.table.slots(15, 16).copy())
    runner.cache.keys[0][slots] += 1
    session.extend(random_ids(20)[19:])
    assert not torch.equal(finish(runner, Feed(session))[0], right)


def test_a_draft_names_the_law_s_token_as_often_as_it_says() -> None:
    """Within five standard deviations of 20,000 contexts; never with an acceptance of 0, and always with 1."""
    positions, seen = contexts(SAMPLES)
    law = first_choices("sim:h100-70b", positions, seen)
    assert np.array_equal(first_choices("sim:h100-8b", positions, seen), law)
    for acceptance in (0.0, 0.3, 0.75, 1.0):
        own = first_choices(f"sim:h100-1b@acceptance={acceptance}", positions, seen)
        deviation = (SAMPLES * acceptance * (1 - acceptance)) ** 0.5
        assert abs(int((own == law).sum()) - SAMPLES * acceptance) <= 5 * deviation


def right_choices(model: str) -> tuple[np.ndarray, np.ndarray]:
    """[SAMPLES, ranks]: which choice is the hash's token, and the chances that its logits give to all choices."""
    positions, seen = contexts(SAMPLES)
    ids, heights = decoder(model).choices(positions, seen)
    assert all(len(set(row)) == ids.shape[1] for row in ids[:100].tolist())
    others = decoder(model).config.vocab_size - 1 - ids.shape[1]
    weights = np.exp(heights / SHARPNESS)
    law = first_choices("sim:h100-8b", positions, seen)
    return ids == law[:, None], weights / (weights.sum(axis=1, keepdims=True) + others)


@pytest.mark.parametrize("acceptance", ["0.78+0.1+0.04+0.02+0.012", "0.6+0.13+0.06+0.035+0.022", "0.42+0.2"])
def test_the_law_s_token_has_each_rank_as_often_as_the_name_says(acceptance: str) -> None:
    """Within four standard deviations of 20,000 contexts."""
    right, _ = right_choices(f"sim:h100-1b@acceptance={acceptance}")
    rates = np.array([float(rate) for rate in acceptance.split("+")])
    assert (abs(right.mean(axis=0) - rates) <= 4 * (rates * (1 - rates) / SAMPLES) ** 0.5).all()


def test_a_draft_is_as_sure_as_it_is_right() -> None:
    """In easy contexts and in the others: choices are right as often as their logits say, within four deviations."""
    right, chances = right_choices("sim:h100-1b")
    is_easy = chances[:, 0] > 0.78
    assert abs(is_easy.mean() - 0.5) < 4 * 0.5 / SAMPLES**0.5
    for kind in (is_easy, ~is_easy):
        expected = chances[kind][0]
        assert (abs(right[kind].mean(axis=0) - expected) <= 4 * (expected * (1 - expected) / kind.sum()) ** 0.5).all()
    assert [*chances[is_easy][0].round(3)] == [0.956, 0.02, 0.008, 0.004, 0.002]
    assert [*chances[~is_easy][0].round(3)] == [0.604, 0.18, 0.072, 0.036, 0.022]


def test_a_prefix_is_read_once_for_all_leaves_of_a_tree() -> None:
    """Its step takes what its rows take, however many of them are leaves; a chain's is the same but for its scores."""
    runner = ModelRunner.load("sim:h100-8b", kv_tokens=4096)
    assert isinstance(runner.model, SimulatedDecoder)
    session, wide = runner.open(random_ids(200), 1), TokenTree(tuple(range(1, 32)), (0,) * 31)
    finish(runner, Feed(session))
    busy_s = runner.forward_counts.busy_s
    runner.forward([Feed(session, wide)])
    runner.finish()
    law = runner.model.model
    assert runner.forward_counts.busy_s - busy_s == pytest.approx(law.step_s(32, 231, 200 + 31 * 201), rel=1e-12)
    assert law.step_s(32, 231, 200 + 31 * 201) < law.step_s(32, 31 * 201, 200 + 31 * 201) - 0.0003
    close(runner, session)


def test_tokens_are_spread_and_none_ends_an_answer() -> None:
    """All ids but the end of a sequence, each about as often: chi-squared within five deviations."""
    positions, seen = contexts(40 * 4095)
    counts = np.bincount(first_choices("sim:h100-8b", positions, seen), minlength=4096)
    assert counts[0] == 0
    chi_squared = ((counts[1:] - 40) ** 2 / 40).sum()
    assert abs(chi_squared - 4094) < 5 * (2 * 4094) ** 0.5


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0, 2.0])
def test_every_seed_draws_the_law_s_token(temperature: float) -> None:
    """A row is so peaked that sampling takes the one token, at the highest temperature too."""
    runner = ModelRunner.load(FAST_TARGET, kv_tokens=4096)
    logits = fresh(runner, random_ids(12))[0].expand(1000, -1).contiguous()
    temperatures = torch.full((1000,), temperature, dtype=torch.float64)
    keys = torch.randint(1 << 62, (1000,), generator=torch.Generator().manual_seed(1))
    ids = runner.ops.choose(logits, temperatures, keys, runner.vocabulary_size)
    assert set(ids.tolist()) == {int(logits[0].argmax())}


def test_a_step_takes_the_time_of_its_law() -> None:
    """It ends no earlier than the formula says, and counts for exactly that long, whatever the host did meanwhile."""
    runner = ModelRunner.load("sim:h100-8b", kv_tokens=4096)
    session, chain = runner.open(random_ids(30), 1), TokenTree.chain((5, 6, 7))
    assert isinstance(runner.model, SimulatedDecoder)
    law = runner.model.model.step_s(33, 33, 33 * 34 // 2)
    started = time.perf_counter()
    runner.forward([Feed(session, chain)])
    runner.finish()
    assert time.perf_counter() - started >= law
    runner.forward([])
    runner.finish()
    assert runner.forward_counts.busy_s == law


def test_facts_say_that_it_is_simulated() -> None:
    """And have the sizes of the model that it stands for, while nothing of them is held."""
    runner = ModelRunner.load("sim:h100-8b@stretch=2")
    assert runner.identity.model_name == "sim:h100-8b@stretch=2"
    assert "simulated" in runner.numerics_id
    assert runner.model.device_name == "simulated H100 SXM"
    assert sum(each.numel() for each in runner.model.weights) == 8_030_261_248
    assert (runner.context_len, runner.pool.num_blocks) == (131_072, 26_674)
    assert sum(each.nbytes for each in (*runner.cache.keys, *runner.cache.values)) < 4 << 20
    assert ModelRunner.load(FAST_DRAFT, kv_tokens=100).pool.num_blocks == 7


def test_digests_differ_with_the_name_and_vocabularies_do_not() -> None:
    """A target is distinguished from its draft, and both fit together."""
    models = [find_checkpoint(name) for name in ("sim:h100-8b", "sim:h100-1b", "sim:h100-1b@acceptance=0.8")]
    assert len({each.digest() for each in models}) == 3
    assert all(Vocabulary.read(each.folder) == Vocabulary.read(TARGET) for each in models)


def test_other_devices_and_types_are_refused() -> None:
    """By name and with what is served."""
    found = find_checkpoint("sim:h100-8b")
    ops = choose_ops(torch.device("cpu"), 1)
    with pytest.raises(ModelRefused, match=r"^sim:h100-8b: device is cuda:0, but must be cpu"):
        found.build(torch.device("cuda:0"), torch.bfloat16, ops)
    with pytest.raises(ModelRefused, match=r"^sim:h100-8b: dtype is float32, but must be bfloat16"):
        found.build(torch.device("cpu"), torch.float32, ops)
