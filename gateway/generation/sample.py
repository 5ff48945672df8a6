"""One request from its checks to its last event: text, rounds, and the samples of it in one stream."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from gateway.generation.backend import Backend
from gateway.generation.checks import check_request
from gateway.generation.events import CompletionEvent, Event, GuessFacts, RejectedGuess, RoundEvent, SampleCounts
from gateway.generation.request import CheckedRequest, GenerationRequest, new_seed
from gateway.generation.transcript import StopScanner, Transcript
from gateway.rounds.choice import Choice
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.round import Place, Round, TokenLog
from gateway.sessions.draft import AbsentDraftSession, RemoteDraftSession
from gateway.sessions.draft_team import DraftTeam
from gateway.sessions.peer import ModelInfo
from gateway.sessions.placement import PromptPrefix
from gateway.sessions.replicas import Placing, WeightsGone, need_of
from gateway.sessions.target import RemoteTargetSession
from gateway.sessions.wait import Wait
from gateway.speculation import speculate
from gateway.text.tokenizer import Tokenizer
from gateway.tools.channels import ChannelReader
from gateway.tools.reader import AnswerReader
from outrider.answer import PromptToken
from outrider.errors import NoTokenLeft, OutriderError, ProtocolViolation
from outrider.grammar import GrammarRefused
from outrider.parameters import FinishReason
from outrider.process import telemetry

EventT = TypeVar("EventT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A checked request, of which no service knows anything yet, and what it takes to serve it."""

    asked: GenerationRequest
    request: CheckedRequest
    backend: Backend
    target: ModelInfo
    started_ns: int
    placing: Placing
    wait: Wait | None = None
    """Hears how much of the first sample's prompt is read."""

    @property
    def elapsed_us(self) -> int:
        """Microseconds since the gateway received the request."""
        return (time.perf_counter_ns() - self.started_ns) // 1000

    async def renewed(self, wanted: ModelInfo | None = None) -> "RequestContext":
        """This request with the weights of the target that is wanted, or else those that it should begin with now.

        It is checked again where they are not those that it was checked for; raises as `prepare` does where it cannot
        be served with them, unless a place with its own is open to it.
        """
        target, placing = wanted or self._weights(), self.placing
        if target is None or target.model_hash == self.target.model_hash:
            return self
        try:
            return await self._under(target)
        except OutriderError:
            own = self.target.model_hash
            if self.backend.target.pick(placing, need_of(self.request.spec, own)) is None:
                raise
            placing.model_hash = own
            return self

    async def settled(self) -> "RequestContext":
        """This request with its place, which is waited for where all are full.

        It has other weights where all places with its own have gone before any of its samples began.
        """
        context, placing, backend = self, self.placing, self.backend
        while True:
            if placing.model_hash != context.target.model_hash:
                # Another sample of it has found that, and all have the same weights.
                context = await context._under(backend.target.info_of(placing.model_hash))
            await backend.settle(context.request.spec, context.target, placing)
            if placing.model_hash == context.target.model_hash:
                other = None if placing.peer is not None or placing.has_begun else context._weights()
                if other is None or other.model_hash == placing.model_hash:
                    return context
                context = await context._under(other)

    async def _under(self, target: ModelInfo) -> "RequestContext":
        """This request as the weights of a target can serve it."""
        self.placing.model_hash = target.model_hash
        # The seed that it has been given stays its own.
        checked, target = await _checked(replace(self.asked, seed=self.request.spec.seed), self.backend, target)
        return replace(self, request=checked, target=target)

    def _weights(self) -> ModelInfo | None:
        spec, asked = self.request.spec, self.asked
        found = self.backend.weights_for(spec, self.placing, spec.max_len)
        if found is None and (asked.max_tokens is None or asked.up_to_context):
            # It has as many tokens as there is room for.
            found = self.backend.weights_for(spec, self.placing, spec.prompt_len + 1)
        return found

    async def placed(
        self, serve: Callable[["RequestContext"], AsyncGenerator[Event, None]]
    ) -> AsyncGenerator[Event, None]:
        """Events of what is served at its place, once it has one. Where that place goes before there was an event, and
        there are others with other weights, a request that is served once is served there from the beginning.
        """
        placing, context = self.placing, await self.settled()
        while True:
            try:
                async with aclosing(serve(context)) as events:
                    async for event in events:
                        placing.has_begun = placing.is_bound = True
                        yield event
                return
            except WeightsGone:
                before, placing.peer = context, None
                try:
                    context = await before.settled()
                except OutriderError:
                    # Other weights cannot serve it: its own may come back.
                    placing.model_hash = before.target.model_hash
                placing.is_bound = placing.model_hash == before.target.model_hash

    def sample(self, index: int, queue_us: int) -> AsyncGenerator[Event, None]:
        """Yields an event for every round of one of its samples and then its completion. Its sessions are asked to end
        before the completion comes, and also when the caller closes the generator early. Raises any OutriderError.

        queue_us is for how long the sample has waited for its turn.
        """
        return self.placed(lambda context: context._sampled(index, queue_us))

    async def _sampled(self, index: int, queue_us: int) -> AsyncGenerator[Event, None]:
        context = replace(self, request=self.request.sample(index))
        request, backend, tokenizer = context.request, self.backend, self.backend.tokenizer
        tells_guesses, min_tokens = request.spec.draft_logprobs, request.spec.sampling.min_tokens
        scanner, reader = StopScanner(request.stops, request.naming_stops), new_reader(request, tokenizer)
        transcript = Transcript(tokenizer.detokenizer(), scanner, tells_guesses, reader, min_tokens)
        counts = SampleCounts()
        wait = self.wait if index == 0 else None
        async with aclosing(_rounds(request, backend, context.target, self.placing, wait)) as rounds:
            async for committed, choice in rounds:
                elapsed_us = self.elapsed_us
                if request.scores:
                    transcript.finish_reason = FinishReason.LENGTH
                yield RoundEvent(
                    tokens=() if request.scores else transcript.take(committed),
                    deltas=transcript.take_deltas(),
                    committed=committed,
                    new_numerics_id=counts.add(committed, elapsed_us),
                    sample_index=index,
                    prompt_tokens=await _prompt_tokens(request, tokenizer, committed),
                    rejected=_rejected(tokenizer, committed) if tells_guesses else (),
                    elapsed_us=elapsed_us,
                    choice=choice,
                )
                if transcript.finish_reason is not None:
                    break
        completion = context.completed(transcript, counts, index, queue_us)
        if not request.scores:
            backend.audit.offer(request, transcript.token_ids, completion, context.target)
        yield completion

    def completed(
        self, said: Transcript, counts: SampleCounts, index: int, queue_us: int, cumulative_logprob: float | None = None
    ) -> CompletionEvent:
        """The last event of a sample, with the text that is left of it. Raises ProtocolViolation if it has no end."""
        spec, text_delta = self.request.spec, said.finish()
        if said.finish_reason is None:
            raise ProtocolViolation("the rounds ended without a finish reason")
        accepted_count, rejected_count = counts.speculation.prediction_counts
        return CompletionEvent(
            finish_reason=said.finish_reason,
            text_delta=text_delta,
            deltas=said.take_deltas(),
            stop_string=said.scanner.found,
            sample_index=index,
            seed=spec.seed,
            prompt_tokens=spec.prompt_len,
            cached_prompt_tokens=counts.cached_prompt_tokens,
            completion_tokens=len(said.token_ids),
            accepted_prediction_tokens=accepted_count,
            rejected_prediction_tokens=rejected_count,
            reasoning_tokens=said.reasoning_tokens,
            speculation=counts.speculation.figures,
            first_token_us=counts.first_token_us,
            total_us=self.elapsed_us,
            queue_us=queue_us,
            target_reopens=counts.target_reopens,
            drift_repairs=counts.drift_repairs,
            model_hash=self.target.model_hash,
            numerics_ids=tuple(counts.numerics_ids),
            acceptance=spec.acceptance,
            sampling=spec.sampling,
            cumulative_logprob=cumulative_logprob,
            has_calls=said.has_calls,
            ignored_keywords=self.request.ignored_keywords,
        )


