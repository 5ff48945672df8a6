"""Memory for weights: pieces that lie apart, begin with a cache line, and outlive the arena."""

import mmap

import pytest
import torch
from support.models.engine_cases import native

from outrider.engine.ops import arena
from outrider.engine.ops.arena import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, Arena


def check_pieces() -> None:
    """Pieces of all sizes keep their own values when the arena is gone."""
    memory = Arena()
    shapes = [(3, 5), (1,), (0, 4), (700, 300), (2, 2)]
    pieces = [memory.empty(shape, torch.bfloat16) for shape in shapes]
    large = memory.empty((arena.CHUNK_BYTES // 4 + 1,), torch.float32)
    for value, piece in enumerate([*pieces, large], start=1):
        piece.fill_(value)
    del memory
    for value, (shape, piece) in enumerate(zip(shapes, pieces, strict=True), start=1):
        assert piece.shape == shape
        assert bool((piece == value).all())
        assert piece.numel() == 0 or piece.data_ptr() % CACHE_LINE_BYTES == 0
    assert bool((large == len(pieces) + 1).all())


def test_pieces_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With huge pages, and with memory that is larger than a chunk."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1 << 20)
    check_pieces()


def test_systems_without_huge_pages_have_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no such advice, ordinary memory does."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1 << 20)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    check_pieces()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system gives no advice about huge pages")
def test_the_first_piece_begins_a_huge_page() -> None:
    """Otherwise a model of a few megabytes would have none."""
    assert Arena().empty((4, 4), torch.float32).data_ptr() % HUGE_PAGE_BYTES == 0


def test_weights_are_stacked_in_order() -> None:
    """One matrix holds the rows of all, and a single one is copied into its place."""
    ops, weights = native(), [torch.randn(rows, 6).bfloat16() for rows in (3, 1, 8)]
    assert torch.equal(ops.stack(weights), torch.cat(weights))
    assert torch.equal(ops.stack(weights[:1]), weights[0])
