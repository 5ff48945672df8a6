"""Events of a request as plain values, and the answer that they add up to."""

from collections import defaultdict
from dataclasses import dataclass, field, fields
from enum import StrEnum

from outrider.answer import CompletionFacts, Delta, PromptToken, reasoning_of
from outrider.client.deltas import ToolCall, calls_of, deltas_from
from outrider.errors import ProtocolViolation
from outrider.parameters import TokenLogprob
from outrider.rpc.messages.completion import enum_name, facts_from
from outrider.rpc.messages.round import logprobs_from
from outrider.v1 import generation_service_pb2 as pb


class Origin(StrEnum):
    """Model or step that said a token first."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of the output and its share of the text, which is empty while a character is incomplete.

    With return_rounds an accepted token has its row in the proposal, counted from 1, who guessed it (the draft
    service's own choice has no name; a token that a grammar leaves no choice about is guessed by `grammar`), and the
    draft's log-probability and estimate of it, if it sent them. Its parent is the token before it.
    """

    token_id: int
    origin: Origin
    text: str
    logprob: TokenLogprob | None = None
    draft_logprob: float | None = None
    row: int = 0
    drafter: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class RejectedToken:
    """A guess that was not kept, with its text decoded alone: its row in the proposal, the row above it, who guessed
    it, and the drafter's estimate in (0, 1] that it would be kept, if it made one.
    """

    token_id: int
    text: str
    draft_logprob: float | None = None
    row: int = 0
    parent: int = 0
    drafter: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """Facts of a round, as RoundFacts of generation_service.proto states them; times are microseconds."""

    base_len: int = 0
    draft_count: int = 0
    accepted_count: int = 0
    evaluated_count: int = 0
    fallback_reason: str = ""
    """Reason why a round that was to be speculative had no proposal, such as "draft_late"; empty when it had one."""
    draft_compute_us: int = 0
    verify_compute_us: int = 0
    round_us: int = 0
    draft_queue_us: int = 0
    verify_queue_us: int = 0
    draft_wait_us: int = 0
    verify_wait_us: int = 0
    draft_bytes: int = 0
    verify_bytes: int = 0
    target_reopens: int = 0
    new_numerics_id: str = ""
    drafter: str = ""
    """Drafter of the proposal: "hosted" in the target's process; empty for the draft service's own choice."""
    branches: str = ""
    """What came of branches that were asked for in the round before, "hit", "miss" or "late"; empty where none were."""


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens that one verdict committed to a sample, and the text that they completed.

    The first round of sample 0 brings the prompt's tokens where they were requested, and every round its rejected
    guesses.
    """

    tokens: tuple[GeneratedToken, ...]
    text: str
    sample_index: int = 0
    prompt: tuple[PromptToken, ...] = ()
    rejected: tuple[RejectedToken, ...] = ()
    facts: RoundFacts = field(default_factory=RoundFacts)
    deltas: tuple[Delta, ...] = ()
    """New pieces of the answer, in order: the text, and what is no text for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(CompletionFacts):
    """The last event of a sample. `rest` is text that was held back; times are microseconds since the gateway got the
    request.
    """

    rest: str
    deltas: tuple[Delta, ...] = ()

    @property
    def text(self) -> str:
        """Text of the event, which is `rest`: so the texts of all events of a sample join to the whole."""
        return self.rest

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time of the request, the prompt's pass included."""
        return self.completion_tokens * 1e6 / self.total_us if self.total_us else 0.0


