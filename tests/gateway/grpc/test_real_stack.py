"""The gateway in front of real services with the embedded pair: text, limits, faults, and that nothing is left over."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.basics import eventually
from support.stack import PATIENT, Answer, HaltedTarget, RunningStack, request_of, running_stack

from outrider.errors import PromptTooLong
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

PROMPT = "Once upon a time there was a miller who had"
COUNTS = (1, 4, 8, None)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    """One stack for the tests that leave it as it was."""
    async with running_stack(gateway=PATIENT) as running:
        yield running


pytestmark = [pytest.mark.early, pytest.mark.asyncio(loop_scope="module")]


async def both(stack: RunningStack, **fields: object) -> Answer:
    """The plain answer, after checking that every K gives the same tokens, text and end."""
    # A salt of its own: what it is compared with must not be served from its cached keys.
    plain = await stack.generate(text=PROMPT, seed=11, enabled=False, cache_salt="plain", **fields)
    for draft_count in COUNTS:
        answer = await stack.generate(text=PROMPT, seed=11, draft_count=draft_count, **fields)
        assert answer.token_ids == plain.token_ids
        assert answer.text == plain.text
        assert answer.completion.finish_reason == plain.completion.finish_reason
    return plain


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
async def test_tokens_equal_plain_decoding(stack: RunningStack, temperature: float) -> None:
    """For every K the target's own tokens, in as many rounds as were needed."""
    plain = await both(stack, max_tokens=60, temperature=temperature)
    assert plain.completion.speculation.rounds == len(plain.rounds) - 1 == len(plain.token_ids) - 1
    assert plain.completion.speculation.draft_tokens == 0


@pytest.mark.parametrize("text", [PROMPT, "O"])
async def test_an_echo_comes_once_and_with_the_first_sample(stack: RunningStack, text: str) -> None:
    """Also of a prompt of one token, which has no log-probability to wait for."""
    call = stack.call(request_of(text=text, max_tokens=8, logprob_count=1, echo=True, sample_count=2))
    rounds = [response.round async for response in call if response.HasField("round")]
    echoes = [(each.facts.base_len, each.sample_index) for each in rounds if each.prompt_tokens]
    assert len(rounds) > 4
    assert echoes == [(len(prompt_of(rounds)), 0)]
    assert "".join(token.text for token in prompt_of(rounds)) == text


def prompt_of(rounds: list[pb.Round]) -> list[pb.PromptToken]:
    """The echoed prompt."""
    return [token for each in rounds for token in each.prompt_tokens]


async def test_speculation_saves_rounds(stack: RunningStack) -> None:
    """With the trained draft a greedy story takes clearly fewer target passes than it has tokens."""
    answer = await stack.generate(text=PROMPT, max_tokens=100, temperature=0.0, draft_count=4)
    assert answer.completion.speculation.mean_acceptance_length > 1.5
    assert answer.completion.speculation.fallback_rounds == 0


async def test_a_stop_string_across_rounds(stack: RunningStack) -> None:
    """Text ends before the stop string whatever the rounds are, and tokens with the one that completes it."""
    whole = await stack.generate(text=PROMPT, seed=11, max_tokens=60, temperature=0.8)
    stop = whole.text[70:83]
    assert "\ufffd" not in stop
    answer = await both(stack, max_tokens=60, temperature=0.8, stop=[stop])
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert answer.completion.usage.completion_tokens == len(answer.token_ids) < 60


async def test_eos_inside_a_block(stack: RunningStack) -> None:
    """A likelier end-of-sequence token ends the request wherever it falls; it is counted and has no text."""
    answer = await both(stack, max_tokens=200, temperature=1.0, logit_bias={0: 10.0})
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_EOS
    assert answer.token_ids[-1] == 0
    assert answer.completion.usage.completion_tokens == len(answer.token_ids) > 1


