"""Forwards of a runner as tests want them: whole, alone, one by one. Knows no model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.session import Session
from outrider.engine.tree import EMPTY, TokenTree

# Two paths share row 1, and rows 5, 6, 7 leave gaps when they are kept.
TREE = TokenTree(token_ids=(11, 22, 33, 44, 55, 66, 77, 88), parents=(0, 0, 1, 1, 2, 5, 6, 3))


def random_ids(count: int, seed: int = 0, vocab_size: int = 4096) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(runner: ModelRunner, *feeds: Feed) -> list[Tensor]:
    """Feeds until every feed is finished; the logits of each one, root first."""
    logits: list[Tensor | None] = [None] * len(feeds)
    while waiting := [index for index, rows in enumerate(logits) if rows is None]:
        result = runner.forward([feeds[index] for index in waiting])
        for index, rows in zip(waiting, result.ranges, strict=True):
            if rows is not None:
                logits[index] = result.logits[rows.start : rows.stop].clone()
    return [rows for rows in logits if rows is not None]


def fresh(runner: ModelRunner, token_ids: Sequence[int], tree: TokenTree = EMPTY) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and values of a session of its own, computed alone in one go."""
    session = runner.open(token_ids, 1)
    logits = finish(runner, Feed(session, tree))[0]
    keys, values = runner.kv_state(session)
    session.free()
    return logits, keys, values


def assert_like_fresh(runner: ModelRunner, session: Session) -> None:
    """The session's cache holds bitwise what a new prefill of its tokens would."""
    assert session.cached_len == len(session)
    _, keys, values = fresh(runner, session.token_ids)
    for kept, expected in zip(runner.kv_state(session), (keys, values), strict=True):
        assert torch.equal(kept, expected)
    runner.pool.check_integrity()


def close(runner: ModelRunner, *sessions: Session) -> None:
    """Frees sessions and checks that no block is left behind."""
    for session in sessions:
        session.free()
    runner.pool.check_integrity()
    assert runner.pool.num_used == 0


def decoded(runner: ModelRunner, token_ids: Sequence[int], prompt_len: int) -> Tensor:
    """Logits of the positions from prompt_len - 1 on, one forward for each."""
    session = runner.open(token_ids[:prompt_len], prompt_len)
    steps = finish(runner, Feed(session))
    for token_id in token_ids[prompt_len:]:
        session.extend([token_id])
        steps += finish(runner, Feed(session))
    session.free()
    return torch.cat(steps)
