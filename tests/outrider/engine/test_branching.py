"""Branches of a trunk: which outcomes have some, how far they grow, and what is left when one has come.

Tokens and shares are a function of the path, so that everything can be computed again another way.
"""

import random
from collections.abc import Iterator

import pytest

from outrider.engine.branching import Branching
from outrider.engine.growth import Child
from outrider.parameters import DraftDistribution

Path = tuple[int, ...]
END = 9
LAW = DraftDistribution((1, 2), (3, 4))


def children(path: Path, *, ends: bool = False) -> list[Child]:
    """What may follow a path, the likeliest first: six tokens, among which there may be an end."""
    dice = random.Random(f"{path}")
    weights = sorted((dice.random() ** 3 + 1e-6 for _ in range(6)), reverse=True)
    token_ids = dice.sample(range(10 if ends else 9), 6)
    total = sum(weights) * 1.1
    return [Child(each, weight / total, each == END, -weight) for each, weight in zip(token_ids, weights, strict=True)]


def drawn(path: Path) -> Child:
    """What is drawn after a path, accepted three times out of four."""
    return Child(random.Random(f"drawn {path}").randrange(10), 0.75, distribution=LAW)


def path_of(growth: Branching, number: int) -> Path:
    """Tokens from the root to a node."""
    node = growth.nodes[number]
    return (*path_of(growth, node.parent), node.token_id) if number else ()


def grow(growth: Branching, prefix: Path = (), *, ends: bool = False, draws: bool = False) -> list[int]:
    """Lets it grow to its end after a prefix; how many nodes were computed at each step."""
    steps = []
    while wanted := growth.frontier():
        steps.append(len(wanted))
        for number in wanted:
            path = prefix + path_of(growth, number)
            growth.expand(number, children(path, ends=ends), drawn(path) if draws else None)
    return steps


def chain(prefix: Path, length: int, *, ends: bool = False) -> Path:
    """The likeliest tokens after a prefix, up to an end."""
    found: Path = ()
    while len(found) < length and found[-1:] != (END,):
        found += (children(prefix + found, ends=ends)[0].token_id,)
    return found


def outcomes(trunk: Path) -> Iterator[tuple[float, int, int]]:
    """Chance, number of accepted guesses and next token of everything that may come of a trunk, by brute force."""
    value = 1.0
    for place in range(len(trunk) + 1):
        after = trunk[place : place + 1]
        for child in children(trunk[:place]):
            if (child.token_id,) != after:
                yield value * child.share, place, child.token_id
        value *= sum(child.share for child in children(trunk[:place]) if (child.token_id,) == after)


@pytest.mark.parametrize(("trunk_len", "branch_len", "max_branches"), [(4, 3, 8), (1, 4, 3), (3, 1, 64), (0, 2, 4)])
def test_the_likeliest_outcomes_have_branches(trunk_len: int, branch_len: int, max_branches: int) -> None:
    """The trunk is the chain of the likeliest, each branch too, and one step computes a token of all branches."""
    growth = Branching(trunk_len, branch_len, max_branches, 99)
    steps = grow(growth)
    trunk = growth.tree().token_ids
    assert trunk == chain((), trunk_len)
    expected = sorted(outcomes(trunk), reverse=True)[:max_branches]
    found = [(each.accepted_count, each.next_token_id) for each in growth.branches()]
    assert found == [(place, token_id) for _, place, token_id in expected]
    for branch in growth.branches(with_logprobs=True):
        prefix = (*trunk[: branch.accepted_count], branch.next_token_id)
        assert branch.token_ids == chain(prefix, branch_len)
        assert len(branch.logprobs) == branch_len
    assert steps == [1] * (trunk_len + 1) + [len(found)] * (branch_len + 1)


def test_no_guess_is_deeper_than_there_is_room() -> None:
    """Neither of the trunk nor of a branch; where there is none for a guess there is no branch."""
    for room in range(1, 9):
        growth = Branching(3, 4, 30, room)
        grow(growth)
        assert len(growth.tree()) == min(3, room)
        found = {(each.accepted_count, len(each.token_ids)) for each in growth.branches()}
        assert all(place + 1 + length == min(room, place + 5) for place, length in found)
        assert {place for place, _ in found} == set(range(min(4, room - 1)))


