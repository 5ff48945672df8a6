"""Trees of guesses against an oracle that computes every row anew, and planted faults that would be noticed."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.basics import spec_of
from support.drafting.rules import RULES_WITH_LAWS, ruled
from support.models.engine_cases import finish, numpy_gumbel
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import CONTEXT_LEN, PROMPT, fresh_tree

from outrider.drafters import tree_drafter
from outrider.drafters.model_drafter import SAMPLED
from outrider.drafters.scales import FIRST_RATES, FIRST_SCALES
from outrider.engine.batching import Feed
from outrider.engine.growth import static_shape
from outrider.engine.noise import Purpose, first_uniforms, noise_key, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, quantise
from outrider.engine.sampling.draw import DrawInput, shared_keys
from outrider.engine.sampling.transforms import RowContext, transform
from outrider.parameters import Rule, SamplingParameters, SessionSpec
from outrider.token_tree import TokenTree, TreeShape

SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
    "edited": {"temperature": 1.3, "repetition_penalty": 1.3, "logit_bias": {7: 9.0}},
    "greedy and edited": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 9.0, 8: 8.5}},
}
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=257, context_len=CONTEXT_LEN
    )
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)


def spec(sampling: dict[str, object], seed: int = 5) -> SessionSpec:
    made = spec_of(PROMPT, 60, seed=seed, eos=())
    return replace(made, sampling=SamplingParameters(**sampling))


def oracle(runner: ModelRunner, spec: SessionSpec, max_rows: int, max_children: int) -> dict[tuple[int, ...], float]:
    """The best paths with their values: each path computed in a session of its own, one row at a time."""
    greedy = spec.sampling.temperature == 0
    scale = FIRST_SCALES[not greedy]
    sampling = spec.sampling.model_copy(update={"temperature": 1.0}) if greedy else spec.sampling
    values: dict[tuple[int, ...], float] = {(): 1.0}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        path = waiting.pop()
        session = runner.open([*spec.token_ids, *path], 1)
        logits = finish(runner, Feed(session))[0][-1:]
        session.free()
        context = RowContext(sampling, spec.token_ids, path, spec.prompt_len, frozenset())
        sums = transform(logits, [context], runner.vocabulary_size, runner.ops)[0].double().numpy()
        if not greedy:
            key = noise_key(spec.seed, len(spec.token_ids) + len(path), Purpose.TOKEN)
            sums = sums + numpy_gumbel(np.array([key]).view(np.uint64), len(sums))[0]
        weights = np.exp((sums - sums.max()) / scale)
        for token in np.argsort(-sums, kind="stable")[:max_children]:
            if weights[token]:
                values[(*path, int(token))] = values[path] * float(weights[token] / weights.sum())
        least = sorted(values.values(), reverse=True)[: max_rows + 1][-1] if len(values) > max_rows else 0.0
        waiting = [each for each in waiting if values[each] > least]
        waiting += [
            each for each in values if len(each) == len(path) + 1 and each[:-1] == path and values[each] > least
        ]
    del values[()]
    best = sorted(values, key=lambda each: -values[each])[:max_rows]
    return {each: values[each] for each in best}


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens along the path of each row."""
    return [tuple(tree.token_ids[step - 1] for step in tree.path(row)) for row in range(1, len(tree) + 1)]


@EVERY_SAMPLING
@pytest.mark.parametrize(("max_rows", "max_children"), [(1, 8), (6, 2), (9, 8)])
def test_the_tree_has_the_likeliest_rows(
    runner: ModelRunner, sampling: dict[str, object], max_rows: int, max_children: int
) -> None:
    """Those of the oracle with its values: top tokens under scores plus noise, at temperature 0 under edited logits."""
    wanted = spec(sampling)
    tree = fresh_tree(runner, wanted, max_rows, TreeShape(max_children=max_children))
    expected = oracle(runner, wanted, max_rows, max_children)
    assert set(paths_of(tree)) == set(expected)
    assert tree.values == pytest.approx([expected[path] for path in paths_of(tree)], rel=1e-6)


