"""One request from what the client wrote to its last event. Knows text and rounds, neither protobuf nor gRPC."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from gateway.backend import Backend
from gateway.links import ModelInfo
from gateway.patience import Expiry
from gateway.requests import GenerationAsk, GenerationPlan, check_request
from gateway.rounds import Round, TokenLog
from gateway.speculation import speculate
from gateway.stops import StopScanner
from gateway.transcript import SpeculationFigures, SpokenToken, Transcript
from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """A round was committed, by a target of new numerics when new_numerics_id is not empty."""

    tokens: tuple[SpokenToken, ...]
    committed: Round
    new_numerics_id: str = ""


@dataclass(frozen=True, slots=True)
class CompletionEvent:
    """The request ended. Times are microseconds since the gateway received it."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    figures: SpeculationFigures
    model_hash: str
    numerics_ids: tuple[str, ...]
    target_reopens: int
    drift_repairs: int
    text_delta: str
    first_token_us: int
    total_us: int


async def generate(
    ask: GenerationAsk, backend: Backend, time_left_s: float | None = None
) -> AsyncGenerator[RoundEvent | CompletionEvent, None]:
    """Yields an event for every round and then the completion. Both sessions are told to end before the completion
    comes, and also when the caller closes the generator early. Raises any OutriderError.

    `time_left_s` is what the client's deadline leaves, and also becomes that of the services; None for no end.
    """
    started_ns = time.perf_counter_ns()
    expiry = Expiry.after(time_left_s)
    target = await backend.target.greeted(backend.patience.rebuild_budget_s)
    plan = await check_request(ask, backend.tokenizer, backend.limits(target))
    transcript = Transcript(plan.spec.prompt_len, backend.tokenizer.detokenizer(), StopScanner(plan.stops))
    first_token_us = 0
    async with aclosing(_rounds(plan, backend, target, expiry)) as rounds:
        async for committed in rounds:
            first_token_us = first_token_us or _microseconds_since(started_ns)
            num_numerics = max(1, len(transcript.numerics_ids))
            tokens = transcript.take(committed)
            yield RoundEvent(tokens, committed, "".join(transcript.numerics_ids[num_numerics:]))
            if transcript.finish_reason is not None:
                break
    text_delta = transcript.finish()
    if transcript.finish_reason is None:
        raise ProtocolViolation("the rounds ended without a finish reason")
    yield CompletionEvent(
        finish_reason=transcript.finish_reason,
        prompt_tokens=plan.spec.prompt_len,
        completion_tokens=transcript.completion_tokens,
        seed=plan.spec.seed,
        figures=transcript.figures,
        model_hash=target.model_hash,
        numerics_ids=tuple(transcript.numerics_ids),
        target_reopens=transcript.target_reopens,
        drift_repairs=transcript.drift_repairs,
        text_delta=text_delta,
        first_token_us=first_token_us,
        total_us=_microseconds_since(started_ns),
    )


def _rounds(plan: GenerationPlan, backend: Backend, target: ModelInfo, expiry: Expiry) -> AsyncGenerator[Round, None]:
    """The rounds of a checked request, over sessions of its own."""
    log = TokenLog(plan.spec.token_ids)
    session_id = secrets.token_bytes(16)
    pace = backend.pace(plan, target)
    draft = backend.draft_session(plan, log, session_id, expiry, warm=pace.expects_draft())
    return speculate(log, pace, backend.target_session(plan, log, session_id, target, expiry), draft)


def _microseconds_since(started_ns: int) -> int:
    return (time.perf_counter_ns() - started_ns) // 1000
