"""The client of drafts for other engines, over real links with the embedded draft and a quick one that may lie."""

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from support.basics import PATIENCE_S, check_empty, eventually
from support.services import session_clients
from support.services.counting_draft import SIZE, VOCABULARY, CountingDraft

from draft_service.server import DraftSettings, start_with
from outrider.drafting import DraftClient, DraftLate, DraftSequence, Guesses
from outrider.errors import (
    CacheFull,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    VocabularyMismatch,
)
from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import types_pb2

MODEL = Path(__file__).resolve().parents[3] / "models" / "draft"
SETTINGS = DraftSettings(str(MODEL), "127.0.0.1:0", threads=1, kv_tokens=8192)
PROMPT = (0, 401, 913, 260, 555, 12)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SETTINGS)


@pytest.fixture
async def service(model: LoadedModel) -> AsyncIterator[RunningModelService]:
    running = await start_with(model, SETTINGS)
    yield running
    await running.stop(0)
    check_empty(running.runner.pool)


@pytest.fixture
async def client(service: RunningModelService, model: LoadedModel) -> AsyncIterator[DraftClient]:
    made = DraftClient([service.address], vocabulary=model.vocabulary)
    await asyncio.to_thread(made.wait, PATIENCE_S)
    yield made
    await asyncio.to_thread(made.close)


async def guesses(client: DraftClient, sequence: DraftSequence, count: int) -> tuple[int, ...]:
    [found] = await client.guess_async([(sequence, count)], PATIENCE_S)
    assert found.error is None
    return found.token_ids


async def test_guesses_go_on_from_what_was_verified(client: DraftClient) -> None:
    """The draft's own greedy tokens, whether it said them at once, after some of them were kept, or after others."""
    sequence = client.open(PROMPT)
    first = await guesses(client, sequence, 4)
    assert len(first) == 4
    sequence.extend(first[:2])
    assert await guesses(client, sequence, 2) == first[2:]
    sequence.extend([77])
    assert await guesses(client, sequence, 3) == await guesses(client, client.open([*PROMPT, *first[:2], 77]), 3)
    # More of them where nothing has moved.
    assert (await guesses(client, sequence, 5))[:3] == await guesses(client, sequence, 3)


async def test_a_sequence_that_is_taken_back_guesses_as_before(client: DraftClient) -> None:
    sequence = client.open(PROMPT)
    first = await guesses(client, sequence, 4)
    sequence.extend([5, 6, 7])
    await guesses(client, sequence, 4)
    sequence.truncate(len(PROMPT) + 1)
    other = await guesses(client, sequence, 3)
    assert other == await guesses(client, client.open([*PROMPT, 5]), 3)
    sequence.truncate(len(PROMPT))
    assert await guesses(client, sequence, 4) == first


async def test_many_sequences_share_an_exchange(client: DraftClient) -> None:
    """Each gets what it gets alone, also where some are new, some go on, and some want nothing."""
    prompts = [(*PROMPT, number) for number in range(20)]
    alone = [await guesses(client, client.open(prompt), 3) for prompt in prompts]
    sequences = [client.open(prompt) for prompt in prompts]
    counts = [0 if number % 5 == 4 else 3 for number in range(20)]
    asks = list(zip(sequences, counts, strict=True))
    for _ in range(2):
        found = await client.guess_async(asks, PATIENCE_S)
        assert [each.token_ids for each in found] == [one[:count] for one, count in zip(alone, counts, strict=True)]
    for sequence, one in zip(sequences, alone, strict=True):
        sequence.extend(one[:1])
    found = await client.guess_async([(sequence, 2) for sequence in sequences], PATIENCE_S)
    assert [each.token_ids for each in found] == [one[1:] for one in alone]


def test_a_long_prompt_is_not_waited_for(draft: CountingDraft, quick: DraftClient) -> None:
    """It goes in parts; what the draft says of it has come by a later exchange."""
    draft.gate.clear()
    sequence = quick.open([number % SIZE for number in range(5001)])
    assert quick.guess([(sequence, 2)], PATIENCE_S) == [Guesses()]
    draft.gate.set()
    asyncio.run(eventually(lambda: quick.guess([(sequence, 2)], PATIENCE_S) != [Guesses()]))
    assert quick.guess([(sequence, 2)], PATIENCE_S) == [Guesses((1, 2))]
    assert draft.num_requests == 2