@EVERY_SAMPLING
@pytest.mark.parametrize("max_children", [1, 2, 4, 8])
def test_first_children_are_the_chain(runner: ModelRunner, sampling: dict[str, object], max_children: int) -> None:
    """The path of first children says what a chain would have said; with one child a row the tree is the chain."""
    for seed in range(6):
        wanted = spec(sampling, seed)
        chain = fresh_tree(runner, wanted, 7, None)
        tree = fresh_tree(runner, wanted, 7, TreeShape(max_children=max_children))
        row, path = 0, []
        while children := tree.children(row):
            row = children[0]
            path.append(tree.token_ids[row - 1])
        assert tuple(path) == chain.token_ids[: len(path)]
        assert max_children > 1 or tuple(path) == chain.token_ids == tree.token_ids
        assert not chain.values
        assert len(tree.values) == len(tree) == 7


def test_noise_keyed_by_rows_would_be_noticed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault B18: the rows of a depth no longer share the noise of their position."""
    wanted = spec(SAMPLINGS["plain"])
    expected = paths_of(fresh_tree(runner, wanted, 9, TreeShape(max_children=2)))

    def by_row(inputs: list[DrawInput]) -> np.ndarray:  # type: ignore[type-arg]
        keys = [
            noise_key(each.spec.seed, len(each.feed.session) + row, Purpose.TOKEN)
            for each in inputs
            for row in range(each.feed.num_computed, len(each.feed.tree) + 1)
        ]
        return np.array(keys, dtype=np.int64)

    monkeypatch.setattr(tree_drafter, "shared_keys", by_row)
    assert paths_of(fresh_tree(runner, wanted, 9, TreeShape(max_children=2))) != expected
    monkeypatch.setattr(tree_drafter, "shared_keys", shared_keys)
    assert paths_of(fresh_tree(runner, wanted, 9, TreeShape(max_children=2))) == expected


def test_collapsed_scores_would_be_noticed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault B17: after the argmax of temperature 0 there is no second child, and the tree is a chain."""
    wanted = spec(SAMPLINGS["greedy"])
    assert not fresh_tree(runner, wanted, 8, TreeShape()).is_chain
    monkeypatch.setattr(tree_drafter, "before_argmax", lambda draw_input: draw_input)
    assert fresh_tree(runner, wanted, 8, TreeShape()).is_chain


def test_an_end_is_a_leaf(runner: ModelRunner) -> None:
    """A token that ends the request is guessed, and nothing after it; a stop token as well."""
    wanted = spec(SAMPLINGS["plain"])
    free = fresh_tree(runner, wanted, 12, TreeShape())
    inner = sorted({free.token_ids[parent - 1] for parent in free.parents if parent})
    assert len(inner) > 1
    ending = replace(wanted, eos_token_ids=frozenset(inner[:1]), stop_token_ids=frozenset(inner[1:2]))
    tree = fresh_tree(runner, ending, 12, TreeShape())
    assert set(inner[:2]) & set(tree.token_ids)
    assert all(tree.token_ids[parent - 1] not in inner[:2] for parent in tree.parents if parent)
    assert len(tree) == 12


@pytest.mark.parametrize("expansions", [(3,), (2, 2), (1, 3, 1)])
def test_expansions_fix_the_shape(runner: ModelRunner, expansions: tuple[int, ...]) -> None:
    """Every row of a depth has as many children, the best first."""
    for sampling, rule in itertools.product(SAMPLINGS.values(), (Rule.MATCH, Rule.RATIO)):
        tree = fresh_tree(runner, ruled(spec(sampling), rule), 9, TreeShape(expansions=expansions))
        for row, depth in enumerate(tree.depths):
            count = expansions[depth] if depth < len(expansions) else 0
            # Under a distribution with one token there is one child to draw.
            assert len(tree.children(row)) == count or (rule is Rule.RATIO and not sampling["temperature"])


