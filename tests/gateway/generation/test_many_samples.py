"""Several samples of a request through the gateway, and log-probabilities that a target owes."""

from itertools import pairwise

import pytest
from support.basics import eventually
from support.services.markov_services import SEED, MarkovStack, markov_stack, request

from outrider.errors import InvalidRequest, Overloaded, ProtocolViolation
from outrider.v1 import generation_service_pb2 as pb


async def samples(stack: MarkovStack, wanted: pb.GenerateRequest) -> dict[int, tuple[list[int], pb.Completion]]:
    """Tokens and completion of each sample."""
    tokens: dict[int, list[int]] = {}
    completions: dict[int, pb.Completion] = {}
    async for response in stack.generate(wanted):
        if response.HasField("round"):
            index = response.round.sample_index
            assert index not in completions
            tokens.setdefault(index, []).extend(token.token_id for token in response.round.tokens)
        else:
            completions[response.completion.sample_index] = response.completion
    return {index: (tokens[index], completion) for index, completion in completions.items()}


async def test_each_sample_is_a_request_of_its_own_seed(tokenizer: str) -> None:
    """Its completion names the seed, and the same request with that seed alone says the same."""
    async with markov_stack(tokenizer) as stack:
        found = await samples(stack, request(sample_count=4))
        assert sorted(found) == [0, 1, 2, 3]
        assert found[0][1].seed == SEED
        assert len({completion.seed for _, completion in found.values()}) == 4
        for token_ids, completion in found.values():
            rounds, alone = await stack.run(request(seed=completion.seed))
            assert [token.token_id for each in rounds for token in each.tokens] == token_ids
            assert alone.usage == completion.usage
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)


async def test_a_client_that_leaves_ends_every_sample(tokenizer: str) -> None:
    """No session is left on either service."""
    async with markov_stack(tokenizer) as stack:
        call = stack.generate(request(max_tokens=400, sample_count=8))
        await anext(aiter(call))
        call.cancel()
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)


async def test_samples_count_against_the_limit(tokenizer: str) -> None:
    """Beside running samples there is room for as many as the gateway has left; further ones of a request follow when
    these have ended, and say the same as if all had run at once.
    """
    async with markov_stack(tokenizer) as stack:
        expected = await samples(stack, request(sample_count=8))
    async with markov_stack(tokenizer, max_requests=2, max_queue=0) as stack:
        admission = stack.gateway.frontend.admission
        async with admission.entry() as held:
            found = await samples(stack, request(sample_count=8))
            assert {index: token_ids for index, (token_ids, _) in found.items()} == {
                index: token_ids for index, (token_ids, _) in expected.items()
            }
            times = [completion.timings for _, (_, completion) in sorted(found.items())]
            assert all(later.queue_us >= earlier.first_token_us for earlier, later in pairwise(times))
            assert all(each.first_token_us > each.queue_us for each in times)
            for sample_count in (0, 9):
                with pytest.raises(InvalidRequest, match=f"sample_count is {sample_count}"):
                    await stack.run(request(sample_count=sample_count))
            await admission.take(held)
            with pytest.raises(Overloaded, match="2 of 2 places are taken and 0 requests wait already"):
                await stack.run(request(sample_count=8))


async def test_a_target_that_leaves_out_log_probabilities_is_named(tokenizer: str) -> None:
    """They are never invented and never left out in silence."""
    async with markov_stack(tokenizer) as stack:
        with pytest.raises(ProtocolViolation, match="without the log-probabilities"):
            await stack.run(request(logprob_count=2))
