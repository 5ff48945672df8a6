"""What every surface calls, in front of real sessions of tiny services."""

import asyncio
from collections.abc import Sequence

import pytest
from support.basics import eventually
from support.markov_services import SEED, MarkovStack, markov_stack

from gateway.generation.frontend import Frontend
from gateway.generation.generate import CompletionEvent, Event, RoundEvent
from gateway.generation.request import GenerationRequest
from outrider.errors import InvalidRequest, OutriderError, Overloaded, PromptTooLong


class Diary:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.entries: list[object] = []

    def admitted(self, waited_s: float, requests: object) -> None:
        """A request has its places."""
        self.entries.append("admitted" if waited_s >= 0 else "before it came")

    def rejected(self, error: OutriderError) -> None:
        """A request was turned away."""
        self.entries.append(type(error))

    def observe(self, event: Event) -> None:
        """Something happened to a request."""
        self.entries.append(type(event))

    def ended(self, error: BaseException | None) -> None:
        """A request is over."""
        self.entries.append(error if error is None else type(error))


def frontend_of(stack: MarkovStack) -> tuple[Frontend, Diary]:
    """A second front frontend of a stack, which shares its places and writes a diary."""
    frontend, diary = stack.gateway.frontend, Diary()
    return Frontend(frontend.backend, frontend.admission, diary, frontend.chat_template, frontend.model_name), diary


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
            away.setattr(stack.gateway.backend.target.links[0], "_info", None)
            waiting = [asyncio.create_task(texts(frontend, [request()])) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await texts(frontend, [request()])
        assert len(set(map(tuple, await asyncio.gather(*waiting)))) == 1


async def test_an_observer_hears_of_everything_once(tokenizer: str) -> None:
    """Admitted, rounds, one completion, ended well."""
    async with markov_stack(tokenizer) as stack:
        frontend, diary = frontend_of(stack)
        await texts(frontend, [request()])
        await eventually(lambda: diary.entries[-1] is None)
        *_, completion, end = diary.entries
        assert diary.entries[0] == "admitted"
        assert set(diary.entries[1:-2]) == {RoundEvent}
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
        assert diary.entries == ["admitted", RoundEvent, Overloaded, asyncio.CancelledError, None]
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