def test_a_static_shape_depends_on_no_guess(runner: ModelRunner) -> None:
    """It is the best one for the rates by rank, whatever the tokens; at temperature 0 a distribution has one child."""
    for sampling, rule in itertools.product(SAMPLINGS.values(), (Rule.MATCH, Rule.RATIO)):
        rates = FIRST_RATES[sampling["temperature"] > 0][: 8 if sampling["temperature"] or rule is Rule.MATCH else 1]
        for shape in (TreeShape(is_static=True), TreeShape(4, 2, max_width=2, is_static=True)):
            expected = static_shape(rates[: shape.max_children or 8], 9, shape.max_depth or 32, shape.max_width)
            tree = fresh_tree(runner, ruled(spec(sampling), rule), 9, shape)
            assert tree.parents == expected.parents
            assert tree.values == (() if rule is Rule.RATIO else pytest.approx(expected.values))


def test_rows_of_a_static_shape_are_the_best_of_their_parents(runner: ModelRunner) -> None:
    """Those that expansions would find there, at temperature 0 too."""
    for sampling in SAMPLINGS.values():
        static = fresh_tree(runner, spec(sampling), 12, TreeShape(is_static=True, max_depth=3))
        full = fresh_tree(runner, spec(sampling), 584, TreeShape(expansions=(8, 8, 8)))
        assert set(paths_of(static)) <= set(paths_of(full))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_so_many_rows_of_a_level_have_children(runner: ModelRunner, width: int) -> None:
    """The likeliest where rows have values, the first elsewhere."""
    for sampling, rule in itertools.product(SAMPLINGS.values(), (Rule.MATCH, Rule.RATIO)):
        tree = fresh_tree(runner, ruled(spec(sampling), rule), 24, TreeShape(max_children=4, max_width=width))
        inner = [tree.depths[parent] for parent in set(tree.parents)]
        assert max(map(inner.count, inner)) <= width
        assert rule is not Rule.MATCH or len(tree) == 24


def test_the_last_place_is_the_deepest(runner: ModelRunner) -> None:
    """Depth ends where the request or the context does, however many rows are wanted."""
    for max_len, depth in ((len(PROMPT) + 3, 2), (len(PROMPT) + 1, 0), (10 * CONTEXT_LEN, 32)):
        for rule in (Rule.MATCH, Rule.RATIO):
            wanted = replace(ruled(spec(SAMPLINGS["plain"]), rule), max_len=max_len)
            tree = fresh_tree(runner, wanted, 40, TreeShape(max_children=1 if depth == 32 else 3))
            assert max(tree.depths) == depth
            assert len(tree) == (min(depth, 40) if depth in {0, 32} else len(tree) or 1)


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
@pytest.mark.parametrize("sampling", ["plain", "warm", "greedy"])
def test_siblings_are_drawn_one_after_the_other_without_replacement(
    runner: ModelRunner, rule: Rule, sampling: str
) -> None:
    """Each from the distribution of the one before without its token, with its own lane's noise; values are unknown."""
    wanted = ruled(spec(SAMPLINGS[sampling]), rule)
    tree = fresh_tree(runner, wanted, 12, TreeShape(expansions=(3, 2)))
    numbers = [0] * 3
    lanes = {0: 0}
    for row, depth in enumerate(tree.depths[1:], start=1):
        lanes[row] = numbers[depth]
        numbers[depth] += 1
    base_len = len(wanted.token_ids)
    for row in range(len(tree) + 1):
        path = tuple(tree.token_ids[step - 1] for step in tree.path(row))
        session = runner.open([*wanted.token_ids, *path], 1)
        logits = finish(runner, Feed(session))[0][-1:]
        session.free()
        context = RowContext(wanted.sampling, wanted.token_ids, path, wanted.prompt_len, frozenset())
        scores = transform(logits, [context], runner.vocabulary_size, runner.ops)
        [law] = quantise(scores, DEFAULT_TOP_N, runner.ops).distributions()
        for sibling, child in enumerate(tree.children(row)):
            assert tree.distributions[child - 1] == law
            lane = lanes[row] * 8 + sibling
            key = round_key(wanted.seed, base_len, base_len + len(path), Purpose.DRAFT, lane)
            levels = np.cumsum(law.weights)
            place = int(np.searchsorted(levels, first_uniforms([key])[0] * levels[-1], side="right"))
            assert tree.token_ids[child - 1] == law.token_ids[place]
            law = law.without(law.token_ids[place])
    assert not tree.values
    assert len(tree) == (2 if sampling == "greedy" else 9)


