"""What every surface calls, in front of real sessions of tiny services."""

import asyncio
from collections.abc import Sequence

import pytest
from support.basics import eventually
from support.services.markov_services import SEED, MarkovStack, markov_stack
from support.services.markov_services import request as pb_request

from gateway.generation.events import CompletionEvent, Event, RoundEvent
from gateway.generation.frontend import Frontend, ModelNames
from gateway.generation.request import GenerationRequest
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded, PromptTooLong, ProtocolViolation


class Diary:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.entries: list[object] = []

    def admitted(self, requests: object) -> None:
        """A request has its first place."""
        self.entries.append("admitted")

    def placed(self, waited_s: float) -> None:
        """A sample has its place."""
        self.entries.append("placed" if waited_s >= 0 else "before it came")

    def rejected(self, error: OutriderError, key: str | None) -> None:
        """A request was turned away."""
        self.entries.append(type(error) if key is None else (type(error), key))

    def used(self, key: str, prompt_tokens: int, tokens: int) -> None:
        """A request with a key is over."""
        self.entries.append((key, prompt_tokens, tokens))

    def observe(self, event: Event) -> None:
        """Something happened to a request."""
        self.entries.append(type(event))

    def ended(self, error: BaseException | None) -> None:
        """A request is over."""
        self.entries.append(error if error is None else type(error))


def frontend_of(stack: MarkovStack) -> tuple[Frontend, Diary]:
    """A second front frontend of a stack, which shares its places and writes a diary."""
    frontend, diary = stack.gateway.frontend, Diary()
    return Frontend(frontend.backend, frontend.admission, diary, frontend.chat_template, frontend.names), diary


def test_the_first_name_is_the_main_one() -> None:
    """Others find the model as well, a star lets any name find it, and without names it has its own."""
    names = ModelNames.of(["outrider", "claude"], "target")
    assert (names.main, names.listed) == ("outrider", ["outrider", "claude"])
    assert [name in names for name in ("outrider", "claude", "target", "*")] == [True, True, False, False]
    names = ModelNames.of(["*"], "target")
    assert (names.main, names.listed, "any" in names) == ("target", ["target"], True)
    assert "any" not in ModelNames.of([], "target")


def request(text: str = "fox sea", **fields: object) -> GenerationRequest:
    """A request of two words with the test's seed."""
    return GenerationRequest(text=text, seed=SEED, **{"max_tokens": 12, "draft_count": 3, **fields})  # type: ignore[arg-type]


async def texts(frontend: Frontend, requests: Sequence[GenerationRequest]) -> list[str]:
    """What each request says."""
    said = [""] * len(requests)
    async with frontend.open(requests) as generation:
        async for number, event in generation.events:
            is_round = isinstance(event, RoundEvent)
            said[number] += "".join(token.text for token in event.tokens) if is_round else event.text_delta
    return said


async def test_requests_that_belong_together_say_what_each_says_alone(tokenizer: str) -> None:
    """Several prompts at once neither mix nor lose a word."""
    async with markov_stack(tokenizer) as stack:
        frontend, _ = frontend_of(stack)
        requests = [request("fox sea"), request("wolf gold", draft_count=0), request("moon king", sample_count=1)]
        alone = [(await texts(frontend, [each]))[0] for each in requests]
        assert await texts(frontend, requests) == alone
        assert all(alone)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"max_tokens": 0}, InvalidRequest),
        ({"sample_count": 9}, InvalidRequest),
        ({"cache_salt": "ä" * 33}, InvalidRequest),
        ({"max_tokens": 2**20}, PromptTooLong),
    ],
)
async def test_nothing_is_spent_on_a_bad_request(
    tokenizer: str, bad: dict[str, object], error: type[OutriderError]
) -> None:
    """It is refused on entering, no session was opened, also none for the good one beside it, and no place is held."""
    async with markov_stack(tokenizer) as stack:
        frontend, diary = frontend_of(stack)
        with pytest.raises(error):
            await texts(frontend, [request(), request(**bad)])
        assert diary.entries == [error]
        assert stack.target.opens == stack.draft.opens == []
        assert frontend.admission.running == 0


