"""Best-first growth against exhaustive search, EAGLE-2 as it is written, and every limit."""

import functools
import random
from collections.abc import Callable, Sequence

import pytest

from outrider.engine.growth import Child, Filling, Growth, Limits, level_order, row_count, static_shape
from outrider.token_tree import TokenTree, TreeShape


def falling(chance: random.Random, count: int) -> list[float]:
    """Shares that fall and add up to less than 1."""
    weights = sorted((chance.random() ** 3 + 1e-9 for _ in range(count)), reverse=True)
    total = sum(weights) / chance.uniform(0.3, 0.999)
    return [weight / total for weight in weights]


def best_value(rates: Sequence[float], max_rows: int, max_depth: int) -> float:
    """Sequoia's recurrence: the most that a forest of max_rows rows, whose first may be of any rank, adds up to."""

    @functools.cache
    def forest(num_rows: int, depth: int, rank: int) -> float:
        if not num_rows or not depth or rank == len(rates):
            return 0.0
        # The row of this rank has `below` rows below it, and its later siblings have the rest.
        return max(
            0.0,
            *(
                rates[rank] * (1 + forest(below, depth - 1, 0)) + forest(num_rows - 1 - below, depth, rank + 1)
                for below in range(num_rows)
            ),
        )

    return forest(max_rows, max_depth, 0)


def grow(
    limits: Limits, shares: Callable[[tuple[int, ...]], Sequence[float]], leaves: frozenset[int] = frozenset()
) -> tuple[TokenTree, list[int]]:
    """A tree whose token ids are ranks, and how many rows were expanded at each step."""
    growth, paths, steps = Growth(limits), {0: ()}, []
    while wanted := growth.frontier():
        steps.append(len(wanted))
        for number in wanted:
            path: tuple[int, ...] = paths[number]
            known = len(growth.nodes)
            growth.expand(number, [Child(k, share, k in leaves) for k, share in enumerate(shares(path))])
            paths |= {new: (*path, growth.nodes[new].token_id) for new in range(known, len(growth.nodes))}
    return growth.tree(), steps


def random_shares(seed: int, count: int) -> Callable[[tuple[int, ...]], list[float]]:
    """Shares that are different at every place, and the same whenever they are asked for."""
    return lambda path: falling(random.Random(f"{seed} {path}"), count)


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Values by the ranks along each row's path."""
    return {
        tuple(tree.token_ids[step - 1] for step in tree.path(row)): tree.values[row - 1]
        for row in range(1, len(tree) + 1)
    }


def all_values(limits: Limits, shares: Callable[[tuple[int, ...]], Sequence[float]]) -> dict[tuple[int, ...], float]:
    """Every row that there could be."""
    values: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(limits.max_depth):
        children = {(*p, k): values[p] * v for p in level for k, v in enumerate(shares(p)[: limits.max_children])}
        values |= children
        level = list(children)
    del values[()]
    return values


def test_the_heap_finds_what_the_recurrence_finds() -> None:
    """1,000 random falling rates with caps: the values of the static shape add up to the best sum there is."""
    chance = random.Random(1)
    for _ in range(1000):
        rates = falling(chance, chance.randint(1, 6))
        max_rows, max_depth = chance.randint(1, 14), chance.randint(1, 6)
        tree = static_shape(rates, max_rows, max_depth)
        assert sum(tree.values) == pytest.approx(best_value(rates, max_rows, max_depth), rel=1e-12)
        assert max(tree.depths) <= max_depth


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_is_the_best_of_all(seed: int) -> None:
    """No row that was left out is worth more than one that was taken, whatever is computed in which step."""
    chance = random.Random(seed)
    limits = Limits(chance.randint(1, 24), chance.randint(1, 4), chance.randint(1, 5))
    shares = random_shares(seed, 5)
    tree, steps = grow(limits, shares)
    best = sorted(all_values(limits, shares).values(), reverse=True)[: limits.max_rows]
    assert sorted(tree.values, reverse=True) == pytest.approx(best)
    assert len(steps) <= min(limits.max_depth, limits.max_rows)
    assert sum(steps) <= 5 * limits.max_rows


def test_a_lean_tree_is_found_however_many_rows_look_promising() -> None:
    """Where one path is worth more than all that stands beside it, and every row has eight children all the same."""
    for share in (0.3, 0.6, 0.999):
        shares = [share, *[(1 - share) * 0.9**rank / 10 for rank in range(7)]]
        tree, steps = grow(Limits(24, 32, 8), lambda _path, shares=shares: shares)
        assert sum(tree.values) == pytest.approx(sum(static_shape(shares, 24, 32).values))
        assert sum(tree.values) == pytest.approx(best_value(shares, 24, 32))
        assert sum(steps) <= 5 * 24