async def prepare(request: GenerationRequest, backend: Backend) -> RequestContext:
    """Checks a request. Raises InvalidRequest, PromptTooLong, and what is said of a target that is away."""
    started_ns = time.perf_counter_ns()
    target = await backend.target.after_handshake(backend.target_timeouts.rebuild_budget_s)
    checked, target = await _checked(request, backend, target)
    placing, spec = Placing(target.model_hash, is_bound=checked.num_runs > 1), checked.spec
    if len(backend.target.peers) > 1:
        placing.prefix = await PromptPrefix.of(spec.token_ids[: spec.prompt_len], spec.cache_salt)
    return RequestContext(request, checked, backend, target, started_ns, placing)


async def _checked(request: GenerationRequest, backend: Backend, target: ModelInfo) -> tuple[CheckedRequest, ModelInfo]:
    """A request as a target can serve it, and the facts of that with all tokens that end a turn."""
    target = replace(target, eos_token_ids=target.eos_token_ids | backend.turn_ends)
    return await check_request(request, backend.tokenizer, target, backend.offers(target)), target


async def _rounds(
    request: CheckedRequest, backend: Backend, target: ModelInfo, placing: Placing, wait: Wait | None
) -> AsyncGenerator[tuple[Round, Choice], None]:
    """`decode`, each round with the choice that it came from; errors name the constraint as the client did."""
    constraint = request.constraint
    planner, decoded = decode(request, backend, target, placing, wait)
    async with aclosing(decoded) as rounds:
        try:
            async for committed in rounds:
                yield committed, planner.observed_choice
        except GrammarRefused as error:
            raise error if constraint is None else constraint.refused(error) from None
        except NoTokenLeft as error:
            raise error.rename_fields(
                lambda field: constraint.field if constraint is not None and field == "constraint" else field
            ) from None


