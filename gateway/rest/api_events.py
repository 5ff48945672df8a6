"""Events of a generation as the JSON of /api/generate, with the names of generation_service.proto. Decides nothing.

Seeds are strings, because 64 bits do not fit into a number of JavaScript.
"""

from typing import Any

from gateway.generation.generate import CompletionEvent, RoundEvent
from gateway.generation.request import CheckedRequest
from gateway.generation.transcript import GeneratedToken, RejectedToken, round_facts
from outrider.errors import OutriderError


def opened(plan: CheckedRequest, model: str, model_hash: str, numerics_id: str) -> dict[str, Any]:
    """The request as it was understood; the first event."""
    spec = plan.spec
    return {
        "model": model,
        "model_hash": model_hash,
        "numerics_id": numerics_id,
        "prompt_tokens": spec.prompt_len,
        "max_tokens": spec.max_len - spec.prompt_len,
        "seed": str(spec.seed),
        "rule": spec.acceptance.rule,
        "draft_count": "auto" if plan.draft_count is None else plan.draft_count,
    }


def round_view(event: RoundEvent, time_us: int) -> dict[str, Any]:
    """A round. time_us counts from the request's arrival to the moment in which the round was ready."""
    return {
        "time_us": time_us,
        **round_facts(event.committed),
        "new_numerics_id": event.new_numerics_id,
        "tokens": [_token(token) for token in event.tokens],
        "rejected": [_rejected(token) for token in event.rejected],
    }


def completion_view(event: CompletionEvent) -> dict[str, Any]:
    """The result."""
    return {
        "finish_reason": event.finish_reason,
        "text": event.text_delta,
        "seed": str(event.seed),
        "usage": {
            "prompt_tokens": event.prompt_tokens,
            "cached_prompt_tokens": event.cached_prompt_tokens,
            "completion_tokens": event.completion_tokens,
        },
        "speculation": event.figures.facts(),
        "rule": event.acceptance.rule,
        "follows_target": event.acceptance.rule.is_exact,
        "timings": {
            "first_token_us": event.first_token_us,
            "total_us": event.total_us,
            "queue_us": event.queue_us,
        },
        "model_hash": event.model_hash,
        "numerics_ids": list(event.numerics_ids),
        "survival": {"target_reopens": event.target_reopens, "drift_repairs": event.drift_repairs},
    }


def error_view(error: OutriderError) -> dict[str, Any]:
    """What ended a request whose stream had begun."""
    return {"reason": error.reason, "message": error.message, "metadata": error.metadata}


def _token(token: GeneratedToken) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "text": token.text,
        "origin": token.origin.value,
        "logprob": None if token.logprob is None else token.logprob.logprob,
        "draft_logprob": token.draft_logprob,
    }


def _rejected(token: RejectedToken) -> dict[str, Any]:
    return {"token_id": token.token_id, "text": token.text, "draft_logprob": token.draft_logprob}
