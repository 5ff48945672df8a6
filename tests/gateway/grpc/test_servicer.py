"""The whole gateway over gRPC, in front of the services of the tiny model, whose twelve words a tokenizer knows."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import eventually
from support.services.markov import NUM_TOKENS, MarkovModel, plain_decoding
from support.services.markov_services import SEED, WORDS, DraftServicer, Mischief, markov_stack, request, serving

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest, ModelRefused, NotReady, Overloaded, PromptTooLong
from outrider.rpc.channels import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2

# A request whose draft is silent stays where it is.
PATIENT = {"draft_deadline_min_s": 60.0, "draft_deadline_max_s": 60.0}


async def test_text_and_tokens_are_those_of_plain_decoding(tokenizer: str) -> None:
    """Rounds join to the target's own tokens, deltas to their text, and the figures add up."""
    async with markov_stack(tokenizer) as stack:
        rounds, completion = await stack.run(request())
        token_ids = [token.token_id for each in rounds for token in each.tokens]
        assert (3, 5, *token_ids) == plain_decoding(MarkovModel(), (3, 5), SEED, 42)
        assert not any(token.HasField("logprob") for each in rounds for token in each.tokens)
        text = "".join(each.text_delta for each in rounds) + completion.text_delta
        assert text == " ".join(WORDS[token_id] for token_id in token_ids)
        assert text == "".join(token.text for each in rounds for token in each.tokens) + completion.text_delta
        figures = completion.speculation
        assert figures.rounds == len(rounds) - 1
        assert figures.accepted_tokens == sum(each.facts.accepted_count for each in rounds)
        assert len(token_ids) == 1 + figures.rounds + figures.accepted_tokens == completion.usage.completion_tokens
        assert figures.mean_acceptance_length == 1 + figures.accepted_tokens / figures.drafts
        assert figures.drafts == sum(each.facts.draft_count > 0 for each in rounds) > 0
        assert 0 < figures.acceptance_rate < 1
        assert completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert (completion.seed, completion.usage.prompt_tokens, completion.numerics_id) == (SEED, 2, "markov")
        assert 0 < completion.timings.first_token_us <= completion.timings.total_us


async def test_the_named_seed_gives_the_same_text_again(tokenizer: str) -> None:
    """A request without a seed gets one, and repeating it with that seed repeats the tokens."""
    async with markov_stack(tokenizer) as stack:
        unseeded = request()
        unseeded.ClearField("seed")
        rounds, completion = await stack.run(unseeded)
        again, _ = await stack.run(request(seed=completion.seed, draft_count=0))
        tokens = [[token.token_id for each in run for token in each.tokens] for run in (rounds, again)]
        assert tokens[0] == tokens[1]


async def test_a_stop_string_ends_text_and_tokens(tokenizer: str) -> None:
    """Text ends before the stop string, whichever round it fell into, and both sessions are closed."""
    async with markov_stack(tokenizer) as stack:
        whole, _ = await stack.run(request())
        words = "".join(each.text_delta for each in whole).split()
        stop = " ".join(words[9:12])
        for draft_count in (0, 1, 4, 8):
            rounds, completion = await stack.run(request(draft_count=draft_count, stop=[stop]))
            text = "".join(each.text_delta for each in rounds) + completion.text_delta
            assert text.split() == words[:9]
            assert completion.usage.completion_tokens == sum(len(each.tokens) for each in rounds) == 12
            assert completion.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)


async def test_without_a_draft_the_tokens_are_the_same(tokenizer: str) -> None:
    """A gateway that has no draft, and one whose draft cannot be reached, serve plain rounds with a reason."""
    expected = plain_decoding(MarkovModel(), (3, 5), SEED, 42)[2:]
    for draft in ("", "127.0.0.1:1"):
        async with markov_stack(tokenizer, draft=draft, draft_wait_seconds=0.05, lookup=False) as stack:
            rounds, completion = await stack.run(request())
            assert tuple(token.token_id for each in rounds for token in each.tokens) == expected
            assert completion.speculation.fallback_rounds == len(rounds) - 2
            assert rounds[1].facts.fallback_reason == pb.FALLBACK_REASON_DRAFT_ABSENT


async def test_a_draft_of_another_vocabulary_is_a_misfit(tokenizer: str) -> None:
    """The gateway starts and serves without it; why it does not fit is one sentence."""
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(), (1,))
    async with serving(draft) as address, markov_stack(tokenizer, draft=address) as stack:
        found = stack.gateway.backend.draft
        assert found is not None
        assert found.state == "misfit"
        assert f"vocabularies of {NUM_TOKENS} ids differ" in str(found.mismatch)