async def test_those_who_wait_for_a_target_are_bounded(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is away no more requests are held than run and wait otherwise."""
    async with markov_stack(tokenizer, max_requests=1, max_queue=1) as stack:
        frontend, _ = frontend_of(stack)
        with monkeypatch.context() as away:
            away.setattr(stack.gateway.backend.target.peers[0], "_info", None)
            waiting = [asyncio.create_task(texts(frontend, [request()])) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await texts(frontend, [request()])
        assert len(set(map(tuple, await asyncio.gather(*waiting)))) == 1


async def test_an_observer_hears_of_everything_once(tokenizer: str) -> None:
    """Admitted, a place, rounds, one completion, ended well."""
    async with markov_stack(tokenizer) as stack:
        frontend, diary = frontend_of(stack)
        await texts(frontend, [request()])
        await eventually(lambda: diary.entries[-1] is None)
        *_, completion, end = diary.entries
        assert diary.entries[:2] == ["admitted", "placed"]
        assert set(diary.entries[2:-2]) == {RoundEvent}
        assert (completion, end) == (CompletionEvent, None)


async def test_who_leaves_frees_everything(tokenizer: str) -> None:
    """Leaving in the middle ends both sessions and gives the place to who waits; who leaves the queue had nothing."""
    async with markov_stack(tokenizer, max_requests=1, max_queue=1) as stack:
        frontend, diary = frontend_of(stack)
        async with frontend.open([request(max_tokens=400)]) as generation:
            await anext(generation.events)
            waiting = asyncio.create_task(texts(frontend, [request()]))
            await eventually(lambda: frontend.admission.waiting == 1)
            with pytest.raises(Overloaded):
                await texts(frontend, [request()])
            waiting.cancel()
            await asyncio.wait({waiting})
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)
        assert diary.entries == ["admitted", "placed", RoundEvent, Overloaded, asyncio.CancelledError, None]
        assert frontend.admission.running == frontend.admission.waiting == 0


async def test_a_caller_that_fails_is_told_apart(tokenizer: str) -> None:
    """What ends a request in the middle is named, and its sessions end all the same."""
    async with markov_stack(tokenizer) as stack:
        frontend, diary = frontend_of(stack)

        async def fail() -> None:
            async with frontend.open([request(max_tokens=400)]) as generation:
                await anext(generation.events)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await eventually(lambda: diary.entries[-1] is ZeroDivisionError)
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)


@pytest.mark.parametrize("num_places", [1, 3])
async def test_a_small_request_waits_for_one_place_of_a_large_one(tokenizer: str, num_places: int) -> None:
    """It ends while the large one goes on, whose samples say what they say alone and never exceed the places."""
    prompts = ["fox sea", "wolf gold", "moon king"]
    async with markov_stack(tokenizer, max_requests=num_places, max_queue=1) as stack:
        frontend, _ = frontend_of(stack)
        alone = [(await texts(frontend, [request(prompt)]))[0] for prompt in prompts]
        said, num_ended, num_ended_before = [""] * len(prompts), 0, 0
        async with frontend.open([request(prompt, sample_count=8) for prompt in prompts]) as generation:
            small = asyncio.create_task(texts(frontend, [request()]))
            async for number, event in generation.events:
                assert frontend.admission.running <= num_places
                num_ended_before += not small.done() and isinstance(event, CompletionEvent)
                num_ended += isinstance(event, CompletionEvent)
                if event.sample_index == 0:
                    is_round = isinstance(event, RoundEvent)
                    said[number] += "".join(token.text for token in event.tokens) if is_round else event.text_delta
        assert (await small, said, num_ended) == ([alone[0]], alone, 24)
        assert num_ended_before <= 4 * num_places
        assert frontend.admission.running == frontend.admission.waiting == 0


@pytest.mark.parametrize("reads", [0, 1, 40])
async def test_who_leaves_with_samples_that_wait_frees_everything(tokenizer: str, reads: int) -> None:
    """Before it has read anything, or with samples that run, wait and have ended, beside a request that waits."""
    async with markov_stack(tokenizer, max_requests=2, max_queue=1) as stack:
        frontend, _ = frontend_of(stack)
        async with frontend.open([request(sample_count=8), request(sample_count=8)]) as generation:
            for _ in range(reads):
                await anext(generation.events)
            small = asyncio.create_task(texts(frontend, [request()]))
            await asyncio.sleep(0)
        assert await small
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)
        assert frontend.admission.running == frontend.admission.waiting == 0


async def test_a_sample_that_fails_ends_those_that_wait(tokenizer: str) -> None:
    """The request ends with its error; none of its samples begins any more, and no place is held."""
    async with markov_stack(tokenizer, max_requests=2) as stack:
        frontend, diary = frontend_of(stack)
        # These services send no log-probabilities, which is a fault of theirs.
        with pytest.raises(ProtocolViolation):
            await texts(frontend, [request(sample_count=8, logprob_count=1)])
        assert diary.entries.count("placed") <= 4
        assert frontend.admission.running == frontend.admission.waiting == 0
        await eventually(lambda: stack.target.sessions == stack.draft.sessions == 0)
        assert await texts(frontend, [request()])


async def test_a_request_that_has_begun_gets_its_places_while_the_gateway_stops(tokenizer: str) -> None:
    """All of its samples end within the grace."""
    async with markov_stack(tokenizer, max_requests=1) as stack:
        num_ended = 0
        async for response in stack.generate(pb_request(sample_count=4)):
            if not num_ended:
                stack.gateway.frontend.admission.close()
            num_ended += response.HasField("completion")
        assert num_ended == 4
        with pytest.raises(NotReady, match="stopping"):
            await stack.run(pb_request())
