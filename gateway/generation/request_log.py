"""A log line for every request.

It has sizes, times and figures, and never a word, a token id or a seed. Of an error only the reason is logged, because
its sentence may repeat what the client wrote.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from gateway.generation.events import CompletionEvent, Event, SpeculationCounts
from gateway.generation.request import CheckedRequest
from outrider.errors import OutriderError

log = structlog.get_logger()


class RequestLog:
    """Facts so far of one request, which may have several parts and has waited so long for its first place."""

    def __init__(self, requests: Sequence[CheckedRequest], waited_s: float) -> None:
        self._requests = requests
        self._waited_s = waited_s
        self._arrived_s = time.monotonic() - waited_s
        self._first_token_s: float | None = None
        self.num_tokens = 0
        """Number of output tokens of all samples."""
        self._completions: list[CompletionEvent] = []
        self._counts = SpeculationCounts()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(request.spec.prompt_len for request in self._requests)

    def observe(self, event: Event) -> None:
        if isinstance(event, CompletionEvent):
            self._completions.append(event)
            return
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self.num_tokens += len(event.tokens)
        if event.committed is not None and not event.committed.is_first:
            self._counts.add(event.committed)

    def ended(self, error: BaseException | None) -> None:
        ended_s, figures = time.monotonic(), self._counts.figures
        if error is None:
            status = "OK"
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            status = "CANCELLED"
        else:
            status = error.reason if isinstance(error, OutriderError) else OutriderError.reason
        log.info(
            "request ended",
            status=status,
            finish_reasons=[completion.finish_reason.value for completion in self._completions],
            samples=sum(request.sample_count for request in self._requests),
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=sum(each.cached_prompt_tokens for each in self._completions if not each.sample_index),
            completion_tokens=self.num_tokens,
            queue_ms=_ms(self._waited_s),
            first_token_ms=None if self._first_token_s is None else _ms(self._first_token_s - self._arrived_s),
            total_ms=_ms(ended_s - self._arrived_s),
            rounds=figures.rounds,
            drafts=figures.drafts,
            draft_tokens=figures.draft_tokens,
            accepted_tokens=figures.accepted_tokens,
            draft_acceptance_rate=round(figures.draft_acceptance_rate, 4),
            mean_acceptance_length=round(figures.mean_acceptance_length, 3),
            fallback_rounds=figures.fallback_rounds,
            target_reopens=sum(completion.target_reopens for completion in self._completions),
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
