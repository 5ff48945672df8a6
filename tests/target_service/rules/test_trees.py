"""Trees under the rules that test with distributions: decided as the rules say, each alone, and in sessions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.basics import spec_of
from support.drafting.rules import (
    BASE,
    OPS,
    PROMPT,
    RULES_WITH_LAWS,
    Language,
    continued,
    drafted,
    logits_behind,
    ruled,
)
from support.drafting.trees import SHAPES, TreeRounds, TreeRule, parents_of
from support.services.stepped_target import PROMPT as PREFIX
from support.services.stepped_target import VOCABULARY_SIZE, Target, assert_like_fresh

from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import quantise
from outrider.engine.sampling.draw import DrawInput, row_contexts
from outrider.engine.sampling.transforms import transform
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.parameters import Acceptance, DraftDistribution, FinishReason, Rule, SamplingParameters, SessionSpec
from outrider.token_tree import TokenTree
from target_service.acceptance import Walk, decide
from target_service.rules.recursive_rejection import recursive_rejection
from target_service.rules.traversal import traversal
from target_service.states import Step
from target_service.trees import KeptPath, keep_path, row_uniforms

SAMPLED = spec_of(PREFIX, 60, seed=5, eos=(), temperature=0.9)
WORDY = spec_of(PREFIX, 60, seed=9, eos=(3,), temperature=1.2, top_k=40, top_p=0.9, min_tokens=4, frequency_penalty=0.7)
GREEDY = spec_of(PREFIX, 60, seed=5, eos=())
# Depth by depth, and a tree whose rows go down first.
DEEP = (0, 1, 2, 1, 0, 5, 5)
LENIENCE = 0.5

Wish = tuple[SessionSpec, TokenTree]


def grown(
    runner: ModelRunner, spec: SessionSpec, parents: Sequence[int], noise: float = 0.3, *, replacement: bool = False
) -> TokenTree:
    """A tree after the spec's tokens, from the runner's own logits with noise on them: most paths are accepted."""
    dice = torch.Generator().manual_seed(spec.seed)
    tree = TokenTree()
    last: dict[int, int] = {}
    of_rows = []
    for row, parent in enumerate(parents, start=1):
        sibling = last.get(parent)
        if sibling is None:
            path = [tree.token_ids[each - 1] for each in tree.path(parent)]
            logits = logits_behind(runner, [*spec.token_ids, *path])
            logits = logits + noise * torch.randn(logits.shape, generator=dice)
            session = runner.open((*spec.token_ids, *path), spec.prompt_len)
            [context] = row_contexts(DrawInput(Feed(session), spec))
            of_rows.append(quantise(transform(logits, [context], VOCABULARY_SIZE, runner.ops), 32, runner.ops))
        else:
            drawn = torch.tensor([tree.token_ids[sibling - 1]])
            of_rows.append(of_rows[sibling - 1] if replacement else of_rows[sibling - 1].without(drawn))
        if not of_rows[-1].sizes[0]:
            of_rows[-1] = of_rows[sibling - 1 if sibling else row - 1]
        last[parent] = row
        depth = tree.depths[parent]
        lane = tree.depths.count(depth + 1)
        key = round_key(spec.seed, len(spec.token_ids), len(spec.token_ids) + depth, Purpose.DRAFT, lane)
        token_ids = (*tree.token_ids, *of_rows[-1].draw(torch.tensor([key])).tolist())
        tree = TokenTree(token_ids, tuple(parents[:row]), (*tree.distributions, *of_rows[-1].distributions()))
    return tree


def with_logits(
    runner: ModelRunner, wishes: Sequence[Wish], bad: dict[int, Sequence[int]] | None = None
) -> tuple[list[DrawInput], torch.Tensor, list[range]]:
    """One forward over sessions of their own; `bad` names rows of an input that have no logits."""
    inputs = [DrawInput(Feed(runner.open(spec.token_ids, spec.prompt_len), tree), spec) for spec, tree in wishes]
    result = runner.forward([each.feed for each in inputs])
    ranges = [rows for rows in result.ranges if rows is not None]
    for number, rows in (bad or {}).items():
        for row in rows:
            result.logits[ranges[number].start + row] = math.nan
    for each in inputs:
        each.feed.session.free()
    return inputs, result.logits, ranges


def decided(
    runner: ModelRunner, wishes: Sequence[Wish], bad: dict[int, Sequence[int]] | None = None
) -> list[Walk | OutriderError]:
    """The walks of one forward."""
    return decide(runner, *with_logits(runner, wishes, bad))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SAMPLED, WORDY, GREEDY], ids=["sampled", "wordy", "greedy"])
@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_chain_is_decided_as_the_chain_s_own_path_decides_it(
    runner: ModelRunner, rule: Rule, spec: SessionSpec
) -> None:
    """The same tokens and counts, with rows that cannot be drawn too."""
    lengths = set()
    for number in range(24):
        now = replace(ruled(spec, rule), token_ids=(*PREFIX, number), seed=number)
        tree = drafted(runner, now, 4, noise=(0.0, 0.3, 1.0)[number % 3])
        bad = {0: [2] if number % 8 == 7 else []}
        inputs, logits, ranges = with_logits(runner, [(now, tree)], bad)
        [walk] = decide(runner, inputs, logits, ranges)
        path = keep_path(runner, inputs[0], logits)
        assert isinstance(walk, Walk)
        assert path == KeptPath(walk.accepted_rows, walk.next_token_id)
        lengths.add(len(path.rows))
    assert len(lengths) > 2


@pytest.mark.parametrize("parents", [parents_of((2,)), parents_of((2, 2)), DEEP])
@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_tree_decides_as_if_alone(runner: ModelRunner, rule: Rule, parents: tuple[int, ...]) -> None:
    """Among chains and trees of all rules, in any order."""
    wishes: list[Wish] = []
    for number in range(12):
        mixed = ruled((SAMPLED, WORDY, GREEDY)[number % 3], rule if number % 2 else tuple(Rule)[number % 5])
        spec = replace(mixed, token_ids=(*PREFIX, number), seed=number)
        needs = spec.acceptance.rule.needs_distributions and number % 4
        wishes.append((spec, grown(runner, spec, parents) if needs else drafted(runner, spec, 3)))
    alone = [decided(runner, [wish])[0] for wish in wishes]
    assert decided(runner, wishes) == alone
    assert decided(runner, wishes[::-1]) == alone[::-1]
    rows = {walk.accepted_rows for walk in alone if isinstance(walk, Walk)}
    assert len(rows) > 2


def served(rule: Rule, lenience: float = LENIENCE) -> TreeRule:
    """The rule of this name on trees."""
    if rule is Rule.BLOCK:
        return traversal
    return partial(recursive_rejection, lenience=lenience if rule is Rule.LENIENT else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_n", [3, 16])
@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_the_service_decides_as_the_rounds_of_the_statistics(rule: Rule, top_n: int, shape: str) -> None:
    """Three hundred sessions: what tests/statistics/test_tree_distributions.py commits is what the target commits."""
    language, count = Language.random(16, 0.7, SamplingParameters(temperature=0.8, top_p=0.97)), 300
    rounds = TreeRounds(
        language, served(rule), SHAPES[shape], num_seeds=count, replacement=top_n == 3 or shape == "2", top_n=top_n
    )
    seeds, last = torch.arange(count), torch.arange(count) % 16
    token_ids, distributions = rounds.draft_trees(seeds, last, BASE)
    laws = list(zip(*(each.distributions() for each in distributions), strict=True))
    trees = [TokenTree(tuple(ids), rounds.tree.parents, laws[seed]) for seed, ids in enumerate(token_ids.tolist())]
    nowhere: Any = None
    inputs = []
    for seed, tree in enumerate(trees):
        committed = (*PROMPT[:-1], seed % 16)
        acceptance = Acceptance(rule=rule, lenience=LENIENCE)
        spec = SessionSpec(committed, BASE - 1, language.sampling, seed, 100, frozenset(), frozenset(), acceptance)
        inputs.append(DrawInput(Feed(Session(nowhere, committed, BASE - 1), tree), spec))
    runner: Any = SimpleNamespace(ops=OPS, device=torch.device("cpu"), vocabulary_size=16)
    width = len(rounds.tree) + 1
    rows = torch.cat((last[:, None], token_ids), dim=1)
    ranges = [range(width * number, width * (number + 1)) for number in range(count)]
    walks = decide(runner, inputs, language.target[rows.flatten()], ranges)
    expected = [[token for token in line if token >= 0] for line in rounds.play(seeds, last, BASE).tolist()]
    found = []
    for tree, walk in zip(trees, walks, strict=True):
        assert isinstance(walk, Walk)
        assert tree.path((0, *walk.accepted_rows)[-1]) == walk.accepted_rows
        visited = (0, *walk.accepted_rows)
        assert walk.evaluated_count == sum(bool(tree.children(row)) for row in visited)
        found.append([*(tree.token_ids[row - 1] for row in walk.accepted_rows), walk.next_token_id])
    assert found == expected
    assert {len(line) for line in expected} == set(range(1, len(SHAPES[shape]) + 2))


def test_every_row_has_a_uniform_of_its_own() -> None:
    """That of its position and of its number among those of its depth; of a chain the first of each."""
    tree = TokenTree((1,) * len(DEEP), DEEP)
    places = [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (1, 2), (1, 3)]
    keys = [round_key(7, 40, 40 + above, Purpose.ACCEPTANCE, lane) for above, lane in places]
    chain = row_uniforms(TokenTree.chain((1,) * 3), 7, 40)
    uniforms = row_uniforms(tree, 7, 40)
    assert len(set(keys)) == len(set(uniforms)) == len(DEEP)
    assert uniforms[:3] == chain


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_temperature_0_is_greedy(runner: ModelRunner, rule: Rule) -> None:
    """Whatever the siblings are drawn from, the walk is that of `match` up to which of equal siblings it takes."""
    kept = 0
    for seed in range(10):
        spec = replace(GREEDY, token_ids=(*PREFIX, seed), seed=seed)
        broad = ruled(replace(SAMPLED, token_ids=spec.token_ids, seed=seed), rule)
        tree = grown(runner, broad, DEEP)
        [found] = decided(runner, [(ruled(spec, rule), tree)])
        [expected] = decided(runner, [(spec, TokenTree(tree.token_ids, tree.parents))])
        assert found == expected
        assert isinstance(found, Walk)
        kept += len(found.accepted_rows)
    assert kept


def certain_tree(token_ids: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Guesses that are looked up and not drawn."""
    return TokenTree(
        tuple(token_ids), tuple(parents), tuple(DraftDistribution((token_id,), (1,)) for token_id in token_ids)
    )


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_token_0_is_a_token_like_any_other(runner: ModelRunner, rule: Rule) -> None:
    """B11: it is kept at every place of a tree where the target says it, and rejected where it does not."""
    only_zero = spec_of(PREFIX, 60, seed=5, eos=(), temperature=1.0, logit_bias={0: 100.0})
    parents = parents_of((2, 2))
    for zeros in ((1, 3), (2, 6), (1, 2, 3, 4, 5, 6), (2, 5, 6), (2,), ()):
        token_ids = [0 if row in zeros else 9 for row in range(1, 7)]
        [walk] = decided(runner, [(ruled(only_zero, rule), certain_tree(token_ids, parents))])
        assert isinstance(walk, Walk)
        first = next((row for row in (1, 2) if row in zeros), 0)
        second = next((row for row in zeros if parents[row - 1] == first and first), 0)
        assert walk.accepted_rows == tuple(row for row in (first, second) if row)
        assert walk.next_token_id == 0


