"""One forward over many sessions and a token drawn behind every row: what the draft and the target do alike.

Knows no messages, no acceptance and no lengths of requests. A session that cannot be served fails alone, and a tree's
row that cannot be drawn fails nobody: it may be one that plain decoding would never have computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from outrider.engine.noise import Purpose, noise_key
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.sampling import RowContext, divisor, is_plain, transform
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
    groups: dict[bool, list[int]] = {}
    for number, (ask, _) in enumerate(ready):
        groups.setdefault(_is_plain(ask), []).append(number)
    try:
        if len(groups) == 1:
            return _draw_group(runner, logits, [ask for ask, _ in ready], *groups)
        drawn: dict[int, Outcome] = {}
        for is_plain, numbers in groups.items():
            part = torch.cat([logits[ready[number][1].start : ready[number][1].stop] for number in numbers])
            asks = [ready[number][0] for number in numbers]
            drawn |= zip(numbers, _draw_group(runner, part, asks, is_plain), strict=True)
        return [drawn[number] for number in range(len(ready))]
    except ValueError:
        return [_draw_alone(runner, logits[rows.start : rows.stop], ask) for ask, rows in ready]


def _is_plain(ask: Ask) -> bool:
    has_ends = bool(ask.spec.eos_token_ids or ask.spec.stop_token_ids)
    # Every row behind the root stands on more output than the root, so it is as plain.
    return is_plain(ask.spec.sampling, len(ask.feed.session) - ask.spec.prompt_len, has_ends)


def _draw_group(runner: ModelRunner, logits: Tensor, asks: Sequence[Ask], plain: bool) -> list[Outcome]:
    """Drawn tokens of each ask, whose rows follow each other in logits; raises ValueError."""
    keys = [key for ask in asks for key in _keys(ask)]
    if plain:
        temperatures = [divisor(ask.spec.sampling) for ask in asks for _ in ask.feed.tree.depths]
        column = torch.from_numpy(np.array(temperatures, dtype=np.float64)).to(runner.device)
        ids = runner.ops.choose(logits, column, _key_column(runner, keys), runner.vocabulary_size)
        drawn: list[int] = ids.tolist()
    else:
        drawn = _draw(runner, logits, [context for ask in asks for context in _contexts(ask)], keys)
    rest = iter(drawn)
    return [list(islice(rest, len(ask.feed.tree) + 1)) for ask in asks]


def _draw_alone(runner: ModelRunner, logits: Tensor, ask: Ask) -> Outcome:
    drawn: list[int] = []
    for row, (context, key) in enumerate(zip(_contexts(ask), _keys(ask), strict=True)):
        try:
            drawn += _draw(runner, logits[row : row + 1], [context], [key])
        except ValueError as error:
            if not row:
                return OutriderError(f"no token can be drawn behind {len(context.committed)} tokens: {error}")
            drawn.append(UNDRAWN)
    return drawn


def _draw(runner: ModelRunner, logits: Tensor, contexts: Sequence[RowContext], keys: Sequence[int]) -> list[int]:
    scores = transform(logits, contexts, runner.vocabulary_size, runner.ops)
    drawn: list[int] = runner.ops.draw(scores, _key_column(runner, keys)).tolist()
    return drawn


def _key_column(runner: ModelRunner, keys: Sequence[int]) -> Tensor:
    # By way of numpy, because torch takes ten times as long to read a short list.
    return torch.from_numpy(np.array(keys, dtype=np.int64)).to(runner.device)


def _contexts(ask: Ask) -> list[RowContext]:
    session, tree, spec = ask.feed.session, ask.feed.tree, ask.spec
    ends = spec.eos_token_ids | spec.stop_token_ids
    paths = (tuple(tree.token_ids[step - 1] for step in tree.path(row)) for row in range(len(tree) + 1))
    return [RowContext(spec.sampling, session.token_ids, path, spec.prompt_len, ends) for path in paths]


def _keys(ask: Ask) -> list[int]:
    """Draft and target draw a position with one key, whichever row of whichever proposal it is."""
    length = len(ask.feed.session)
    return [noise_key(ask.spec.seed, length + depth, Purpose.TOKEN) for depth in ask.feed.tree.depths]
