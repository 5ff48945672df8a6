"""What a run measures, and what it found sample by sample: plain values, which go into the JSON file as they are."""

from dataclasses import dataclass, field, replace
from typing import Self

from bench.common import OPENINGS
from outrider.cli.local_stack import Stack
from outrider.client import RoundFacts

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)
MEMORY = "memory"  # the buffer that no cache holds
CONTEXT_LEN = 128  # at which steps are compared with floors, and c and v are taken
BARE, ONE_BY_ONE, PLAIN, AUTO = "bare loop", "one by one", "plain", "auto"
PROMPTS = tuple(OPENINGS[number] for number in (0, 6, 7, 11))
QUICK_TOKENS = 16


def fixed(draft_count: int) -> str:
    """Name of the setting with a fixed K."""
    return f"K = {draft_count}"


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
    context_lens: tuple[int, ...] = (32, 128, 512, 1024)
    repeats: int = 2
    """Samples of each instrument in a cycle."""
    pings: int = 20
    """Pings on each stream in a cycle."""
    kv_tokens: int = 4096
    """Tokens that the cache of each bare engine holds."""
    memory_bytes: int | None = None
    """Size of the buffer that no cache holds; None finds it out."""

    @property
    def settings(self) -> list[str]:
        """Names of the settings of a cycle."""
        return [BARE, ONE_BY_ONE, PLAIN, *(fixed(count) for count in self.draft_counts), AUTO]

    def quick(self) -> Self:
        """A run of seconds that shows that everything works, and whose figures mean little."""
        return replace(
            self,
            tokens=min(self.tokens, QUICK_TOKENS),
            turns=1,
            prompts=self.prompts[:1],
            draft_counts=(2, 4),
            row_counts=(1, 3, 5),
            context_lens=(32, 128),
            memory_bytes=64 << 20,
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the floor of one model depends on."""

    name: str
    step_bytes: int
    """Bytes of weights that a step touches."""
    key_value_bytes: int
    """Bytes of keys and values that a step reads at CONTEXT_LEN."""


@dataclass(frozen=True, slots=True)
class ReadSample:
    """One pass over a buffer: of the size of a model's weights, or larger than all caches."""

    buffer: str
    reader: str
    num_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """One decoder step in PyTorch's operators."""

    role: str
    rows: int
    ms: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What an engine step is measured at; context_len counts the committed tokens, the last of which is a row."""

    role: str
    rows: int
    context_len: int
    temperature: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """One forward with the draw behind each row, as the services time it."""

    point: StepPoint
    ms: float


@dataclass(frozen=True, slots=True)
class PingSample:
    """One empty message there and back on a session's stream; rested when it came after a pause."""

    role: str
    ms: float
    rested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample(RoundFacts):
    """One round as the gateway told it, with the tokens that it committed."""

    num_tokens: int

    @property
    def hop_bytes(self) -> int:
        """Bytes between the gateway and the one service to which they are more."""
        return max(self.draft_bytes, self.verify_bytes)


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request, as its client saw it. The bare loop and the bare stream have no rounds."""

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
        """What requests have in common that are compared with each other."""
        return self.turn, self.prompt, self.temperature


@dataclass(slots=True)
class Measurements:
    """Everything of one run."""

    reads: list[ReadSample] = field(default_factory=list)
    operators: list[OperatorSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    pings: list[PingSample] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
