"""What was measured, sample by sample, as plain values that go into the JSON file. Computes nothing but differences."""

from dataclasses import dataclass, field

TARGET, DRAFT = "target", "draft"
BARE, ONE_BY_ONE, PLAIN, AUTO = "bare loop", "one by one", "plain", "auto"


def fixed(draft_count: int) -> str:
    """Name of the setting with a fixed K."""
    return f"K = {draft_count}"


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
    """One empty message there and back on a session's stream."""

    role: str
    ms: float
    rested: bool = False
    """Whether it came after a pause instead of right behind another."""


@dataclass(frozen=True, slots=True)
class RoundSample:
    """The facts of one round as the gateway told them; see RoundFacts in generation_service.proto."""

    num_tokens: int
    draft_count: int
    accepted_count: int
    evaluated_count: int
    fallback: bool
    round_us: int
    draft_queue_us: int
    draft_compute_us: int
    draft_wait_us: int
    verify_queue_us: int
    verify_compute_us: int
    verify_wait_us: int
    draft_bytes: int
    verify_bytes: int


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

    def forget(self) -> None:
        """Drops what a warm-up measured."""
        for samples in (self.reads, self.operators, self.steps, self.pings, self.requests):
            samples.clear()
