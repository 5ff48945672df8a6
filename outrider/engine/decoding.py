"""One forward over many sessions and a token drawn behind every row: what the draft and the target do alike.

Knows no messages, no acceptance and no lengths of requests. A session that cannot be served fails alone, and a tree's
row that cannot be drawn fails nobody: it may be one that plain decoding would never have computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from outrider.engine.noise import Purpose, noise_key
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.sampling import RowContext, transform
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec

Allocate = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What one session wants of a forward: its feed, and the parameters to draw with."""

    feed: Feed
    spec: SessionSpec


# Stands for the draw of a tree's row that has none; no vocabulary has it.
UNDRAWN = -1

# Drawn tokens of a feed's rows, the root's first; None when its prompt is not finished; what went wrong otherwise. Only
# behind the root a row may be UNDRAWN.
Outcome = list[int] | OutriderError | None


def reserve(runner: ModelRunner, feed: Feed, with_room: Callable[[Allocate], None]) -> None:
    """Makes sure that a forward cannot fail over this feed; raises CacheFull and InvalidRequest.

    `with_room` calls what it is given, and may make room and call it again when it raises CacheFull.
    """
    runner.check(feed)
    with_room(lambda: feed.session.reserve(len(feed.tree)))


def forward_and_draw(runner: ModelRunner, asks: Sequence[Ask]) -> list[Outcome]:
    """Runs one forward over feeds that have been reserved, and draws a token behind each row with the shared noise."""
    result = runner.forward([ask.feed for ask in asks])
    ready = [(ask, rows) for ask, rows in zip(asks, result.ranges, strict=True) if rows is not None]
    drawn = iter(_draw_each(runner, result.logits, ready))
    return [None if rows is None else next(drawn) for rows in result.ranges]


def reopen(runner: ModelRunner, session: Session | None, token_ids: Sequence[int], prompt_len: int) -> Session:
    """A session of these tokens; it takes over what the given one has cached of them, and frees the rest."""
    if session is None:
        return runner.open(token_ids, prompt_len)
    if session.token_ids[0] != token_ids[0]:
        session.free()
        return runner.open(token_ids, prompt_len)
    session.replace_tail(1, token_ids[1:])
    session.prompt_len = prompt_len
    return session


def _draw_each(runner: ModelRunner, logits: Tensor, ready: Sequence[tuple[Ask, range]]) -> list[Outcome]:
    """Draws for all sessions at once; when that fails, for each row alone, to find those at fault."""
    if not ready:
        return []
    contexts = [_contexts(ask) for ask, _ in ready]
    keys = [_keys(ask) for ask, _ in ready]
    try:
        drawn = _draw(runner, logits, list(chain.from_iterable(contexts)), list(chain.from_iterable(keys)))
    except ValueError:
        return [
            _draw_alone(runner, logits[rows.start : rows.stop], own_contexts, own_keys)
            for (_, rows), own_contexts, own_keys in zip(ready, contexts, keys, strict=True)
        ]
    return [drawn[rows.start : rows.stop] for _, rows in ready]


def _draw_alone(runner: ModelRunner, logits: Tensor, contexts: Sequence[RowContext], keys: Sequence[int]) -> Outcome:
    drawn: list[int] = []
    for row, (context, key) in enumerate(zip(contexts, keys, strict=True)):
        try:
            drawn += _draw(runner, logits[row : row + 1], [context], [key])
        except ValueError as error:
            if not row:
                return OutriderError(f"no token can be drawn behind {len(context.committed)} tokens: {error}")
            drawn.append(UNDRAWN)
    return drawn


def _draw(runner: ModelRunner, logits: Tensor, contexts: Sequence[RowContext], keys: Sequence[int]) -> list[int]:
    scores = transform(logits, contexts, runner.vocabulary_size, runner.ops)
    drawn: list[int] = runner.ops.draw(scores, torch.tensor(keys, device=runner.device)).tolist()
    return drawn


def _contexts(ask: Ask) -> list[RowContext]:
    session, tree, spec = ask.feed.session, ask.feed.tree, ask.spec
    ends = spec.eos_token_ids | spec.stop_token_ids
    paths = (tuple(tree.token_ids[step - 1] for step in tree.path(row)) for row in range(len(tree) + 1))
    return [RowContext(spec.sampling, session.token_ids, path, spec.prompt_len, ends) for path in paths]


def _keys(ask: Ask) -> list[int]:
    """Draft and target draw a position with one key, whichever row of whichever proposal it is."""
    length = len(ask.feed.session)
    return [noise_key(ask.spec.seed, length + depth, Purpose.TOKEN) for depth in ask.feed.tree.depths]
