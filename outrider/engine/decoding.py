"""One forward over many sessions, and what comes before it: room for its rows, and sessions that begin again.

Knows no messages, no acceptance and no lengths of requests.
"""

from collections.abc import Callable, Sequence

from outrider.engine.batching import Feed
from outrider.engine.drawing import Ask, Drawn, draw_each
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session

__all__ = ["Allocate", "Ask", "forward_and_draw", "reopen", "reserve"]

Allocate = Callable[[], None]


def reserve(runner: ModelRunner, feed: Feed, with_room: Callable[[Allocate], None]) -> None:
    """Makes sure that a forward cannot fail over this feed; raises CacheFull and InvalidRequest.

    `with_room` calls what it is given, and may make room and call it again when it raises CacheFull.
    """
    runner.check(feed)
    with_room(lambda: feed.session.reserve(len(feed.tree)))


def forward_and_draw(runner: ModelRunner, asks: Sequence[Ask]) -> list[Drawn | None]:
    """Runs one forward over feeds that have been reserved, and draws a token behind each row with the shared noise.

    None stands for an ask whose prompt is not finished. The services draw in their own ways.
    """
    result = runner.forward([ask.feed for ask in asks])
    ready = [(ask, rows) for ask, rows in zip(asks, result.ranges, strict=True) if rows is not None]
    drawn = iter(draw_each(runner, result.logits, [ask for ask, _ in ready], [rows for _, rows in ready]))
    return [None if rows is None else next(drawn) for rows in result.ranges]


def reopen(
    runner: ModelRunner, session: Session | None, token_ids: Sequence[int], prompt_len: int, salt: bytes | None = None
) -> Session:
    """A session of these tokens; it takes over what the given one has cached of them, and frees the rest."""
    if session is None:
        return runner.open(token_ids, prompt_len, salt)
    if session.token_ids[0] != token_ids[0] or session.salt != salt:
        session.free()
        return runner.open(token_ids, prompt_len, salt)
    session.replace_tail(1, token_ids[1:])
    session.prompt_len = prompt_len
    return session