async def test_a_draft_holds_nothing_of_sequences_that_were_closed(
    client: DraftClient, service: RunningModelService
) -> None:
    sequences = [client.open((*PROMPT, number)) for number in range(8)]
    await client.guess_async([(each, 1) for each in sequences], PATIENCE_S)
    client.close_sequences(sequences)
    assert client.num_sequences == 0
    async with session_clients.channel_to(service.address) as channel:
        asking = session_clients.DraftClient(channel)

        async def is_empty() -> bool:
            return (await asking.info()).session_count == 0

        await eventually(is_empty)


async def test_a_draft_that_comes_back_is_used_again(model: LoadedModel) -> None:
    """While it is away there are no guesses, at once and with the reason; then the session is opened anew."""
    running = await start_with(model, SETTINGS)
    client = DraftClient([running.address])
    await asyncio.to_thread(client.wait, PATIENCE_S)
    sequence = client.open(PROMPT)
    first = await guesses(client, sequence, 3)
    await running.stop(0)
    await eventually(lambda: client.info is None)
    sequence.extend(first[:1])
    [found] = await client.guess_async([(sequence, 2)], PATIENCE_S)
    assert isinstance(found.error, PeerLost)
    settings = DraftSettings(str(MODEL), running.address, threads=1, kv_tokens=8192)
    again = await start_with(model, settings)
    await asyncio.to_thread(client.wait, PATIENCE_S)
    assert await guesses(client, sequence, 2) == first[1:]
    await asyncio.to_thread(client.close)
    await again.stop(0)


def test_a_draft_with_another_vocabulary_is_not_used(draft: CountingDraft) -> None:
    other = type(VOCABULARY).of((f"other {number}", number) for number in range(SIZE))
    with DraftClient([draft.address], vocabulary=other) as client:
        asyncio.run(eventually(lambda: isinstance(client.reasons[0], VocabularyMismatch)))
        with pytest.raises(VocabularyMismatch, match="does not fit the target: The vocabularies of 1000 ids differ"):
            client.wait(0.0)
        [found] = client.guess([(client.open([1]), 3)], PATIENCE_S)
        assert "does not fit" in str(found.error)


def test_one_frame_carries_what_is_asked_at_one_time(draft: CountingDraft, quick: DraftClient) -> None:
    sequences = [quick.open([number]) for number in range(200)]
    found = quick.guess([(each, 3) for each in sequences], PATIENCE_S)
    assert [each.token_ids for each in found] == [(n + 1, n + 2, n + 3) for n in range(200)]
    assert draft.num_frames == 1


def test_ten_thousand_sequences_leave_nothing(draft: CountingDraft, quick: DraftClient) -> None:
    """Neither here nor at the draft, nor threads."""
    first = quick.open([1])
    quick.guess([(first, 1)], PATIENCE_S)
    quick.close_sequences([first])
    before = threading.active_count()
    for start in range(0, 10_000, 500):
        sequences = [quick.open([number % SIZE]) for number in range(start, start + 500)]
        for _ in range(2):
            found = quick.guess([(each, 1) for each in sequences], PATIENCE_S)
            assert all(each.token_ids for each in found)
            for each, one in zip(sequences, found, strict=True):
                each.extend(one.token_ids)
        quick.close_sequences(sequences)
    assert quick.num_sequences == 0
    # The draft has read all closes when it answers what comes after them.
    quick.guess([(quick.open([1]), 1)], PATIENCE_S)
    assert len(draft.last) == 1
    assert threading.active_count() <= before


def test_a_late_draft_costs_the_deadline_and_is_then_left_alone(draft: CountingDraft, quick: DraftClient) -> None:
    """Twice; after that nobody waits, and its late answers are given to nobody. It is tried again, and works."""
    sequence = quick.open([1])
    draft.gate.clear()
    for token in (2, 3):
        [found] = quick.guess([(sequence, 2)], 0.05)
        assert isinstance(found.error, DraftLate)
        sequence.extend([token])
    [found] = quick.guess([(sequence, 2)], PATIENCE_S)
    assert isinstance(found.error, PeerLost)
    assert "left alone for a while" in found.error.message
    draft.gate.set()
    asyncio.run(eventually(lambda: quick.guess([(sequence, 2)], PATIENCE_S) == [Guesses((4, 5))]))


