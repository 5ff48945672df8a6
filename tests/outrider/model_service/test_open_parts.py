"""Long opens, which come over a link in parts: taken once they are whole, and bounded until then."""

from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from support.basics import spec_of
from support.services.session_clients import TargetClient

from outrider.errors import InvalidRequest, Overloaded
from outrider.model_service.incoming import MAX_PART_TOKENS, OpenParts
from outrider.model_service.leases import MAX_SESSIONS
from outrider.rpc.fencing import Fence
from outrider.v1 import types_pb2 as pb

LONG = spec_of([number % 251 + 1 for number in range(300)], 400, eos=())


async def test_an_open_in_parts_is_an_open(client: TargetClient) -> None:
    """Whatever comes between them, and if some come again: the verdict is that of the same open in one piece."""
    whole, parted = client.beside(), client.beside()
    await whole.open(LONG)
    expected = (await whole.read()).verdict
    parts = [parted.request(parted.fence(1, 300), part=_part(start, 100)) for start in (0, 100)]
    await parted.send(*parts, whole.stepping(1, 301), parts[1])
    await whole.verdict()
    await parted.open(LONG, part_len=200)
    assert (await parted.read()).verdict == expected
    await parted.part(2, 300, 0, LONG.token_ids[:100])
    await parted.part(2, 300, 0, LONG.token_ids[:250])
    await parted.open(LONG, epoch=2, part_len=250)
    again = (await parted.read()).verdict
    assert (again.next_token_id, list(again.accepted_rows)) == (expected.next_token_id, [])


def _part(start: int, length: int) -> pb.OpenPart:
    return pb.OpenPart(start=start, token_ids=LONG.token_ids[start : start + length])


@pytest.mark.parametrize(
    "before",
    [
        [],
        [_part(0, 100)],
        [_part(0, 100), _part(150, 50)],
        [_part(100, 100)],
        [_part(0, 100), _part(100, 100), _part(200, 50)],
        [_part(0, 100), _part(100, 100), pb.CloseSession()],
    ],
    ids=["none", "the last", "a gap", "the first", "too many", "closed"],
)
async def test_an_open_whose_parts_are_not_all_there_asks_for_tokens(
    client: TargetClient, before: Sequence[pb.OpenPart | pb.CloseSession]
) -> None:
    """Nothing is held then, and what came of them is forgotten."""
    for message in before:
        action = {"close": message} if isinstance(message, pb.CloseSession) else {"part": message}
        await client.send(client.request(client.fence(1, 300), **action))
    for part_len in (200, 100):
        await client.open(LONG, part_len=part_len)
        response = await client.read()
        assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 0)
    assert (await client.info()).session_count == 0
    await client.open(LONG, epoch=2)
    assert (await client.verdict())[0] == 300


async def test_parts_belong_to_their_fence_and_link(client: TargetClient, channel: grpc.aio.Channel) -> None:
    """Those of another epoch, length, session or link are not those of an open."""
    await client.part(1, 300, 0, LONG.token_ids[:100])
    stranger = TargetClient(channel, client.session_id)
    for opener, spec, epoch in (
        (client.beside(), LONG, 1),
        (stranger, LONG, 1),
        (client, replace(LONG, token_ids=LONG.token_ids[:299], prompt_len=299), 1),
    ):
        await opener.open(spec, epoch=epoch, part_len=100)
        assert (await opener.read()).HasField("tokens_wanted")
    await client.part(1, 300, 0, LONG.token_ids[:100])
    await client.open(LONG, epoch=2, part_len=100)
    assert (await client.read()).HasField("tokens_wanted")
    await client.part(3, 300, 0, LONG.token_ids[:100])
    await client.open(LONG, epoch=3, part_len=100)
    assert (await client.verdict())[0] == 300


async def test_a_part_with_too_many_tokens_is_refused(client: TargetClient) -> None:
    """By field, value and limit, and the parts before it are forgotten; another open in parts goes on."""
    other = client.beside()
    for each in (client, other):
        await each.part(1, 300, 0, LONG.token_ids[:200])
    await client.part(1, 300, 200, LONG.token_ids[200:])
    message = "part.token_ids is '300 tokens', but must be fewer than base_len 300 tokens, with those before"
    with pytest.raises(InvalidRequest, match=message):
        await client.read()
    await client.open(LONG, part_len=200)
    assert (await client.read()).HasField("tokens_wanted")
    await other.open(LONG, part_len=200)
    assert (await other.verdict())[0] == 300


def test_the_tokens_of_parts_are_bounded() -> None:
    """Of all opens of a link; a session that is refused has none, and what is taken or forgotten makes room."""
    parts, length = OpenParts(), MAX_PART_TOKENS // 4
    fences = [Fence(bytes([number] * 16), 1, MAX_PART_TOKENS) for number in range(6)]
    quarter = pb.OpenPart(token_ids=range(length))
    # The first comes again, and takes no more room for it.
    for fence in (*fences[:4], fences[0]):
        parts.add(fence, quarter)
    for fence, start in ((fences[4], 0), (fences[0], length)):
        with pytest.raises(Overloaded, match=f"opens on their way have {MAX_PART_TOKENS} tokens") as caught:
            parts.add(fence, pb.OpenPart(start=start, token_ids=[1]))
        assert caught.value.metadata == {"limit": str(MAX_PART_TOKENS)}
        assert list(parts.take(fence)) == []
    parts.forget(fences[1].session_id)
    assert len(parts.take(fences[2])) == length
    for fence in (fences[0], fences[4], fences[5]):
        parts.add(fence, quarter)
    with pytest.raises(Overloaded):
        parts.add(fences[1], pb.OpenPart(token_ids=[1]))


def test_opens_in_parts_are_bounded() -> None:
    """However few tokens each has brought so far; one that has begun goes on, and one that ends makes room."""
    parts = OpenParts()
    fences = [Fence(number.to_bytes(16), 1, 9) for number in range(MAX_SESSIONS + 1)]
    for fence in fences[:-1]:
        parts.add(fence, pb.OpenPart())
    with pytest.raises(Overloaded, match=f"{MAX_SESSIONS} opens are on their way on this link already"):
        parts.add(fences[-1], pb.OpenPart())
    parts.add(fences[0], pb.OpenPart(token_ids=[1, 2]))
    assert list(parts.take(fences[0])) == [1, 2]
    parts.add(fences[-1], pb.OpenPart(token_ids=[3]))
    assert list(parts.take(fences[-1])) == [3]
