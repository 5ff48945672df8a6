"""Conversations that arrive by themselves: their turns, when each is due, and how much they have in common.

They arrive by chance (Poisson), have some turns with times for thinking between them, and some begin with one of a few
long texts, of which the first is the most usual by far (Zipf). A trace is a function of its options.
"""

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.sessions.placement import PromptPrefix
from outrider.estimates.prefixes import BLOCK_TOKENS

EXPONENT = 1.2
NUM_BEGINNINGS = 32
BEGINNING = (512, 3_072)  # least and most tokens, as of all ranges
FIRST, LATER, ANSWER = (200, 2_000), (30, 600), (24, 168)
TURNS = (2, 6)
VOCABULARY = 1 << 15
MEAN_LIVE_TOKENS = 2_600
"""Tokens of a conversation that is under way, in the mean of its turns and of all shares of beginnings."""


@dataclass(frozen=True, slots=True, eq=False)
class TalkTurn:
    """One request: all that was said so far, and so many tokens of an answer."""

    number: int
    at_s: float
    """When it is due; it comes later where the answer before it has not ended."""
    prompt: PromptPrefix
    whole: PromptPrefix
    """Prefix of the prompt with its answer."""
    tokens: "array[int]"
    """Tokens of the conversation, whose later turns go on after `end`."""
    length: int
    end: int
    before: "TalkTurn | None"

    @property
    def output(self) -> int:
        return self.end - self.length


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace is made."""

    shared: float
    """Share of the conversations that begin with a usual text."""
    turns_a_s: float
    live: int
    """Conversations under way at the same time."""
    count: int
    """How many turns there are."""
    seed: int = 0


def trace_of(options: TraceOptions) -> list[TalkTurn]:
    """The turns of a trace in the order in which they are due."""
    return asyncio.run(_made(options))


async def _made(options: TraceOptions) -> list[TalkTurn]:
    dice = random.Random(options.seed)
    beginnings = [_text(dice, BEGINNING) for _ in range(NUM_BEGINNINGS)]
    weights = [(1 + rank) ** -EXPONENT for rank in range(NUM_BEGINNINGS)]
    mean_turns = sum(TURNS) / 2
    # So long from a turn to the next one that the wanted number of conversations is under way.
    pause_s = options.live / options.turns_a_s
    due: list[TalkTurn] = []
    now_s = -pause_s * TURNS[1]
    while now_s * options.turns_a_s < options.count:
        now_s += dice.expovariate(options.turns_a_s / mean_turns)
        is_shared = dice.random() < options.shared
        begun = dice.choices(beginnings, weights)[0] if is_shared else array("q")
        due += await _conversation(dice, now_s, pause_s, begun)
    # What began before the first second only says how many are under way then.
    return sorted((turn for turn in due if turn.at_s >= 0), key=lambda turn: turn.at_s)[: options.count]


async def _conversation(dice: random.Random, at_s: float, pause_s: float, begun: "array[int]") -> list[TalkTurn]:
    tokens, bounds = array("q", begun), []
    for number in range(dice.randint(*TURNS)):
        tokens += _text(dice, LATER if number else FIRST)
        length = len(tokens)
        tokens += _text(dice, ANSWER)
        bounds.append((length, len(tokens)))
    turns: list[TalkTurn] = []
    said = await PromptPrefix.of(tokens[: bounds[0][0]], b"")
    for length, end in bounds:
        prompt = said.grown(tokens[:length])
        said = prompt.grown(tokens[:end])
        before = turns[-1] if turns else None
        turns.append(TalkTurn(dice.getrandbits(60), at_s, prompt, said, tokens, length, end, before))
        at_s += pause_s * (0.5 + dice.expovariate(2.0))
    return turns


def _text(dice: random.Random, lengths: tuple[int, int]) -> "array[int]":
    return array("q", dice.choices(range(VOCABULARY), k=dice.randint(*lengths)))


def cacheable(turns: Sequence[TalkTurn], first: int) -> float:
    """Share of the prompts' tokens, from a turn on, that one cache without an end would have."""
    seen: set[int] = set()
    found = asked = 0
    for number, turn in enumerate(turns):
        if number >= first:
            names = turn.prompt.names[: (turn.length - 1) // BLOCK_TOKENS]
            found += BLOCK_TOKENS * next((at for at, each in enumerate(names) if each not in seen), len(names))
            asked += turn.length
        seen.update(turn.whole.names)
    return found / asked