def test_a_draft_that_fails_is_replaced_by_the_next_one(draft: CountingDraft) -> None:
    """One that hangs and one that is away; what the hanging one holds is closed there."""
    with CountingDraft() as other, DraftClient([draft.address, other.address]) as client:
        client.wait(PATIENCE_S)
        asyncio.run(eventually(lambda: not client.reasons))
        sequence = client.open([1])
        assert client.guess([(sequence, 1)], PATIENCE_S) == [Guesses((2,))]
        assert other.num_frames == 0
        draft.gate.clear()
        for token in (2, 3):
            sequence.extend([token])
            client.guess([(sequence, 1)], 0.05)
        sequence.extend([4])
        assert client.guess([(sequence, 1)], PATIENCE_S) == [Guesses((5,))]
        # It is told when it listens again.
        draft.gate.set()
        asyncio.run(eventually(lambda: not draft.last))
        draft.stop()
        sequence.extend([5])
        assert client.guess([(sequence, 1)], PATIENCE_S) == [Guesses((6,))]


def session_error(reason: str) -> Callable[[pb.ProposeResponse], None]:
    def change(answer: pb.ProposeResponse) -> None:
        if answer.fence.base_len == 3:
            answer.error.CopyFrom(types_pb2.SessionError(message="no room", reason=reason))

    return change


@pytest.mark.parametrize(
    ("reason", "kind"), [("KV_CACHE_FULL", CacheFull), ("OVERLOADED", Overloaded), ("NEWER", OutriderError)]
)
def test_a_refused_sequence_rests_and_the_others_go_on(
    draft: CountingDraft, quick: DraftClient, reason: str, kind: type[OutriderError]
) -> None:
    draft.change = session_error(reason)
    refused, other = quick.open([1, 2, 3]), quick.open([1])
    found = quick.guess([(refused, 1), (other, 1)], PATIENCE_S)
    assert type(found[0].error) is kind
    assert found[1] == Guesses((2,))
    count = draft.num_requests
    found = quick.guess([(refused, 1)], PATIENCE_S)
    assert isinstance(found[0].error, Overloaded)
    assert draft.num_requests == count


def test_a_session_that_the_draft_has_lost_is_opened_again(draft: CountingDraft, quick: DraftClient) -> None:
    sequence = quick.open([1])
    quick.guess([(sequence, 1)], PATIENCE_S)
    draft.last.clear()
    sequence.extend([2])
    [found] = quick.guess([(sequence, 1)], PATIENCE_S)
    assert "has lost the session" in str(found.error)
    assert quick.guess([(sequence, 1)], PATIENCE_S) == [Guesses((3,))]


def too_many(answer: pb.ProposeResponse) -> None:
    answer.proposal.token_ids.extend([1] * 100)


def outside(answer: pb.ProposeResponse) -> None:
    answer.proposal.token_ids[0] = SIZE


def negative(answer: pb.ProposeResponse) -> None:
    answer.proposal.token_ids[0] = -1


def tree(answer: pb.ProposeResponse) -> None:
    answer.proposal.parents.extend([0] * len(answer.proposal.token_ids))


def distributions(answer: pb.ProposeResponse) -> None:
    answer.proposal.distributions.add()


def read_too_much(answer: pb.ProposeResponse) -> None:
    answer.cached_len = 2**31 - 1


def future(answer: pb.ProposeResponse) -> None:
    answer.fence.base_len += 1


def pong(answer: pb.ProposeResponse) -> None:
    answer.pong.SetInParent()


LIES = [too_many, outside, negative, tree, distributions, read_too_much, future, pong]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_lie_is_believed_in_nothing(
    draft: CountingDraft, quick: DraftClient, lie: Callable[[pb.ProposeResponse], None]
) -> None:
    """It ends the link, the sequence has no guesses, and a draft that says the truth again is used again."""
    draft.change = lie
    sequence = quick.open([1])
    [found] = quick.guess([(sequence, 2)], PATIENCE_S)
    assert not found.token_ids
    assert isinstance(found.error, PeerLost)
    draft.change = lambda answer: None
    asyncio.run(eventually(lambda: quick.guess([(sequence, 2)], PATIENCE_S) == [Guesses((2, 3))]))


