"""The rule `match` commits what plain decoding would have drawn, and stops where plain decoding would have stopped."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.engine.walk import Walk, walk
from outrider.parameters import FinishReason, SamplingParameters, SessionSpec
from outrider.token_tree import EMPTY, TokenTree
from target_service.acceptance import TargetVerdict, commit_walk

EOS, STOP = 90, 91
SPEC = SessionSpec(
    token_ids=(1, 2, 3),
    prompt_len=2,
    sampling=SamplingParameters(),
    seed=1,
    max_len=100,
    eos_token_ids=frozenset({EOS}),
    stop_token_ids=frozenset({STOP}),
)
# The root has the children 1 (token 5) and 2 (token 6); 3 and 4 (7, 8) follow row 2, and 5 (token 9) follows row 4.
BRANCHED = TokenTree((5, 6, 7, 8, 9), (0, 0, 2, 2, 4))
Walker = Callable[[TokenTree, list[int]], Walk]


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([1, 0, 0, 0], Walk((), 1, 1)),
        ([5, 1, 0, 0], Walk((1,), 1, 2)),
        ([5, 6, 1, 0], Walk((1, 2), 1, 3)),
        ([5, 6, 7, 1], Walk((1, 2, 3), 1, 3)),
        ([1, 6, 7, 8], Walk((), 1, 1)),
        ([5, 1, 7, 8], Walk((1,), 1, 2)),
        ([6, 6, 7, 8], Walk((), 6, 1)),
    ],
)
def test_a_chain_is_followed_to_the_first_difference(drawn: list[int], expected: Walk) -> None:
    """Truth table of the chain 5 6 7: tokens after a rejection are neither accepted nor evaluated."""
    assert walk(TokenTree.chain([5, 6, 7]), drawn) == expected


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([1, 0, 0, 0, 0, 0], Walk((), 1, 1)),
        ([5, 1, 7, 8, 9, 1], Walk((1,), 1, 1)),
        ([6, 0, 1, 0, 0, 0], Walk((2,), 1, 2)),
        ([6, 0, 7, 1, 0, 0], Walk((2, 3), 1, 2)),
        ([6, 0, 8, 0, 1, 0], Walk((2, 4), 1, 3)),
        ([6, 0, 8, 0, 9, 1], Walk((2, 4, 5), 1, 3)),
    ],
)
def test_a_tree_is_followed_along_the_draws(drawn: list[int], expected: Walk) -> None:
    """Truth table of a branched tree: the children of a visited row count as one that was evaluated."""
    assert walk(BRANCHED, drawn) == expected


def test_the_empty_proposal_is_plain_decoding() -> None:
    """One draw, nothing evaluated, one token."""
    assert walk(EMPTY, [7]) == Walk((), 7, 0)
    assert commit_walk(EMPTY, walk(EMPTY, [7]), SPEC, 3) == TargetVerdict(3, (), (7,), 7, None, 0)


def test_of_equal_siblings_the_first_is_followed() -> None:
    """A wasteful tree is still exact: the lowest row wins."""
    assert walk(TokenTree((5, 5, 6, 7), (0, 0, 1, 2)), [5, 7, 7, 0, 0]) == Walk((1,), 7, 2)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_every_row_needs_a_draw(count: int) -> None:
    """A root and three rows have four draws; anything else raises ValueError."""
    with pytest.raises(ValueError, match=f"{count} draws for a root and 3 rows"):
        walk(TokenTree.chain([5, 6, 7]), [0] * count)


def settled(proposal: list[int], drawn: list[int], spec: SessionSpec = SPEC, base_len: int = 3) -> TargetVerdict:
    tree = TokenTree.chain(proposal)
    return commit_walk(tree, walk(tree, drawn), spec, base_len)


@pytest.mark.parametrize(("token_id", "reason"), [(EOS, FinishReason.EOS), (STOP, FinishReason.STOP_TOKEN)])
def test_an_accepted_end_token_is_the_last_one(token_id: int, reason: FinishReason) -> None:
    """The verdict is cut after it: no next token, and the rows after are not evaluated, though they matched."""
    verdict = settled([5, token_id, 6, 7], [5, token_id, 6, 7, 8])
    assert verdict == TargetVerdict(3, (1, 2), (5, token_id), None, reason, 2)


@pytest.mark.parametrize(("token_id", "reason"), [(EOS, FinishReason.EOS), (STOP, FinishReason.STOP_TOKEN)])
def test_an_end_token_as_the_next_token_is_committed(token_id: int, reason: FinishReason) -> None:
    """The target's own end token is present as the next token, with the reason; the draft token it refused counts."""
    assert settled([5, 6], [5, token_id, 0]) == TargetVerdict(3, (1,), (5, token_id), token_id, reason, 2)


def test_a_rejected_end_token_ends_nothing() -> None:
    """An EOS that only the draft wanted is one more rejected token."""
    assert settled([5, EOS], [5, 6, 0]) == TargetVerdict(3, (1,), (5, 6), 6, None, 2)


def test_only_the_end_tokens_of_the_spec_end() -> None:
    """Under ignore_eos the gateway sends no EOS ids, and the token is an ordinary one."""
    spec = replace(SPEC, eos_token_ids=frozenset(), stop_token_ids=frozenset())
    assert settled([EOS, STOP], [EOS, STOP, EOS], spec) == TargetVerdict(3, (1, 2), (EOS, STOP, EOS), EOS, None, 2)


def test_a_token_that_is_eos_and_stop_is_eos() -> None:
    """The model's own end comes before the request's."""
    assert settled([], [EOS], replace(SPEC, stop_token_ids=frozenset({EOS}))).finish_reason is FinishReason.EOS


