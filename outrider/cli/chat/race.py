"""What a race showed: the same message answered with and without speculation, from the same seed."""

from itertools import zip_longest

from outrider.cli.chat.conversation import Turn
from outrider.parameters import Rule


def verdict(fast: Turn, plain: Turn) -> str:
    """Whether the token ids are the same, and how long both took; a stopped race has no result."""
    if fast.result is None or plain.result is None:
        return "No result: both answers must end by themselves to be compared."
    own_us, other_us = fast.result.total_us, plain.result.total_us
    speed = (
        f"{other_us / own_us:.2f} times as fast: {own_us / 1e6:.2f} s with speculation, {other_us / 1e6:.2f} s without."
    )
    if fast.result.speculation.draft_tokens == 0:
        speed += " Neither answer had any guesses, so what differs in time is the machine's."
    pairs = zip_longest(_token_ids(fast), _token_ids(plain))
    place = next((index for index, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
    rule = fast.result.acceptance.rule
    if place is None:
        head = "Identical token for token" if rule is Rule.MATCH else "The same this time"
        return f"{head}: {plain.result.completion_tokens} tokens. {speed}"
    if rule is not Rule.MATCH:
        reason = f"The rule {rule} does not promise the same tokens; only match does."
    elif len({*fast.result.numerics_ids, *plain.result.numerics_ids}) > 1:
        reason = "The answers were computed in different ways; then only the distribution is promised."
    else:
        reason = "Under match on the same numerics this must not happen: please report it."
    return f"Differs at token {place}. {reason} {speed}"


def _token_ids(turn: Turn) -> list[int]:
    return [token.token_id for event in turn.rounds for token in event.tokens]
