"""Ranges of single values in messages, and the errors that name field, value and limit. Knows no message."""

from collections.abc import Iterable

from outrider.errors import InvalidRequest


def check_range(field: str, value: int, least: int, most: int) -> int:
    """Returns the value; raises InvalidRequest outside [least, most]."""
    if not least <= value <= most:
        raise InvalidRequest(field, value, f"in [{least}, {most}]")
    return value


def check_count(field: str, count: int, most: int, unit: str) -> None:
    """Raises InvalidRequest about a list of more than `most` entries; call it before anything is made of the list."""
    if count > most:
        raise InvalidRequest.too_many(field, count, most, unit)


def check_token_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> tuple[int, ...]:
    """Returns the ids; raises InvalidRequest about the first outside the vocabulary."""
    checked = tuple(token_ids)
    # Names of single tokens are made only when one is at fault: a prompt has thousands.
    if checked and not 0 <= min(checked) <= max(checked) < vocabulary_size:
        for index, token_id in enumerate(checked):
            check_token_id(f"{field}.{index}", token_id, vocabulary_size)
    return checked


def check_token_id(field: str, token_id: int, vocabulary_size: int) -> int:
    """Returns the id; raises InvalidRequest outside the vocabulary."""
    if not 0 <= token_id < vocabulary_size:
        raise InvalidRequest(field, token_id, f"a token id in [0, {vocabulary_size})")
    return token_id