def new_reader(request: CheckedRequest, tokenizer: Tokenizer) -> AnswerReader | ChannelReader | None:
    """Reader of an answer to a request, if it asked for one."""
    if request.reading is None:
        return None
    kind = ChannelReader if request.reading.format.has_channels else AnswerReader
    return kind(request.reading, tokenizer.special_tokens)


async def _prompt_tokens(request: CheckedRequest, tokenizer: Tokenizer, committed: Round) -> tuple[PromptToken, ...]:
    """The prompt as the client asked to have it echoed, in the round that brings its log-probabilities."""
    spec, logprobs = request.spec, committed.verdict.prompt_logprobs
    if not spec.prompt_logprobs or not committed.is_first:
        return ()
    prompt = spec.token_ids[: spec.prompt_len]
    if len(logprobs) != spec.prompt_len - 1:
        raise ProtocolViolation(f"{len(logprobs)} log-probabilities came for a prompt of {spec.prompt_len} tokens")
    texts = await tokenizer.spell(prompt)
    return tuple(map(PromptToken, prompt, texts, (None, *logprobs)))


def _rejected(tokenizer: Tokenizer, committed: Round) -> tuple[RejectedGuess, ...]:
    proposal, rows = committed.proposal, committed.rejected_rows
    token_ids = [proposal.tree.token_ids[row - 1] for row in rows]
    texts = [tokenizer.decode([token_id]) for token_id in token_ids]
    return tuple(map(RejectedGuess, token_ids, texts, [GuessFacts.of(proposal, row) for row in rows]))