Event = Round | Result


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a request, with its rounds and its result."""

    rounds: tuple[Round, ...]
    result: Result

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.rounds) + self.result.text

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """All pieces of the answer, in order."""
        events: tuple[Event, ...] = (*self.rounds, self.result)
        return tuple(delta for event in events for delta in event.deltas)

    @property
    def reasoning(self) -> str:
        """Reasoning of the model before its answer."""
        return reasoning_of(self.deltas)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that it called, in order."""
        return calls_of(self.deltas)

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """All tokens of the output."""
        return tuple(token for each in self.rounds for token in each.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Their ids, an end-of-sequence or stop token included."""
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """All samples of a request, in order of their index; the properties are about the first."""

    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first sample."""
        return self.samples[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the first sample called."""
        return self.samples[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sample."""
        return self.samples[0].token_ids

    @property
    def result(self) -> Result:
        """The first sample's last event: why it ended, its seed, its figures."""
        return self.samples[0].result

    @property
    def prompt(self) -> tuple[PromptToken, ...]:
        """The prompt's tokens, where the request asked for an echo."""
        return tuple(token for each in self.samples[0].rounds for token in each.prompt)


class AnswerBuilder:
    """Keeps the events of a request, in the order in which they came."""

    def __init__(self) -> None:
        self._rounds: defaultdict[int, list[Round]] = defaultdict(list)
        self._results: dict[int, Result] = {}

    def add(self, event: Event) -> Event:
        """Keeps an event and returns it."""
        if isinstance(event, Round):
            self._rounds[event.sample_index].append(event)
        else:
            self._results[event.sample_index] = event
        return event

    @property
    def is_whole(self) -> bool:
        """Whether every sample that began has ended, and there was one."""
        return bool(self._results) and self._rounds.keys() <= self._results.keys()

    def answer(self) -> Answer:
        """The samples that came. Raises ProtocolViolation unless they are whole."""
        if not self.is_whole:
            raise ProtocolViolation("The gateway ended the call before the answer had ended.")
        samples = (Sample(tuple(self._rounds[index]), self._results[index]) for index in sorted(self._results))
        return Answer(tuple(samples))


ORIGINS = {
    pb.TOKEN_ORIGIN_ACCEPTED: Origin.ACCEPTED,
    pb.TOKEN_ORIGIN_CORRECTION: Origin.CORRECTION,
    pb.TOKEN_ORIGIN_BONUS: Origin.BONUS,
}
FACTS = tuple(each.name for each in fields(RoundFacts) if each.name != "fallback_reason")


def event_from(message: pb.GenerateResponse) -> Event:
    """Event that a message of the stream carries."""
    if not message.HasField("round"):
        end = message.completion
        return Result(**facts_from(end), rest=end.text_delta, deltas=deltas_from(end.deltas, end.text_delta))
    came, number = message.round, message.round.facts.fallback_reason
    reason = enum_name(pb.FallbackReason.DESCRIPTOR, number, "FALLBACK_REASON_") if number else ""
    return Round(
        tokens=tuple(map(_token, came.tokens)),
        text=came.text_delta,
        sample_index=came.sample_index,
        prompt=tuple(PromptToken(each.token_id, each.text, _logprob(each)) for each in came.prompt_tokens),
        rejected=tuple(
            RejectedToken(
                each.token_id, each.text, _draft_logprob(each), each.row, each.parent, each.drafter, _value(each)
            )
            for each in came.rejected
        ),
        facts=RoundFacts(fallback_reason=reason, **{name: getattr(came.facts, name) for name in FACTS}),
        deltas=deltas_from(came.deltas, came.text_delta),
    )


def _token(message: pb.GeneratedToken) -> GeneratedToken:
    origin = ORIGINS.get(message.origin, Origin.PLAIN)
    guess = (_draft_logprob(message), message.row, message.drafter, _value(message))
    return GeneratedToken(message.token_id, origin, message.text, _logprob(message), *guess)


def _logprob(token: pb.GeneratedToken | pb.PromptToken) -> TokenLogprob | None:
    return logprobs_from([token.logprob])[0] if token.HasField("logprob") else None


def _value(token: pb.GeneratedToken | pb.RejectedToken) -> float | None:
    return token.value if token.HasField("value") else None


def _draft_logprob(token: pb.GeneratedToken | pb.RejectedToken) -> float | None:
    return token.draft_logprob if token.HasField("draft_logprob") else None