async def test_a_stop_token_ends_the_request(stack: RunningStack) -> None:
    """The stop token is the last token of the output."""
    whole = await stack.generate(text=PROMPT, seed=11, max_tokens=40, temperature=0.8)
    stop = whole.token_ids[20]
    answer = await both(stack, max_tokens=40, temperature=0.8, stop_token_ids=[stop])
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP_TOKEN
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
async def test_max_tokens_inside_a_block(stack: RunningStack, max_tokens: int) -> None:
    """Never a token more than asked for."""
    answer = await both(stack, max_tokens=max_tokens, temperature=0.0)
    assert len(answer.token_ids) == max_tokens
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.slow
async def test_up_to_the_end_of_the_context(stack: RunningStack) -> None:
    """A prompt that leaves three tokens gets three; one more is refused with both numbers."""
    prompt = [7] * 4093
    for draft_count in (0, 4):
        answer = await stack.generate(token_ids=prompt, seed=1, ignore_eos=True, draft_count=draft_count)
        assert len(answer.token_ids) == 3
    with pytest.raises(PromptTooLong, match=r"4093 tokens and max_tokens 4 .* 4096"):
        await stack.generate(token_ids=prompt, max_tokens=4)


async def test_cancelled_requests_leave_nothing_behind(stack: RunningStack) -> None:
    """Requests that are cancelled before, in and between rounds free their blocks on both services."""
    for read in (0, 1, 2, 5, 9):
        call = stack.call(request_of(text=PROMPT, max_tokens=500, draft_count=4, ignore_eos=True))
        for _ in range(read):
            await call.read()
        call.cancel()
    await stack.quiet()


@pytest.mark.slow
async def test_without_a_draft() -> None:
    """A gateway that knows no draft serves the same tokens."""
    async with running_stack() as stack:
        expected = await stack.generate(text=PROMPT, seed=3, max_tokens=40)
    async with running_stack(draft=None, gateway={"lookup": False}) as stack:
        answer = await stack.generate(text=PROMPT, seed=3, max_tokens=40)
        assert answer.token_ids == expected.token_ids
        assert {each.facts.fallback_reason for each in answer.rounds[1:-1]} == {pb.FALLBACK_REASON_DRAFT_ABSENT}


async def test_a_draft_that_goes_and_comes_back() -> None:
    """The draft ends in the middle of a request, which goes on plainly, and is used again when it is back."""
    async with running_stack() as stack:
        fields = {"text": PROMPT, "seed": 3, "max_tokens": 400, "ignore_eos": True, "draft_count": 4}
        expected = await stack.generate(**fields)
        halted = HaltedTarget(stack, 6)
        call = stack.call(request_of(**fields))
        rounds = [(await call.read()).round for _ in range(5)]
        await stack.stop_draft()
        await halted.make(12)
        rounds += [(await call.read()).round for _ in range(10)]
        await stack.start_draft()
        halted.let_go()
        rounds += [response.round async for response in rest(call) if response.HasField("round")]
        assert tuple(token.token_id for each in rounds for token in each.tokens) == expected.token_ids
        drafted = [each.facts.draft_count > 0 for each in rounds]
        assert any(drafted[:5])
        assert not any(drafted[9:15])
        assert any(drafted[15:])


async def rest(
    call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
) -> AsyncIterator[pb.GenerateResponse]:
    """The messages that are left of a call."""
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


@pytest.mark.slow
async def test_a_draft_past_its_deadline_is_stopped() -> None:
    """With a deadline far below what thirty-two guesses take, a Rollback stops the draft's job; tokens are the same."""
    hurry = {"draft_deadline_min_s": 0.002, "draft_deadline_max_s": 0.002}
    async with running_stack(gateway=hurry) as stack:
        fields = {"text": PROMPT, "seed": 3, "max_tokens": 60, "ignore_eos": True}
        expected = await stack.generate(**fields, enabled=False)
        answer = await stack.generate(**fields, draft_count=32)
        assert answer.token_ids == expected.token_ids
        assert pb.FALLBACK_REASON_DRAFT_LATE in {each.facts.fallback_reason for each in answer.rounds}

        async def stopped() -> bool:
            """Whether a rollback of one more request has stopped a job; on a busy machine it may come too late."""
            await stack.generate(**fields, draft_count=32)
            return (await stack.info(stack.draft)).stopped_job_count > 0

        await eventually(stopped)
