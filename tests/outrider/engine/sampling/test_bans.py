"""Banned sequences: what they forbid after a prefix, as a slow reading of the definition says it."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.ops import Ops, choose_ops
from outrider.engine.sampling.transforms import RowContext, forbidden, transform
from outrider.parameters import SamplingParameters
from outrider.token_tree import TokenTree

OPS: Ops = choose_ops(torch.device("cpu"), num_threads=1)
NUM_TOKENS = 6
IDS = st.integers(0, 3)
BANNED = st.lists(st.lists(IDS, min_size=1, max_size=5).map(tuple), max_size=12).map(tuple)
Sequences = tuple[tuple[int, ...], ...]


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    token_ids = draw(st.lists(IDS, max_size=8))
    return TokenTree(tuple(token_ids), tuple(draw(st.integers(0, row)) for row in range(len(token_ids))))


def slow(banned: Sequences, prefix: Sequence[int]) -> set[int]:
    """Every token that would make the text end with a banned sequence."""
    text = [(*prefix, token_id) for token_id in range(NUM_TOKENS)]
    return {each[-1] for each in text for sequence in banned if each[-len(sequence) :] == sequence}


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(banned=BANNED, committed=st.lists(IDS, min_size=1, max_size=9), path=st.lists(IDS, max_size=6).map(tuple))
def test_no_text_ends_with_a_banned_sequence(banned: Sequences, committed: list[int], path: tuple[int, ...]) -> None:
    """Whether the ids before the last one are prompt, output or draft tokens, or a mixture."""
    assert set(forbidden(banned, committed, path)) == slow(banned, [*committed, *path])


@settings(max_examples=60, derandomize=True)
@given(banned=BANNED, committed=st.lists(IDS, min_size=1, max_size=6), tree=trees(), seed=st.integers(0, 999))
def test_every_row_of_a_tree_is_masked_by_its_own_path(
    banned: Sequences, committed: list[int], tree: TokenTree, seed: int
) -> None:
    """The support of each row is what plain decoding after its path would have, and siblings do not matter."""
    paths = [tuple(tree.token_ids[step - 1] for step in tree.path(row)) for row in range(len(tree) + 1)]
    rows = [RowContext(SamplingParameters(), committed, path, 1, frozenset(), banned) for path in paths]
    logits = torch.randn(len(rows), NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    scores = transform(logits, rows, NUM_TOKENS, OPS)
    for row, path in enumerate(paths):
        support = set(range(NUM_TOKENS)) - slow(banned, [*committed, *path])
        assert set(scores[row].isfinite().nonzero().flatten().tolist()) == support
        alone = transform(logits[row : row + 1].clone(), [rows[row]], NUM_TOKENS, OPS)
        assert torch.equal(alone[0], scores[row])


def test_what_does_not_match_here_changes_nothing() -> None:
    """The row is as cheap as without bans, and has the same bits."""
    row = RowContext(SamplingParameters(temperature=0.7), (1, 2), (), 1, frozenset(), ((1, 3), (2, 1, 4), (0, 2, 5)))
    free = RowContext(SamplingParameters(temperature=0.7), (1, 2), (), 1, frozenset())
    logits = torch.randn(1, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    assert not row.held_back
    assert torch.equal(transform(logits, [row], NUM_TOKENS, OPS), transform(logits, [free], NUM_TOKENS, OPS))


def test_a_bias_does_not_free_a_banned_token() -> None:
    """Bans win, and the penalties that follow leave the token out."""
    wanted = SamplingParameters(temperature=0, logit_bias={3: 100.0}, presence_penalty=-2.0, repetition_penalty=0.5)
    row = RowContext(wanted, (1, 2, 3, 3), (2,), 2, frozenset(), ((2, 3),))
    scores = transform(torch.zeros(1, NUM_TOKENS), [row], NUM_TOKENS, OPS)
    assert scores[0].isfinite().nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_without_any_token_left_cannot_be_drawn(wanted: dict[str, float]) -> None:
    """ValueError, which the caller makes an error of that session alone."""
    banned = tuple((token_id,) for token_id in range(NUM_TOKENS))
    row = RowContext(SamplingParameters(**wanted), (1, 2), (), 1, frozenset(), banned)
    with pytest.raises(ValueError, match="finite"):
        OPS.draw(transform(torch.zeros(1, NUM_TOKENS), [row], NUM_TOKENS, OPS), torch.tensor([1]))


def test_the_longest_sequences_are_matched_in_a_long_text() -> None:
    """64 ids, across prompt, output and path, one of which differs in the other sequence."""
    text = [number % 50 for number in range(500)]
    sequence = (*text[-63:], 7)
    almost = (49, *sequence[1:-1], 8)
    assert forbidden((sequence, almost), text[:480], tuple(text[480:])) == (7,)
    assert forbidden((sequence,), text[:30]) == ()
