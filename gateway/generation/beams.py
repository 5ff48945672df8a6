"""A beam search from its checks to its last event: rounds without tokens, then each sequence as a sample."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import repeat

from gateway.beams.record import BeamRecord
from gateway.beams.search import search
from gateway.beams.sessions import BeamDraftSession, BeamTargetSession
from gateway.generation.events import Event, OutputToken, RoundEvent, SampleCounts, SpeculationCounts
from gateway.generation.sample import RequestContext, new_reader
from gateway.generation.transcript import ENDING_TOKENS, StopScanner, Transcript
from gateway.rounds.round import TokenOrigin
from gateway.sessions.draft import AbsentDraftSession
from outrider.beams import BeamSearch
from outrider.process import telemetry


def searched(context: RequestContext, beams: BeamSearch, queue_us: int) -> AsyncGenerator[Event, None]:
    """Yields an event for every pass of a search, all of sample 0, and then for each sequence, best first, its tokens
    and its completion. As RequestContext.sample in everything else.
    """
    return context.placed(lambda placed: _searched(placed, beams, queue_us))


async def _searched(context: RequestContext, beams: BeamSearch, queue_us: int) -> AsyncGenerator[Event, None]:
    request, backend = context.request, context.backend
    spec = replace(request.spec, trace_context=telemetry.carrier())
    record, session_id = BeamRecord(spec, beams), secrets.token_bytes(16)
    placing = context.placing
    target = BeamTargetSession(backend.target, backend.target_timeouts, spec, record, session_id, placing)
    draft_count = context.target.max_draft_count if request.draft_count is None else request.draft_count
    draft: BeamDraftSession | AbsentDraftSession = AbsentDraftSession()
    if backend.draft is not None and draft_count:
        drafting = backend.drafting(request, context.target)
        for replicas, seat in backend.drafts_for(request, drafting)[:1]:
            deadline, prefix = backend.draft_deadline, placing.prefix
            draft = BeamDraftSession(replicas, deadline, spec, record, session_id, True, seat, prefix)
    counts = SampleCounts()
    async with aclosing(search(record, target, draft, draft_count)) as rounds:
        async for committed in rounds:
            elapsed_us = context.elapsed_us
            yield RoundEvent((), committed, counts.add(committed, elapsed_us), elapsed_us=elapsed_us)
    for index, hypothesis in enumerate(record.finished):
        if index == 1:
            # One search makes all sequences, and is counted once.
            counts = replace(counts, speculation=SpeculationCounts(), target_reopens=0, drift_repairs=0)
        said = Transcript(
            backend.tokenizer.detokenizer(), StopScanner(()), reader=new_reader(request, backend.tokenizer)
        )
        said.finish_reason = hypothesis.finish_reason
        last = len(hypothesis.token_ids) - 1 if hypothesis.finish_reason in ENDING_TOKENS else -1
        texts = [said.say(token_id, is_end=place == last) for place, token_id in enumerate(hypothesis.token_ids)]
        said.token_ids += hypothesis.token_ids
        tokens = tuple(map(OutputToken, hypothesis.token_ids, repeat(TokenOrigin.PLAIN), texts))
        deltas = said.take_deltas()
        yield RoundEvent(tokens, None, sample_index=index, elapsed_us=context.elapsed_us, deltas=deltas)
        yield context.completed(said, counts, index, queue_us, hypothesis.cumulative_logprob)
