"""Offers of lookups, so that it is known how many rows all sessions would take at a price. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

FLOORS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Values of rows, of which what is above them is counted."""


class Offer(NamedTuple):
    """Offer of lookups above a floor: share of all tokens at which there is one, and its rows and tokens then."""

    share: float
    rows: float
    tokens: float


class LookupOffers:
    """Rows that lookups offer, whether they are taken or not, by the floor under their values; recent ones first."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._num_tokens = 0.0
        self._shares = [0.0] * len(FLOORS)
        self._counts = [0.0] * len(FLOORS)
        self._rows = [0.0] * len(FLOORS)
        self._tokens = [0.0] * len(FLOORS)

    def add(self, values: Sequence[float], num_tokens: int) -> None:
        """Adds what there was at a place of a text, of which so many tokens were committed then."""
        kept = self._memory**num_tokens
        self._num_tokens = kept * self._num_tokens + num_tokens
        for index, floor in enumerate(FLOORS):
            above = [value for value in values if value > floor]
            is_there, rows, tokens = bool(above), len(above), 1.0 + sum(above)
            self._shares[index] = kept * self._shares[index] + num_tokens * is_there
            self._counts[index] = kept * self._counts[index] + is_there
            self._rows[index] = kept * self._rows[index] + rows
            self._tokens[index] = kept * self._tokens[index] + tokens * is_there

    def above(self) -> list[Offer]:
        """Offer above each floor."""
        return [
            Offer(share / max(self._num_tokens, 1.0), rows / max(count, 1e-9), tokens / max(count, 1e-9))
            for share, count, rows, tokens in zip(self._shares, self._counts, self._rows, self._tokens, strict=True)
        ]
