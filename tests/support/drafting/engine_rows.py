"""An engine that decodes by itself, as vLLM does: rows without names, which move, are preempted, end, and come anew."""

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.rows import RowProposer

SIZE = 1000


@dataclass(eq=False)
class Request:
    """A request: its tokens, how many it may have, and what was guessed of it."""

    token_ids: list[int]
    max_len: int
    guesses: list[int] = field(default_factory=list)
    is_reading: bool = True

    def next_token(self) -> int:
        """The number after the last one, and every seventh time another, which no draft knows."""
        last = self.token_ids[-1]
        return (last + 1 + 13 * (len(self.token_ids) % 7 == 0)) % SIZE


class RowEngine:
    """Verifies guesses step by step; `kept` counts the right ones. Guesses change no answer."""

    def __init__(self, proposer: RowProposer, max_rows: int, max_len: int) -> None:
        self.proposer = proposer
        self.rows: list[Request] = []
        self.kept = 0
        self.token_ids: NDArray[np.int32] = np.zeros((max_rows, max_len), np.int32)

    def step(self) -> None:
        """Reads the prompts of new rows, decodes the others, and asks for guesses."""
        sampled: list[list[int]] = []
        for request in self.rows:
            found: list[int] = []
            if not request.is_reading:
                for guess in [*request.guesses, None]:
                    found.append(request.next_token())
                    request.token_ids.append(found[-1])
                    if guess != found[-1] or len(request.token_ids) >= request.max_len:
                        break
                self.kept += len(found) - 1
            request.is_reading = False
            sampled.append(found)
        for row, request in enumerate(self.rows):
            # What stands behind a row's tokens is another's, or old guesses.
            self.token_ids[row, : len(request.token_ids)] = request.token_ids
        lengths = np.array([len(request.token_ids) for request in self.rows], np.int32)
        guesses = self.proposer.propose(sampled, lengths, self.token_ids)
        assert len(guesses) == len(self.rows)
        for request, each in zip(self.rows, guesses, strict=True):
            assert len(request.token_ids) + len(each) < request.max_len or not each
            request.guesses = each
        self.rows = [request for request in self.rows if len(request.token_ids) < request.max_len]

    def move(self, chance: random.Random) -> None:
        """Rows change their places, as when one is condensed into the place of another that ended."""
        chance.shuffle(self.rows)

    def preempt(self, row: int) -> Request:
        """Takes a request out; put back, it reads all its tokens again."""
        request = self.rows.pop(row)
        request.guesses, request.is_reading = [], True
        return request


def plain(token_ids: list[int], max_len: int) -> list[int]:
    """All tokens of a request that nobody guesses for."""
    request = Request([*token_ids], max_len)
    while len(request.token_ids) < max_len:
        request.token_ids.append(request.next_token())
    return request.token_ids