def decode(
    request: CheckedRequest, backend: Backend, target: ModelInfo, placing: Placing, wait: Wait | None = None
) -> tuple[RoundPlanner, AsyncGenerator[Round, None]]:
    """The planner of a checked request and its rounds, over sessions of its own: on this target or a replica of it, as
    `placing` has it, and on the drafts, which read the prompt at once where they will be asked. `wait` hears how much
    the target has read.
    """
    target = backend.place(request.spec, target, placing)
    drafting = backend.drafting(request, target)
    spec = replace(request.spec, seed=noise_seed(request, drafting), trace_context=telemetry.carrier())
    log, session_id = TokenLog(spec.token_ids), secrets.token_bytes(16)
    seats = backend.drafts_for(request, drafting)
    policy, most, branches = backend.policy(target), target.max_draft_count, backend.branches_for(seats, drafting)
    policy_at, prefix = backend.policy_at, placing.prefix
    planner = RoundPlanner(policy, request.draft_count, spec.max_len, most, drafting, branches, policy_at)
    hosted = drafting.at(Place.HOSTED)
    timeouts, own = backend.target_timeouts, hosted.name if hosted else ""
    verifying = RemoteTargetSession(backend.target, timeouts, spec, log, session_id, placing, own, wait)
    warm = planner.expects_draft()
    # Each has an id of its own, because two drafters of one service are two sessions there.
    ids, deadline = [bytes([*session_id[:-1], seat.lane]) for _, seat in seats], backend.draft_deadline
    sessions = [
        RemoteDraftSession(replicas, deadline, spec, log, each, warm, seat, prefix)
        for each, (replicas, seat) in zip(ids, seats, strict=True)
    ]
    if branches:
        sessions[0].on_branches = verifying.run_ahead
    lookup = backend.lookup_for(request, drafting, target.max_draft_count)
    draft = (sessions[0] if len(sessions) == 1 else DraftTeam(sessions)) if sessions else AbsentDraftSession()
    return planner, speculate(log, planner, verifying, draft, lookup)


def noise_seed(request: CheckedRequest, drafting: Drafting) -> int:
    """The seed that the services draw with: the request's own, unless guesses could know something of its noise.

    A rule that tests guesses with uniforms follows the target's distribution only where guesses are independent of
    these. What an earlier request with the same seed said was decided by the same uniforms, and a lookup, a prediction,
    and a policy that has learned from it, know of that. They are then asked about noise that was never used before.
    """
    is_tested = request.spec.acceptance.rule.needs_distributions
    return new_seed() if is_tested and drafting.drafters and not request.fixes_guesses else request.spec.seed


@dataclass(frozen=True, slots=True)
class Ended:
    """Says that a stream has no more events, and why if it failed."""

    error: Exception | None = None


async def merged(streams: AsyncGenerator[AsyncGenerator[EventT, None], None]) -> AsyncGenerator[EventT, None]:
    """Yields the events of all streams as they come, each stream's in its order, until all have ended.

    A stream begins when `streams` yields it, whether or not events are read meanwhile. None runs more than an event or
    two ahead of the reader. What one raises, or `streams` itself, ends all of them, and is raised; all are closed
    before this generator is.
    """
    events: asyncio.Queue[EventT | Ended] = asyncio.Queue(maxsize=1)
    turn = asyncio.Lock()

    async def put(event: EventT | Ended) -> None:
        # A full queue lets a task that comes just in time go before those that wait; a lock does not.
        async with turn:
            await events.put(event)

    async def begin(stream: AsyncGenerator[EventT, None]) -> None:
        tasks.append(asyncio.create_task(_pump(stream, put, put)))

    tasks = [asyncio.create_task(_pump(streams, begin, put))]
    num_ended = 0
    try:
        while num_ended < len(tasks):
            event = await events.get()
            if not isinstance(event, Ended):
                yield event
            elif event.error is not None:
                raise event.error
            else:
                num_ended += 1
    finally:
        for task in tasks:
            task.cancel()
        # A task that is cancelled still closes its stream, which ends its sessions at the services.
        await asyncio.wait(tasks)


async def _pump(
    source: AsyncGenerator[ItemT, None],
    take: Callable[[ItemT], Awaitable[None]],
    end: Callable[[Ended], Awaitable[None]],
) -> None:
    """Hands on all items of a source one by one, and says at last that it has ended."""
    ended = Ended()
    try:
        async with aclosing(source):
            async for item in source:
                await take(item)
    except Exception as error:  # noqa: BLE001 - it is raised where the events are read
        ended = Ended(error)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # The reader has gone, and a full queue would be waited for without end.
        return
    await end(ended)