def test_nothing_follows_an_end() -> None:
    """A trunk and a branch stop there, and what ends the request as the target's token has no branch."""
    num_ends = 0
    for first in range(200):
        growth = Branching(4, 3, 16, 99)
        grow(growth, (first,), ends=True)
        trunk = growth.tree().token_ids
        assert trunk == chain((first,), 4, ends=True)
        num_ends += trunk[-1] == END
        for branch in growth.branches():
            assert branch.next_token_id != END
            prefix = (first, *trunk[: branch.accepted_count], branch.next_token_id)
            assert branch.token_ids == chain(prefix, 3, ends=True)
    assert num_ends > 10


def test_what_is_below_an_outcome_goes_on_as_if_it_had_begun_there() -> None:
    """The branch becomes the trunk; branches of it are those of a growth that begins with its outcome."""
    growth = Branching(3, 3, 12, 99)
    grow(growth)
    for branch in growth.branches():
        prefix = (*growth.tree().token_ids[: branch.accepted_count], branch.next_token_id)
        [*_, root] = growth.follow(prefix)
        assert growth.guess_count(root) == 3
        left, numbers = growth.below(root, 3, 3, 12, 99)
        assert {path_of(growth, number) for number in numbers} == {
            prefix + branch.token_ids[:length] for length in range(4)
        }
        # The trunk is there, and what may follow its end.
        assert left.is_trunk_done
        assert left.tree().token_ids == branch.token_ids
        assert sum(grow(left, prefix)) == 4 * len(left.branches())
        fresh = Branching(3, 3, 12, 99)
        grow(fresh, prefix)
        assert left.branches() == fresh.branches()


@pytest.mark.parametrize("trunk_len", [0, 1, 2, 5])
def test_a_trunk_that_is_to_be_longer_or_shorter_is_cut_or_grown(trunk_len: int) -> None:
    """What was guessed deeper than the trunk's end was for another base, and is not there any more."""
    growth = Branching(3, 3, 12, 99)
    grow(growth, draws=True)
    branch = growth.branches()[0]
    prefix = (*growth.tree().token_ids[: branch.accepted_count], branch.next_token_id)
    left, _ = growth.below(growth.follow(prefix)[-1], trunk_len, 2, 12, 99)
    assert max(node.depth for node in left.nodes) == min(trunk_len, 4)
    grow(left, prefix, draws=True)
    fresh = Branching(trunk_len, 2, 12, 99)
    grow(fresh, prefix, draws=True)
    assert left.tree() == fresh.tree()
    assert sorted(left.branches()) == sorted(fresh.branches())


def test_guesses_that_were_drawn_are_the_chain_whatever_ends() -> None:
    """They have their laws, are as many as were asked for, and outcomes have the shares that a refusal leaves them."""
    growth = Branching(3, 4, 10, 99)
    grow(growth, ends=True, draws=True)
    path: Path = ()
    for token_id in growth.tree().token_ids:
        assert token_id == drawn(path).token_id
        path += (token_id,)
    assert len(path) == 3
    assert growth.tree().distributions == (LAW,) * 3
    assert growth.tree().values == pytest.approx([0.75, 0.75**2, 0.75**3])
    values = {}
    for place in range(4):
        others = [each for each in children(path[:place], ends=True) if place == 3 or each.token_id != path[place]]
        left = 1.0
        if place < 3:
            taken = sum(each.share for each in children(path[:place], ends=True)) - sum(each.share for each in others)
            left = 0.25 / (1 - taken)
        values |= {(place, each.token_id): 0.75**place * left * each.share for each in others if each.token_id != END}
    best = sorted(values, key=lambda each: -values[each])[:10]
    assert [(each.accepted_count, each.next_token_id) for each in growth.branches()] == best
    assert all(len(each.token_ids) == 4 and each.distributions == (LAW,) * 4 for each in growth.branches())


def test_each_guess_knows_the_base_that_it_is_for() -> None:
    """That of the trunk for its own, and for a branch's the tokens up to its outcome."""
    growth = Branching(2, 2, 8, 99)
    grow(growth, draws=True)
    for number, node in enumerate(growth.nodes):
        path, depth = path_of(growth, number), 0
        if path != growth.tree().token_ids[: node.depth]:
            depth = next(d for d in range(1, node.depth + 1) if path[:d] != growth.tree().token_ids[:d])
        assert growth.base_depth(number) == depth
    assert growth.roots == {
        number for number, node in enumerate(growth.nodes) if growth.base_depth(number) == node.depth > 0
    }


def test_branches_without_guesses_are_none() -> None:
    """Before anything is computed there are none, and no outcome is one."""
    growth = Branching(2, 2, 8, 99)
    assert growth.branches() == []
    assert growth.roots == frozenset()