@pytest.mark.parametrize(
    ("max_len", "expected"),
    [
        (4, TargetVerdict(3, (1,), (5,), None, FinishReason.LENGTH, 1)),
        (5, TargetVerdict(3, (1, 2), (5, 6), None, FinishReason.LENGTH, 2)),
        (6, TargetVerdict(3, (1, 2), (5, 6, 7), 7, FinishReason.LENGTH, 2)),
        (7, TargetVerdict(3, (1, 2), (5, 6, 7), 7, None, 2)),
    ],
)
def test_the_length_limit_cuts(max_len: int, expected: TargetVerdict) -> None:
    """max_len counts prompt and output; it is reached by an accepted row or by the next token, and never passed."""
    assert settled([5, 6], [5, 6, 7], replace(SPEC, max_len=max_len)) == expected


@pytest.mark.parametrize(("proposal", "drawn"), [([EOS], [EOS, 0]), ([], [EOS])])
def test_eos_wins_over_the_length(proposal: list[int], drawn: list[int]) -> None:
    """The token that fills the request and is EOS ends it as EOS, accepted or drawn."""
    assert settled(proposal, drawn, replace(SPEC, max_len=4)).finish_reason is FinishReason.EOS


def test_the_first_end_counts() -> None:
    """A length limit before an EOS ends the request as LENGTH, and the EOS is never committed."""
    verdict = settled([5, EOS], [5, EOS, 0], replace(SPEC, max_len=4))
    assert (verdict.token_ids, verdict.finish_reason) == ((5,), FinishReason.LENGTH)


def test_children_of_the_end_are_not_evaluated() -> None:
    """The draw that accepted the end decided its siblings with it; the end's own children stay undecided."""
    tree = TokenTree((5, EOS, 6), (0, 0, 2))
    verdict = commit_walk(tree, walk(tree, [EOS, 0, 6, 7]), SPEC, 3)
    assert verdict == TargetVerdict(3, (2,), (EOS,), None, FinishReason.EOS, 1)


def test_a_request_that_has_ended_takes_no_step() -> None:
    """A step at max_len is the caller's bug, and raises ValueError."""
    with pytest.raises(ValueError, match="a request of 3 tokens has ended at 3"):
        settled([], [5], replace(SPEC, max_len=3))


def drawn_after(prefix: tuple[int, ...], seed: int) -> int:
    """A stand-in for the target: a fixed token for every prefix, from few ids so that random drafts often match."""
    return random.Random(repr((prefix, seed))).choices((1, 2, 3, EOS, STOP), (8, 8, 8, 1, 1))[0]


def plain(prefix: tuple[int, ...], seed: int, spec: SessionSpec) -> tuple[tuple[int, ...], FinishReason]:
    """Plain decoding, written independently: a token at a time until one of the three ends."""
    tokens = list(prefix)
    while True:
        token_id = drawn_after(tuple(tokens), seed)
        tokens.append(token_id)
        if token_id == EOS:
            return tuple(tokens), FinishReason.EOS
        if token_id == STOP:
            return tuple(tokens), FinishReason.STOP_TOKEN
        if len(tokens) == spec.max_len:
            return tuple(tokens), FinishReason.LENGTH


def random_tree(source: random.Random, prefix: tuple[int, ...], seed: int) -> TokenTree:
    """A tree of up to 12 rows; half of its tokens are what the target will draw there, the others random."""
    token_ids: list[int] = []
    parents: list[int] = []
    for index in range(source.randrange(13)):
        parent = source.choice([index, source.randrange(index + 1)])
        parents.append(parent)
        path = TokenTree((*token_ids, 0), tuple(parents)).path(parent)
        right = drawn_after((*prefix, *(token_ids[row - 1] for row in path)), seed)
        token_ids.append(source.choice([right, source.choice((1, 2, 3, EOS, STOP))]))
    return TokenTree(tuple(token_ids), tuple(parents))


def speculate(seed: int, spec: SessionSpec, walker: Walker) -> tuple[tuple[int, ...], FinishReason]:
    """Rounds of random proposals until the request ends; checks what every verdict says of itself."""
    source, tokens = random.Random(seed), spec.token_ids
    while True:
        tree = random_tree(source, tokens, seed)
        paths = [tuple(tree.token_ids[row - 1] for row in tree.path(row)) for row in range(len(tree) + 1)]
        way = walker(tree, [drawn_after((*tokens, *path), seed) for path in paths])
        verdict = commit_walk(tree, way, spec, len(tokens))
        accepted = tuple(tree.token_ids[row - 1] for row in verdict.accepted_rows)
        tail = () if verdict.next_token_id is None else (verdict.next_token_id,)
        assert verdict.token_ids == accepted + tail
        assert len(verdict.accepted_rows) <= verdict.evaluated_count <= len(tree)
        tokens += verdict.token_ids
        if verdict.finish_reason is not None:
            return tokens, verdict.finish_reason


@pytest.mark.parametrize("max_len", [4, 5, 12, 40])
def test_any_trees_commit_what_plain_decoding_draws(max_len: int) -> None:
    """Whole requests over random trees equal plain decoding token for token, with the same reason to end."""
    spec = replace(SPEC, max_len=max_len)
    for seed in range(150):
        assert speculate(seed, spec, walk) == plain(spec.token_ids, seed, spec)


def test_an_off_by_one_walk_is_found() -> None:
    """A walk that takes the next token from the row before the last accepted one fails the comparison above."""

    def shifted(tree: TokenTree, drawn: list[int]) -> Walk:
        way = walk(tree, drawn)
        return way._replace(next_token_id=drawn[(0, 0, *way.accepted_rows)[-2]])

    spec = replace(SPEC, max_len=40)
    results = [speculate(seed, spec, shifted) == plain(spec.token_ids, seed, spec) for seed in range(50)]
    assert not all(results)