@pytest.mark.parametrize("seed", range(30))
def test_rows_stand_depth_first_with_the_best_child_first(seed: int) -> None:
    """So that an accepted path usually lies where it belongs; values never rise along it."""
    tree, _ = grow(Limits(16, 8, 4), random_shares(seed, 4))
    for row in range(1, len(tree) + 1):
        parent = tree.parents[row - 1]
        assert not parent or tree.values[row - 1] <= tree.values[parent - 1]
        children = tree.children(row)
        assert not children or children[0] == row + 1
        assert [tree.token_ids[child - 1] for child in children] == list(range(len(children)))


@pytest.mark.parametrize("seed", range(30))
def test_expanding_a_width_and_reranking_is_eagle_2(seed: int) -> None:
    """Its two phases as the paper has them: the best k rows of each depth are expanded, the best n of all are kept."""
    width, depth, max_rows, shares = 3, 4, 9, random_shares(seed, 4)
    values: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        children = {(*path, rank): values[path] * share for path in level for rank, share in enumerate(shares(path))}
        values |= children
        level = sorted(children, key=lambda path: -values[path])[:width]
    del values[()]
    kept = sorted(values, key=lambda path: -values[path])[:max_rows]
    tree, steps = grow(Limits.of(TreeShape(depth, 4, max_width=width), max_rows, 32), shares)
    assert paths_of(tree) == pytest.approx({path: values[path] for path in kept})
    assert max(steps) <= width


def test_expansions_fix_the_shape() -> None:
    """Two children of the root, three of each of them, one of each of those, whatever they are worth."""
    for seed in range(5):
        tree, steps = grow(Limits.of(TreeShape(expansions=(2, 3, 1)), 20, 32), random_shares(seed, 4))
        widths = [tree.depths.count(depth) for depth in range(4)]
        assert (widths, len(tree), len(steps)) == ([1, 2, 6, 6], row_count((2, 3, 1)), 3)
    assert level_order((2, 3, 1), 99) == (0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)
    assert level_order((2, 1, 1, 1), 5) == (0, 0, 1, 2, 3)
    assert level_order((3, 2, 2), 99, 1) == (0, 0, 0, 1, 1, 4, 4)


def test_a_static_shape_is_filled_level_by_level() -> None:
    """Only rows that have children are expanded, values are the shape's, and nothing stands after a leaf."""
    shape = static_shape([0.6, 0.2, 0.1], 12, 4)
    filling, steps = Filling(shape), 0
    while wanted := filling.frontier():
        steps += 1
        for number in wanted:
            filling.expand(number, [Child(token_id, 0.5, logprob=-1.0) for token_id in range(8)])
    assert filling.tree() == shape
    assert filling.tree(with_logprobs=True).logprobs == (-1.0,) * 12
    assert (steps, filling.max_children) == (max(shape.depths), 3)
    ending = Filling(shape)
    while wanted := ending.frontier():
        for number in wanted:
            ending.expand(number, [Child(0, 0.5, is_leaf=True), Child(1, 0.4)])
    tree = ending.tree()
    assert all(tree.token_ids[parent - 1] == 1 for parent in tree.parents if parent)
    assert len(tree) < 12
    assert Filling(TokenTree()).frontier() == []


def test_a_shape_is_cut_at_the_depth_that_there_is_room_for() -> None:
    """The rows may be as many as were asked for, and no deeper."""
    for shape in (TreeShape(), TreeShape(expansions=(2, 2, 2)), TreeShape(max_depth=7)):
        tree, _ = grow(Limits.of(shape, 14, 2), random_shares(1, 8))
        assert max(tree.depths) == 2


def test_nothing_stands_behind_a_leaf() -> None:
    """A token that ends the request is a guess like any other, and its room goes to others."""
    tree, _ = grow(Limits(12, 6, 3), random_shares(3, 3), frozenset({0}))
    assert 0 in tree.token_ids
    assert all(tree.token_ids[parent - 1] != 0 for parent in tree.parents if parent)
    assert len(tree) == 12


def test_one_child_makes_a_chain_and_no_rows_make_nothing() -> None:
    """As the shape says."""
    tree, steps = grow(Limits.of(TreeShape(max_children=1), 5, 32), random_shares(2, 4))
    assert (tree.is_chain, len(tree), steps) == (True, 5, [1] * 5)
    assert grow(Limits(0, 4, 4), random_shares(0, 4)) == (TokenTree(), [])


def test_hopeless_rows_keep_a_value_that_can_be_sent() -> None:
    """Above 0 as a float of 32 bits, at any depth, and not above the parent's."""
    tree, _ = grow(Limits.of(TreeShape(max_children=1), 8, 32), lambda _path: [1e-9])
    assert all(1e-31 < value <= 1e-9 for value in tree.values)
    assert sorted(tree.values, reverse=True) == list(tree.values)