@pytest.mark.parametrize(("rule", "drafter"), [*((rule, "model") for rule in RULES_WITH_LAWS), (Rule.MATCH, SAMPLED)])
def test_a_drawn_tree_begins_like_the_chain(runner: ModelRunner, rule: Rule, drafter: str) -> None:
    """Lanes begin at 0: the first path is the chain's beginning, and of one child a row the tree is the chain."""
    wanted = ruled(spec(SAMPLINGS["plain"]), rule)
    chain = fresh_tree(runner, wanted, 6, None, drafter)
    assert fresh_tree(runner, wanted, 6, TreeShape(max_children=1), drafter) == chain
    tree = fresh_tree(runner, wanted, 6, TreeShape(), drafter)
    assert [tree.depths.count(depth) for depth in range(5)] == [1, 2, 2, 2, 0]
    assert tree.token_ids[:3] == chain.token_ids[:3]
    assert tree.distributions[:3] == chain.distributions[:3]


def test_log_probabilities_are_those_of_the_law_drawn_from(runner: ModelRunner) -> None:
    """The chain's own where there is one child a row, one number a row elsewhere, and none unless they are wanted."""
    for sampling, rule in itertools.product(SAMPLINGS.values(), (Rule.MATCH, Rule.RATIO)):
        wanted = replace(ruled(spec(sampling), rule), draft_logprobs=True)
        chain = fresh_tree(runner, wanted, 5, None)
        assert fresh_tree(runner, wanted, 5, TreeShape(max_children=1)).logprobs == pytest.approx(chain.logprobs)
        tree = fresh_tree(runner, wanted, 5, TreeShape(max_children=3))
        assert len(tree.logprobs) == len(tree)
        assert all(logprob <= 0 for logprob in tree.logprobs)
        assert not fresh_tree(runner, replace(wanted, draft_logprobs=False), 5, TreeShape()).logprobs


def test_a_row_without_a_token_has_no_children(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside rows that have some: the tree goes on without it, and all else is what it was."""
    wanted = spec(SAMPLINGS["plain"])
    whole = fresh_tree(runner, wanted, 9, TreeShape(max_children=3))
    bad = whole.token_ids[0]
    forward = runner.model.forward

    def broken(plan, cache, rows):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        logits = forward(plan, cache, rows)
        logits[plan.token_ids[rows] == bad] = torch.nan
        return logits

    monkeypatch.setattr(runner.model, "forward", broken)
    tree = fresh_tree(runner, wanted, 9, TreeShape(max_children=3))
    assert bad in tree.token_ids
    assert all(tree.token_ids[parent - 1] != bad for parent in tree.parents if parent)
    assert len(tree) == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_children", [1, 2, 4])
def test_children_cover_the_target_as_often_as_the_law_says(
    runner: ModelRunner, temperature: float, max_children: int
) -> None:
    """20,000 draws of a toy pair: our noise against numpy's, within four standard deviations of the difference."""
    count, chance = 20_000, np.random.default_rng(max_children)
    draft, target = (np.log(chance.dirichlet(np.ones(7), size=count)).astype(np.float32) for _ in range(2))
    # Near each other, as a draft and its target are.
    target = (0.6 * draft + 0.4 * target).astype(np.float32)

    def covered(noise: np.ndarray, ids: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return (ids == (target + noise).argmax(axis=1)[:, None]).any(axis=1)  # type: ignore[no-any-return]

    keys = torch.tensor([noise_key(seed, 3, Purpose.TOKEN) for seed in range(count)])
    shared = numpy_gumbel(keys.numpy().view(np.uint64), 7) * temperature
    fresh = chance.gumbel(size=(count, 7)) * temperature
    scales = torch.ones(count, dtype=torch.float64)
    ids = runner.ops.rank(torch.from_numpy(draft), scales, max_children, keys if temperature else None)[0]
    ours = covered(shared, ids.numpy())
    law = covered(fresh, np.argsort(-(draft + fresh), axis=1)[:, :max_children])
    deviation = (ours.var() / count + law.var() / count) ** 0.5
    assert abs(ours.mean() - law.mean()) <= 4 * deviation
    assert 0.3 < ours.mean() < 1