@pytest.mark.parametrize("fault", ["lies", "is slow"])
def test_ten_thousand_sequences_under_a_draft_that_fails_leave_nothing(
    draft: CountingDraft, quick: DraftClient, fault: str
) -> None:
    """Every other exchange is with a draft that lies, or answers after the deadline. Each sequence has the draft's own
    guesses or an error with a reason; nothing of it is left here, and once the draft is well, nothing there.
    """
    threads, lies, num_failed = threading.active_count(), itertools.cycle(LIES), 0
    for start in range(0, 10_000, 500):
        sequences = [quick.open([number % SIZE]) for number in range(start, start + 500)]
        if fault == "lies":
            draft.change = next(lies)
        else:
            draft.gate.clear()
        # A deadline that a draft which lies has met, and one that is slow has not.
        found = quick.guess([(each, 1) for each in sequences], PATIENCE_S if fault == "lies" else 0.01)
        num_failed += sum(isinstance(each.error, DraftLate | PeerLost) for each in found)
        draft.change = lambda answer: None
        draft.gate.set()
        found += quick.guess([(each, 1) for each in sequences], 0.01)
        for number, each in enumerate(found):
            assert each in (Guesses(), Guesses(((start + number % 500 + 1) % SIZE,))) or isinstance(
                each.error, DraftLate | PeerLost
            )
        quick.close_sequences(sequences)
    assert num_failed > 500
    assert quick.num_sequences == 0
    last = quick.open([1])
    asyncio.run(eventually(lambda: quick.guess([(last, 1)], PATIENCE_S) == [Guesses((2,))]))
    # Sessions of a link that has ended are a service's to forget; on one that holds all have been closed.
    if fault == "is slow":
        assert len(draft.last) == 1
    assert threading.active_count() <= threads + 2
    del sequences, each, found
    gc.collect()
    assert sum(type(each) is DraftSequence for each in gc.get_objects()) == 1


def test_past_the_draft_s_context_and_the_own_end_nothing_is_asked(draft: CountingDraft, quick: DraftClient) -> None:
    ending, long = quick.open([1] * 7, max_len=8), quick.open([1] * 8192)
    found = quick.guess([(ending, 2), (long, 2)], PATIENCE_S)
    assert found[0] == Guesses()
    assert isinstance(found[1].error, PromptTooLong)
    assert draft.num_requests == 0


def test_what_a_caller_does_wrong_is_named(quick: DraftClient) -> None:
    with pytest.raises(InvalidRequest, match="address is 'nowhere', but must be HOST:PORT"):
        DraftClient(["nowhere"])
    with pytest.raises(InvalidRequest, match="addresses is"):
        DraftClient([])
    with pytest.raises(InvalidRequest, match="token_ids is '0 ids'"):
        quick.open([])
    with pytest.raises(InvalidRequest, match="token_ids is"):
        quick.open([-1])
    sequence = quick.open([1])
    with pytest.raises(InvalidRequest, match=r"length is 2, but must be in \[1, 1\]"):
        sequence.truncate(2)
    quick.close_sequences([sequence, sequence])
    with pytest.raises(InvalidRequest, match="a sequence that is open"):
        quick.guess([(sequence, 1)], 1.0)


def test_the_client_needs_grpc_and_protobuf_alone() -> None:
    code = "import sys, outrider.drafting; print(*{name.partition('.')[0] for name in sys.modules})"
    found = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    own = {"outrider", "grpc", "google"}
    packages = {
        name for name in found if name in {"torch", "transformers", "numpy", "pydantic", "structlog", "tokenizers"}
    }
    assert own <= found
    assert not packages


def test_credentials_of_grpc_are_for_tls(draft: CountingDraft) -> None:
    """A draft without TLS is not spoken to in the clear by a client that wants it."""
    with DraftClient([draft.address], credentials=grpc.ssl_channel_credentials()) as client:
        with pytest.raises(PeerLost):
            client.wait(0.3)
        assert draft.num_frames == 0