async def test_a_target_that_never_answers_is_named(tokenizer: str) -> None:
    """The wait for the target is bounded; a tokenizer that is not there is refused at once."""
    settings = GatewaySettings("127.0.0.1:1", tokenizer, listen="127.0.0.1:0", rest_listen="", target_wait_seconds=0.1)
    with pytest.raises(NotReady, match=r"target service at 127\.0\.0\.1:1 did not answer"):
        await start(settings)
    with pytest.raises(ModelRefused):
        await start(replace(settings, tokenizer=str(Path(tokenizer) / "tokenizer.json" / "none")))


async def test_bad_requests_come_back_with_their_fields(tokenizer: str) -> None:
    """Nothing is sent to the services, and the error keeps its class and its metadata on the way."""
    async with markov_stack(tokenizer) as stack:
        for bad, field in (
            (request(text=""), "prompt"),
            (request(stop=[""]), "stop.0"),
            (request(sampling=types_pb2.SamplingParameters(temperature=float("nan"))), "sampling.temperature"),
            (request(draft_count=99), "speculation.draft_count"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await stack.run(bad)
            assert caught.value.metadata["field"] == field
        strict = request()
        strict.speculation.acceptance.lenience = 0.5
        with pytest.raises(
            InvalidRequest, match=r"acceptance\.lenience is 0\.5, but must be absent under the rule match"
        ):
            await stack.run(strict)
        assert stack.target.answers == stack.draft.answers == 0


async def test_a_request_that_never_fits_the_targets_cache_is_refused(tokenizer: str) -> None:
    """The cache of 64 blocks of 16 tokens would hold it, one of 2 blocks does not, and nothing is sent."""
    async with markov_stack(tokenizer) as stack:
        stack.target.block_count = 2
        peer = stack.gateway.backend.target.peers[0]
        peer.report_lost(peer.link())
        with pytest.raises(PromptTooLong, match=r"2 tokens and max_tokens 31 .* the key-value cache of 32 tokens"):
            await stack.run(request(31))
        assert stack.target.answers == stack.draft.answers == 0
        await stack.run(request(30))


async def test_the_drafter_of_a_request_reaches_the_draft(tokenizer: str) -> None:
    """A name is carried to the draft; without one the choice is the draft's; one that is not offered is refused."""
    async with markov_stack(tokenizer) as stack:
        named, unknown = request(), request()
        named.speculation.drafter, unknown.speculation.drafter = "model", "oracle"
        await stack.run(named)
        await stack.run(request())
        with pytest.raises(InvalidRequest, match=r"speculation\.drafter is 'oracle', but must be one of lookup, model"):
            await stack.run(unknown)
        assert stack.draft.drafters_wanted == ["model", ""]


async def test_a_client_that_leaves_frees_everything(tokenizer: str) -> None:
    """Cancelled before the first round, between rounds and inside one: no session, no request and no task is left."""
    async with markov_stack(tokenizer, **PATIENT) as stack:
        await stack.run(request())
        tasks = len(asyncio.all_tasks())
        for read in (0, 1, 3):
            call = stack.generate(request(500))
            for _ in range(read):
                await call.read()
            call.cancel()
        stack.draft.mischief = {stack.draft.answers + 3: Mischief.LATE}
        call = stack.generate(request(500))
        late = stack.draft.answers + 3
        await eventually(lambda: stack.draft.answers >= late)
        call.cancel()
        await eventually(lambda: not stack.target.sessions and not stack.draft.sessions)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_more_requests_than_allowed_are_turned_away_at_once(tokenizer: str) -> None:
    """With a full queue the answer is RESOURCE_EXHAUSTED; who waits gets the place of a request that has ended."""
    async with markov_stack(tokenizer, max_requests=1, max_queue=1, **PATIENT) as stack:
        stack.draft.mischief = {2: Mischief.LATE}
        running = stack.generate(request())
        await running.read()
        waiting = asyncio.create_task(stack.run(request()))
        await eventually(lambda: stack.gateway.frontend.admission.waiting == 1)
        with pytest.raises(Overloaded, match="1 of 1 places are taken and 1 requests wait already, of at most 1"):
            await stack.run(request())
        assert not waiting.done()
        running.cancel()
        _, completion = await waiting
        assert completion.timings.queue_us > 0
        assert stack.gateway.frontend.admission.running == stack.gateway.frontend.admission.waiting == 0


async def test_requests_at_once_do_not_mix(tokenizer: str) -> None:
    """Sixteen requests with seeds of their own get the tokens of their own seeds."""
    async with markov_stack(tokenizer) as stack:
        runs = await asyncio.gather(*(stack.run(request(seed=seed, draft_count=seed % 9)) for seed in range(16)))
        for seed, (rounds, _) in enumerate(runs):
            token_ids = tuple(token.token_id for each in rounds for token in each.tokens)
            assert token_ids == plain_decoding(MarkovModel(), (3, 5), seed, 42)[2:]


async def test_health_says_serving(tokenizer: str) -> None:
    """The health service knows the gateway's service by name."""
    async with markov_stack(tokenizer) as stack, open_channel(stack.gateway.address) as channel:
        check = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(check)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
