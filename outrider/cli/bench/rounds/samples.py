"""What a run measures, and what it found sample by sample: plain values, which go into the JSON file as they are."""

from dataclasses import dataclass, field, replace
from typing import Self

from outrider.cli.bench.common import AUTO, OPENINGS, PLAIN, fixed
from outrider.cli.local_stack import Stack
from outrider.client import RoundFacts

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)
MEMORY, MEMORY_BYTES = "memory", 512 << 20  # the buffer that hardly any cache holds
CONTEXT_LEN = 128  # at which steps are compared with floors, and c and v are taken
BARE = "bare loop"
# What single times are of: reading a buffer, decoder steps in PyTorch's operators and in the engine, and an empty
# message there and back on a link.
READ, OPERATORS, ENGINE, PING = "torch.sum", "operators", "engine", "ping"
PROMPTS = tuple(OPENINGS[number] for number in (0, 6, 7, 11))


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """One run; a turn goes through all prompts, and a prompt's cycle through all instruments and settings."""

    stack: Stack
    tokens: int
    turns: int
    temperatures: tuple[float, ...]
    prompts: tuple[str, ...] = PROMPTS
    draft_counts: tuple[int, ...] = (1, 2, 4, 6)
    row_counts: tuple[int, ...] = (1, 2, 3, 5, 7, 9)
    memory_bytes: int = MEMORY_BYTES

    @property
    def settings(self) -> list[str]:
        """Names of the settings of a cycle."""
        return [BARE, PLAIN, *(fixed(count) for count in self.draft_counts), AUTO]

    def quick(self) -> Self:
        """A run of seconds that shows that everything works, and whose figures mean little."""
        return replace(
            self,
            tokens=min(self.tokens, 16),
            turns=1,
            prompts=self.prompts[:1],
            draft_counts=(2, 4),
            row_counts=(1, 3, 5),
            memory_bytes=64 << 20,
        )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model, and the bytes of weights that a step touches."""

    name: str
    step_bytes: int


@dataclass(frozen=True, slots=True)
class TimeSample:
    """Time that one instrument measured. A role is a model's, or MEMORY; steps have rows, reads have bytes."""

    instrument: str
    role: str
    ms: float
    rows: int = 0
    temperature: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample(RoundFacts):
    """One round as the gateway reported it, with the tokens that it committed."""

    num_tokens: int

    @property
    def hop_bytes(self) -> int:
        """Bytes between the gateway and the one service to which they are more."""
        return max(self.draft_bytes, self.verify_bytes)


TimedAnswer = tuple[tuple[int, ...], float, float, tuple[RoundSample, ...]]
"""Tokens, seconds in all, seconds to the first token, and rounds."""


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request as its client saw it; the bare loop has no rounds."""

    setting: str
    turn: int
    prompt: int
    temperature: float
    token_ids: tuple[int, ...]
    seconds: float
    first_token_s: float
    rounds: tuple[RoundSample, ...] = ()

    @property
    def key(self) -> tuple[int, int, float]:
        """Key of requests that are compared with each other."""
        return self.turn, self.prompt, self.temperature


@dataclass(slots=True)
class Measurements:
    """All samples of one run, with its plan."""

    times: list[TimeSample] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
