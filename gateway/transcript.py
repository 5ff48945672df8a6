"""What one request says and what it took: text, stop strings, counts. Pure; knows no session and no message."""

from dataclasses import dataclass, field

from gateway.rounds import Round, TokenOrigin
from gateway.stops import StopScanner
from gateway.tokenizer import Detokenizer
from outrider.parameters import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class SpokenToken:
    """A token of the output and the text that was final with it."""

    token_id: int
    origin: TokenOrigin
    text: str
    logprob: TokenLogprob | None = None
    draft_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RejectedToken:
    """A guess of the draft that was not kept; its text is that of the token alone."""

    token_id: int
    text: str
    draft_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of an echoed prompt; the first has no log-probability."""

    token_id: int
    text: str
    logprob: TokenLogprob | None


@dataclass(slots=True)
class SpeculationFigures:
    """What speculation did in a request, counted as generation_service.proto says."""

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    evaluated_tokens: int = 0
    fallback_rounds: int = 0

    def add(self, committed: Round) -> None:
        """Counts a round that is not the prompt's own pass."""
        self.rounds += 1
        self.drafts += committed.draft_count > 0
        self.draft_tokens += committed.draft_count
        self.accepted_tokens += committed.accepted_count
        self.evaluated_tokens += committed.evaluated_count
        self.fallback_rounds += committed.fallback_reason is not None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over evaluated draft tokens, the alpha of the papers; 0 when nothing was evaluated."""
        return self.accepted_tokens / max(1, self.evaluated_tokens)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens, as vLLM counts it; 0 when nothing was drafted."""
        return self.accepted_tokens / max(1, self.draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed in a round with a draft, on average, as vLLM counts it; 1 when there was none."""
        return 1 + self.accepted_tokens / max(1, self.drafts)


@dataclass(slots=True)
class Transcript:
    """Turns rounds into text until the request ends, by the target's word or by a stop string."""

    prompt_len: int
    detokenizer: Detokenizer
    scanner: StopScanner
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    numerics_ids: list[str] = field(default_factory=list)
    target_reopens: int = 0
    drift_repairs: int = 0
    cached_prompt_tokens: int = 0
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)

    def take(self, committed: Round) -> tuple[SpokenToken, ...]:
        """The tokens of a round with their text. Tokens behind the one that completes a stop string do not exist."""
        if self.numerics_ids[-1:] != [committed.numerics_id]:
            self.numerics_ids.append(committed.numerics_id)
        self.target_reopens += committed.target_reopens
        self.drift_repairs += committed.drift_repairs
        if committed.base_len > self.prompt_len:
            self.figures.add(committed)
        else:
            self.cached_prompt_tokens = committed.prefix_len
        spoken = []
        logprobs = committed.logprobs or (None,) * len(committed.token_ids)
        draft_logprobs = _draft_logprobs(committed)
        for token_id, origin, logprob, draft_logprob in zip(
            committed.token_ids, committed.origins, logprobs, draft_logprobs, strict=True
        ):
            text = self.scanner.push(self.detokenizer.push(token_id))
            spoken.append(SpokenToken(token_id, origin, text, logprob, draft_logprob))
            if self.scanner.found is not None:
                self.finish_reason = FinishReason.STOP_STRING
                break
        else:
            self.finish_reason = committed.finish_reason
        self.token_ids += [token.token_id for token in spoken]
        return tuple(spoken)

    def finish(self) -> str:
        """Text that was held back and is final now; what was held may complete a stop string at the very end."""
        rest = self.scanner.push(self.detokenizer.flush())
        if self.scanner.found is not None:
            self.finish_reason = FinishReason.STOP_STRING
        return rest + self.scanner.flush()


def _draft_logprobs(committed: Round) -> tuple[float | None, ...]:
    """One entry a committed token; the target's own token has none, and without an answer of the draft no token has."""
    logprobs = committed.proposal.logprobs
    kept = tuple(logprobs[row - 1] for row in committed.accepted_rows) if logprobs else ()
    return (*kept, *(None,) * (len(committed.token_ids) - len(kept)))
