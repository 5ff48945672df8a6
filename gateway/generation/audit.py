"""Shadow audit: some finished requests are decoded again, plainly, and compared token for token.

Only `match` promises tokens, so only its requests are audited. One audit runs at a time; when many wait, further ones
are left out and counted, because an audit takes the target's time.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog
from prometheus_client import CollectorRegistry, Counter

from gateway.generation.events import CompletionEvent
from gateway.generation.request import CheckedRequest
from gateway.rounds.round import Round
from gateway.sessions.peer import ModelInfo
from outrider.errors import OutriderError
from outrider.parameters import FinishReason, Rule

MAX_WAITING = 16

log = structlog.get_logger()

Decode = Callable[[CheckedRequest, ModelInfo], AsyncGenerator[Round, None]]
Finished = tuple[CheckedRequest, tuple[int, ...], CompletionEvent, ModelInfo]


class ShadowAudit:
    """Takes a fraction in [0, 1] of the finished requests, and compares each with its plain decoding."""

    def __init__(self, fraction: float, registry: CollectorRegistry) -> None:
        self._fraction = fraction
        self._waiting: asyncio.Queue[Finished] = asyncio.Queue(MAX_WAITING)
        self._audits = Counter("outrider_audit", "Finished requests decoded again and compared.", registry=registry)
        meaning = "Audited requests whose tokens plain decoding does not give."
        self._mismatches = Counter("outrider_audit_mismatch", meaning, registry=registry)
        meaning = "Requests chosen for an audit without a result."
        self._skipped = Counter("outrider_audit_skipped", meaning, ["reason"], registry=registry)

    def offer(
        self, request: CheckedRequest, token_ids: Sequence[int], completion: CompletionEvent, target: ModelInfo
    ) -> None:
        """Takes note of a finished request, if its turn has come."""
        if request.spec.acceptance.rule is not Rule.MATCH or random.random() >= self._fraction:
            return
        if len(completion.numerics_ids) != 1:
            # A request that was moved to another kind of target has no single plain decoding.
            self._skipped.labels("numerics").inc()
            return
        try:
            self._waiting.put_nowait((request, tuple(token_ids), completion, target))
        except asyncio.QueueFull:
            self._skipped.labels("busy").inc()

    async def run(self, decode: Decode) -> None:
        """Audits what was taken, one after the other, for ever."""
        while True:
            finished = await self._waiting.get()
            try:
                await self._audit(finished, decode)
            except OutriderError as error:
                self._skipped.labels("failed").inc()
                log.warning("audit failed", reason=error.message)
            except Exception:
                # No other task waits for this one, and without it no request would be audited any more.
                self._skipped.labels("failed").inc()
                log.exception("audit failed")

    async def _audit(self, finished: Finished, decode: Decode) -> None:
        request, expected, completion, target = finished
        numerics_id = completion.numerics_ids[0]
        token_ids: list[int] = []
        numerics_ids: set[str] = set()
        # Only tokens are compared, so the target need not send log-probabilities, least of all a prompt's.
        # And what the target has cached of the prompt must not vouch for itself.
        bare = replace(request.spec, logprob_count=None, prompt_logprobs=False, draft_logprobs=False)
        spec = replace(bare, cache_salt=secrets.token_bytes(16))
        target = replace(target, numerics_id=numerics_id)
        async with aclosing(decode(replace(request, spec=spec, draft_count=0), target)) as rounds:
            async for committed in rounds:
                token_ids += committed.token_ids
                numerics_ids.add(committed.verdict.numerics_id)
                if len(token_ids) >= len(expected):
                    break
        if numerics_ids != {numerics_id}:
            self._skipped.labels("numerics").inc()
            return
        self._audits.inc()
        # A stop string ends the text, and plain decoding of tokens knows nothing of it.
        ends_alike = completion.finish_reason in {FinishReason.STOP_STRING, committed.verdict.finish_reason}
        if tuple(token_ids[: len(expected)]) == expected and ends_alike:
            return
        self._mismatches.inc()
        pairs = zip(expected, token_ids, strict=False)
        same = next((index for index, (said, plain) in enumerate(pairs) if said != plain), len(token_ids))
        # What an operator needs to replay the request, without a word of its text.
        log.error(
            "audit mismatch",
            first_difference=same,
            said=expected[same : same + 1],
            plain=token_ids[same : same + 1],
            seed=request.spec.seed,
            prompt_tokens=request.spec.prompt_len,
            model_hash=target.model_hash,
            numerics_id=numerics_id,
        )
