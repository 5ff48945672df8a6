"""A beam search from its checks to its last event: rounds without tokens, then each sequence as a sample."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import repeat

from gateway.beams.record import BeamRecord, Hypothesis
from gateway.beams.search import search
from gateway.beams.sessions import BeamDraftSession, BeamTargetSession
from gateway.generation.sample import CompletionEvent, Event, RequestContext, RoundEvent, new_reader
from gateway.generation.transcript import ENDING_TOKENS, GeneratedToken, SpeculationFigures, StopScanner, Transcript
from gateway.rounds.round import TokenOrigin
from gateway.sessions.draft import AbsentDraftSession
from outrider.beams import BeamSearch
from outrider.process import telemetry


async def searched(context: RequestContext, beams: BeamSearch, queue_us: int) -> AsyncGenerator[Event, None]:
    """Yields an event for every pass of a search, all of sample 0, and then for each sequence, best first, its tokens
    and its completion. As RequestContext.sample in everything else.
    """
    request, backend = context.request, context.backend
    spec = replace(request.spec, trace_context=telemetry.carrier())
    record, session_id = BeamRecord(spec, beams), secrets.token_bytes(16)
    timeouts, model_hash = backend.target_timeouts, context.target.model_hash
    target = BeamTargetSession(backend.target, timeouts, spec, record, session_id, model_hash)
    draft_count = context.target.max_draft_count if request.draft_count is None else request.draft_count
    draft: BeamDraftSession | AbsentDraftSession = AbsentDraftSession()
    if backend.draft is not None and draft_count:
        drafting = backend.drafting(request, context.target)
        (replicas, seat), *_ = backend.drafts_for(request, drafting)
        draft = BeamDraftSession(replicas, backend.draft_deadline, spec, record, session_id, True, seat)
    # Keeps the facts of the rounds.
    transcript = Transcript(backend.tokenizer.detokenizer(), StopScanner(()))
    first_token_us = 0
    async with aclosing(search(record, target, draft, draft_count)) as rounds:
        async for committed in rounds:
            num_numerics = max(1, len(transcript.numerics_ids))
            transcript.take(committed)
            elapsed_us = context.elapsed_us
            first_token_us = first_token_us or elapsed_us
            new_numerics_id = "".join(transcript.numerics_ids[num_numerics:])
            yield RoundEvent((), committed, new_numerics_id, elapsed_us=elapsed_us)
    for index, hypothesis in enumerate(record.finished):
        told = Transcript(
            backend.tokenizer.detokenizer(), StopScanner(()), reader=new_reader(request, backend.tokenizer)
        )
        told.finish_reason = hypothesis.finish_reason
        tokens = _spelt(hypothesis, told)
        deltas = told.take_deltas()
        yield RoundEvent(tokens, None, sample_index=index, elapsed_us=context.elapsed_us, deltas=deltas)
        yield CompletionEvent(
            finish_reason=hypothesis.finish_reason,
            prompt_tokens=spec.prompt_len,
            cached_prompt_tokens=transcript.cached_prompt_tokens,
            completion_tokens=len(tokens),
            seed=spec.seed,
            # One search makes all sequences, and is counted once.
            figures=transcript.figures if index == 0 else SpeculationFigures(),
            model_hash=model_hash,
            numerics_ids=tuple(transcript.numerics_ids),
            target_reopens=transcript.target_reopens if index == 0 else 0,
            drift_repairs=transcript.drift_repairs if index == 0 else 0,
            text_delta=told.finish(),
            deltas=told.take_deltas(),
            has_calls=told.has_calls,
            reasoning_tokens=told.reasoning_tokens,
            first_token_us=first_token_us,
            total_us=context.elapsed_us,
            queue_us=queue_us,
            sample_index=index,
            acceptance=spec.acceptance,
            cumulative_logprob=hypothesis.cumulative_logprob,
            sampling=spec.sampling,
        )


def _spelt(hypothesis: Hypothesis, told: Transcript) -> tuple[GeneratedToken, ...]:
    """The tokens of a sequence with their text."""
    last = len(hypothesis.token_ids) - 1 if hypothesis.finish_reason in ENDING_TOKENS else -1
    texts = [told.say(token_id, is_end=place == last) for place, token_id in enumerate(hypothesis.token_ids)]
    return tuple(map(GeneratedToken, hypothesis.token_ids, repeat(TokenOrigin.PLAIN), texts))
