"""Tests of the draft service over real links: the embedded draft, a server on a free port, messages one by one."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.basics import PATIENCE_S, check_empty, eventually, spec_of
from support.models.tiny_models import write_tiny_model
from support.services.session_clients import DraftClient, channel_to

from draft_service.server import DraftSettings, start, start_with
from outrider.errors import CacheFull, InvalidRequest
from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from outrider.rpc.messages.session import open_message
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2 as pb

MODEL = Path(__file__).resolve().parents[2] / "models" / "draft"
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
async def channel(service: RunningModelService) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(service.address) as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.aio.Channel) -> DraftClient:
    return DraftClient(channel)


async def test_rounds_of_a_request(client: DraftClient, service: RunningModelService) -> None:
    """Open, advance with what was accepted and corrected, close: proposals of the asked size, nothing held at last."""
    await client.open(spec_of(PROMPT, 100, eos=()), 4)
    frame = await client.link.frame()
    assert (frame.instance_id, frame.numerics_id) == (service.facts.instance_id, service.runner.numerics_id)
    [response] = frame.responses
    assert response.fence == client.fence(1, 6)
    first = list(response.proposal.token_ids)
    assert (len(first), list(response.proposal.parents), response.cached_len) == (4, [], 6)
    # The prompt's rows, and one for each guess but the last.
    assert (response.times.forward_count, response.times.row_count) == (4, 9)
    await client.advance(1, 9, [*first[:2], 77], 3)
    assert len(await client.guesses()) == 3
    await client.close(1)
    info = await client.info()
    assert (info.session_count, info.free_block_count) == (0, info.block_count)


async def test_log_probabilities_travel_when_they_are_asked_for(client: DraftClient) -> None:
    """One a guess, in single precision; nothing else in the answer is another."""
    spec = spec_of(PROMPT, 100, eos=(), temperature=1.0)
    await client.open(spec, 4)
    silent = (await client.read()).proposal
    await client.open(replace(spec, draft_logprobs=True), 4, epoch=2)
    told = (await client.read()).proposal
    assert len(told.logprobs) == 4
    assert all(-30 < logprob < 0 for logprob in told.logprobs)
    told.ClearField("logprobs")
    assert told == silent
    await client.close(2)


async def test_fencing_over_the_link(client: DraftClient) -> None:
    """Repeated requests are answered again, stale ones dropped, future ones asked about."""
    await client.open(spec_of(PROMPT, 100, eos=()), 2, epoch=2)
    first = await client.read()
    await client.open(spec_of(PROMPT, 100, eos=()), 2, epoch=2)
    assert await client.read() == first
    await client.advance(1, 7, [9], 2)
    await client.advance(2, 30, [9], 2)
    response = await client.read()
    assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 6)
    await client.advance(2, 7, [9], 2)
    assert (await client.read()).fence.base_len == 7
    await client.close(2)


async def test_rollback_stops_a_running_job(client: DraftClient, service: RunningModelService) -> None:
    """The late answer never comes, the next one is that of the new epoch, and nothing else is held up."""
    gate, entered = threading.Event(), threading.Event()
    blocked = service.worker.call(lambda: (entered.set(), gate.wait(PATIENCE_S)))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    # After the gate stand the open and then the rollback, so that the job has begun and has not ended between them.
    await client.open(spec_of(PROMPT, 100, eos=()), 32)
    await eventually(lambda: service.worker.num_waiting == 1)
    rolling = asyncio.ensure_future(client.rollback(2, 6))
    await eventually(lambda: service.worker.num_waiting == 2)
    gate.set()
    await blocked
    rolled = await rolling
    assert (rolled.fence.epoch, rolled.fence.base_len, rolled.job_stopped) == (2, 6, True)
    assert not (await client.rollback(2, 6)).job_stopped
    assert (await client.info()).stopped_job_count == 1
    await client.advance(2, 6, [], 3)
    response = await client.read()
    assert (response.fence.epoch, len(response.proposal.token_ids)) == (2, 3)
    await client.close(2)


async def test_a_broken_link_leaves_a_lease(
    client: DraftClient, channel: grpc.aio.Channel, service: RunningModelService
) -> None:
    """A newer epoch on another link takes the session up."""
    await client.open(spec_of(PROMPT, 100, eos=()), 2)
    await client.guesses()
    client.call.cancel()
    await eventually(lambda: service.table.num_leased == 1)
    assert (await client.info()).leased_session_count == 1
    again = DraftClient(channel, client.session_id)
    await again.open(spec_of((*PROMPT, 9), 100, eos=(), prompt_len=6), 2, epoch=2)
    await again.guesses()
    assert service.table.num_leased == 0
    await again.close(2)


@pytest.mark.parametrize("shares_link", [False, True])
async def test_sessions_of_all_sizes_guess_side_by_side(channel: grpc.aio.Channel, shares_link: bool) -> None:
    """Eight at once give each its own guesses."""
    shared = DraftClient(channel)
    specs = [spec_of((*PROMPT, *range(9, 9 + n)), 100, seed=n, eos=(), temperature=0.2 * n) for n in range(8)]

    async def guesses(number: int) -> list[int]:
        client = shared.beside() if shares_link else DraftClient(channel)
        await client.open(specs[number], number + 1)
        found = await client.guesses()
        await client.close(1)
        return found

    alone = [await guesses(number) for number in range(8)]
    assert await asyncio.gather(*(guesses(number) for number in range(8))) == alone


def opening(base_len: int = 6, draft_count: int = 2, **session: int) -> draft_pb.ProposeRequest:
    """An open of PROMPT."""
    message = open_message(spec_of(PROMPT), PROMPT)
    for name, value in session.items():
        setattr(message, name, value)
    fence = pb.Fence(session_id=bytes(16), epoch=1, base_len=base_len)
    return draft_pb.ProposeRequest(fence=fence, open=draft_pb.DraftOpen(session=message, draft_count=draft_count))


FENCE = pb.Fence(session_id=bytes(16), epoch=1, base_len=6)
BAD_MESSAGES = {
    "no fence": draft_pb.ProposeRequest(open=draft_pb.DraftOpen()),
    "base_len": opening(base_len=5),
    "negative draft count": opening(draft_count=-1),
    "draft count": opening(draft_count=65),
    "prompt_len": opening(prompt_len=7),
    "part with all tokens": draft_pb.ProposeRequest(fence=FENCE, part=pb.OpenPart(token_ids=PROMPT)),
    "no action": draft_pb.ProposeRequest(fence=FENCE),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_first_messages_are_refused(name: str, client: DraftClient) -> None:
    """INVALID_ARGUMENT with the field; the next session on the link is served."""
    await client.send(BAD_MESSAGES[name])
    [answer] = (await client.link.frame()).responses
    assert answer.fence == BAD_MESSAGES[name].fence
    assert (answer.error.reason, bool(answer.error.metadata["field"])) == (InvalidRequest.reason, True)
    assert (await client.info()).session_count == 0
    await client.open(spec_of(PROMPT), 2)
    assert len(await client.guesses()) == 2
    await client.close(1)


async def test_messages_before_the_open_are_no_fault(client: DraftClient) -> None:
    """An advance is asked for all tokens; a close is not answered."""
    await client.send(client.request(client.fence(1, 6), close=pb.CloseSession()))
    await client.advance(1, 7, [3], 2)
    response = await client.read()
    assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 0)
    await client.open(spec_of(PROMPT), 2)
    assert len(await client.guesses()) == 2
    await client.close(1)


@pytest.mark.parametrize(("token_ids", "field"), [([4096], "advance.token_ids.0"), ([1] * 7, "advance.token_ids")])
async def test_bad_advances_end_their_own_session_only(token_ids: list[int], field: str, client: DraftClient) -> None:
    """Another one of the link goes on."""
    other = client.beside()
    await other.open(spec_of(PROMPT), 2)
    await other.guesses()
    await client.open(spec_of(PROMPT), 2)
    await client.guesses()
    await client.advance(1, 7, token_ids, 2)
    with pytest.raises(InvalidRequest) as caught:
        await client.read()
    assert caught.value.metadata["field"] == field
    assert (await client.info()).session_count == 1
    await other.advance(1, 7, [3], 2)
    await other.guesses()
    await other.close(1)


BAD_BRANCHES = {
    "branch_count": draft_pb.DraftAdvance(draft_count=2, branch_count=-1),
    "branch_count ": draft_pb.DraftAdvance(draft_count=2, branch_count=65),
    "shape": draft_pb.DraftAdvance(draft_count=2, shape=pb.TreeShape(max_depth=2), branch_count=1),
    "shape ": draft_pb.DraftAdvance(draft_count=2, shape=pb.TreeShape(max_depth=2), went_on=True),
}


@pytest.mark.parametrize("name", BAD_BRANCHES)
async def test_bad_requests_for_branches_are_refused_by_name(name: str, client: DraftClient) -> None:
    """With field, value and limit; another session on the link goes on, and one that asks again gets its branches."""
    other = client.beside()
    for each in (client, other):
        await each.open(spec_of(PROMPT, eos=()), 2)
        await each.guesses()
    message = BAD_BRANCHES[name]
    message.token_ids[:] = [3]
    await client.send(client.request(client.fence(1, 7), advance=message))
    with pytest.raises(InvalidRequest) as caught:
        await client.read()
    assert caught.value.metadata["field"] == f"advance.{name.strip()}"
    assert caught.value.metadata.keys() >= {"value", "limit"}
    right = draft_pb.DraftAdvance(token_ids=[3], draft_count=2, branch_count=3)
    await other.send(other.request(other.fence(1, 7), advance=right))
    assert len(await other.guesses()) == 2
    branches = (await other.read()).branches.branches
    assert 0 < len(branches) <= 3
    assert all(0 < len(each.token_ids) <= 2 for each in branches)
    await other.close(1)
    assert (await client.info()).session_count == 0


async def test_a_full_pool_refuses_one_session(tmp_path: Path) -> None:
    """The session ends with CacheFull; the gateway then goes on without a draft for it, and the link for the others."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    running = await start(DraftSettings(str(folder), "127.0.0.1:0", dtype="float32", threads=1, kv_tokens=64))
    async with channel_to(running.address) as channel:
        first = DraftClient(channel)
        second = first.beside()
        await first.open(spec_of(range(1, 50), 200, eos=()), 2)
        await first.guesses()
        await second.open(spec_of(range(101, 150), 200, eos=()), 2)
        with pytest.raises(CacheFull):
            await second.read()
        await first.advance(1, 50, [3], 2)
        assert len(await first.guesses()) == 2
        await first.close(1)
        assert running.runner.pool.num_free == running.runner.pool.num_blocks
    await running.stop(0)


async def test_model_info_describes_the_service(client: DraftClient) -> None:
    """A draft offers drafters, and commits nothing."""
    info = await client.info()
    assert info.role == model_pb.SERVICE_ROLE_DRAFT
    assert (list(info.drafters), info.unacknowledged_window) == (["model", "coupled", "sampled"], 0)