def test_lenience_at_temperature_0_follows_the_most_probable_child(runner: ModelRunner) -> None:
    """Among those of at least lenience times the largest probability, whatever their order."""
    spec = replace(GREEDY, token_ids=PREFIX)
    probs = runner.ops.softmax(logits_behind(runner, list(PREFIX)))[0]
    best, *rivals = probs.argsort(descending=True)[[0, 30, 60]].tolist()
    shares = [float(probs[each] / probs[best]) for each in rivals]
    tree = certain_tree((rivals[1], rivals[0], rivals[0]), (0, 0, 0))
    for lenience, rows in ((shares[1] * 0.9, (2,)), (shares[0] * 0.99, (2,)), (shares[0] * 1.01, ())):
        lenient = ruled(spec, Rule.LENIENT, lenience=lenience)
        [walk] = decided(runner, [(lenient, tree)])
        assert isinstance(walk, Walk)
        assert (walk.accepted_rows, walk.evaluated_count) == (rows, 1)
        behind = decided(runner, [(continued(spec, [rivals[0]] if rows else []), TokenTree())])[0]
        assert isinstance(behind, Walk)
        assert walk.next_token_id == behind.next_token_id


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_rows_without_a_draw_are_leaves_that_are_not_entered(runner: ModelRunner, rule: Rule) -> None:
    """Their token is committed as the last one; nothing after them is, and nothing beside them changes."""
    seen = set()
    for number in range(40):
        spec = replace(ruled(SAMPLED, rule), token_ids=(*PREFIX, number), seed=number)
        tree, other = grown(runner, spec, DEEP, noise=3.0), (replace(SAMPLED, seed=number), TokenTree())
        [right, beside] = decided(runner, [(spec, tree), other])
        [found, still] = decided(runner, [(spec, tree), other], {0: (1, 6)})
        assert still == beside
        assert isinstance(found, Walk)
        assert isinstance(right, Walk)
        assert not {1, 6} & set(found.accepted_rows)
        if rule is not Rule.BLOCK and right.accepted_rows[:1] == (1,):
            assert found == Walk((), tree.token_ids[0], 1)
        if 1 not in right.accepted_rows and 6 not in right.accepted_rows and rule is not Rule.BLOCK:
            assert found == right
        if found.next_token_id == tree.token_ids[5] and found.accepted_rows == (5,):
            assert found.evaluated_count == 2
        seen.add(found.accepted_rows[:1])
    assert seen == {(), (5,)}


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_root_without_a_draw_fails_alone(runner: ModelRunner, rule: Rule) -> None:
    """The error names the length; a tree beside it is decided as ever."""
    wishes = [
        (each, grown(runner, each, DEEP)) for each in (ruled(SAMPLED, rule), replace(ruled(SAMPLED, rule), seed=8))
    ]
    right = decided(runner, wishes)
    found = decided(runner, wishes, {0: (0,)})
    assert found[1] == right[1]
    assert isinstance(found[0], OutriderError)
    assert "behind 5 tokens, so no token can be drawn" in str(found[0])


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_request_of_trees_goes_to_its_end(target: Target, rule: Rule) -> None:
    """Verdicts follow each other, off the first chain too; the cache is that of a fresh session, and a step is
    answered again with the same tokens.
    """
    spec = ruled(SAMPLED, rule)
    target.open(spec)
    target.run()
    paths = set()
    while target.held.finish_reason is None:
        now = replace(spec, token_ids=tuple(target.tokens))
        length = len(now.token_ids)
        parents = DEEP if spec.max_len - length > 3 else parents_of((2,))
        tree = grown(target.runner, now, parents, noise=3.0)
        answers = []
        for _ in range(2):
            target.sessions.step(target.fence(1, length), Step(tree, 0, 0), target.answers)
            answers += target.run()
        first, again = answers
        assert first == again
        verdict = first.content
        assert verdict is not None
        kept = tuple(tree.token_ids[row - 1] for row in verdict.accepted_rows)
        assert verdict.token_ids[: len(kept)] == kept
        paths.add(verdict.accepted_rows)
        assert_like_fresh(target)
    assert len(target.tokens) == spec.max_len
    assert target.held.finish_reason is FinishReason.LENGTH
    assert any(rows and rows[0] == 5 for rows in paths)
    assert any(rows and rows[0] == 1 for rows in paths)
