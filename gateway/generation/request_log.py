"""One line in the log for each request that is over: sizes, times, figures. Never a word, a token id or a seed.

Of an error only the reason is told, because its sentence may repeat what the client wrote.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from gateway.generation.generate import CompletionEvent, Event
from gateway.generation.request import CheckedRequest
from gateway.generation.transcript import SpeculationFigures
from outrider.errors import OutriderError

log = structlog.get_logger()


def tell_refusal(reason: str) -> None:
    """A request was turned away, or left before its turn."""
    log.info("request refused", status=reason)


class RequestLog:
    """What is known of one request so far."""

    def __init__(
        self, requests: Sequence[CheckedRequest], waited_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`requests` are the parts of a request that has waited so long for its places."""
        self._requests = requests
        self._waited_s = waited_s
        self._clock = clock
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._num_tokens = 0
        self._completions: list[CompletionEvent] = []
        self._figures = SpeculationFigures()

    def observe(self, event: Event) -> None:
        """Takes note of an event of any part and sample."""
        if isinstance(event, CompletionEvent):
            self._completions.append(event)
            return
        if self._first_token_s is None:
            self._first_token_s = self._clock()
        self._num_tokens += len(event.tokens)
        if not event.committed.is_first:
            self._figures.add(event.committed)

    def ended(self, error: BaseException | None) -> None:
        """Writes the line."""
        ended_s, figures = self._clock(), self._figures
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
            prompt_tokens=sum(request.spec.prompt_len for request in self._requests),
            cached_prompt_tokens=sum(each.cached_prompt_tokens for each in self._completions if not each.sample_index),
            completion_tokens=self._num_tokens,
            queue_ms=_ms(self._waited_s),
            first_token_ms=None if self._first_token_s is None else self._ms_until(self._first_token_s),
            total_ms=self._ms_until(ended_s),
            rounds=figures.rounds,
            drafts=figures.drafts,
            draft_tokens=figures.draft_tokens,
            accepted_tokens=figures.accepted_tokens,
            draft_acceptance_rate=round(figures.draft_acceptance_rate, 4),
            mean_acceptance_length=round(figures.mean_acceptance_length, 3),
            fallback_rounds=figures.fallback_rounds,
            target_reopens=sum(completion.target_reopens for completion in self._completions),
        )

    def _ms_until(self, moment_s: float) -> float:
        """Since the request came, waiting included."""
        return _ms(moment_s - self._started_s + self._waited_s)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
