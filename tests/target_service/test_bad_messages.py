"""Tests of the target service over real streams: messages that nobody may send, and what they do not disturb."""

from collections.abc import Callable

import grpc
import pytest
from support.basics import spec_of
from support.session_clients import TargetClient
from support.tiny_models import PROMPT

from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.rpc import messages
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb


def fenced(session_id: bytes = bytes(16), epoch: int = 1, base_len: int = 6) -> pb.Fence:
    """A fence that fits PROMPT, unless told otherwise."""
    return pb.Fence(session_id=session_id, epoch=epoch, base_len=base_len)


def opening(fence: pb.Fence | None = None, **step: object) -> target_pb.VerifyRequest:
    """An open of PROMPT."""
    session = messages.open_message(spec_of(PROMPT), PROMPT)
    return target_pb.VerifyRequest(
        fence=fence or fenced(), open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep(**step))
    )


def changed(change: Callable[[pb.OpenSession], None]) -> target_pb.VerifyRequest:
    """An open with another session message."""
    request = opening()
    change(request.open.session)
    return request


BAD_MESSAGES = {
    "session id": opening(fenced(session_id=bytes(3))),
    "epoch": opening(fenced(epoch=0)),
    "base_len 0": opening(fenced(base_len=0)),
    "base_len past the context": opening(fenced(base_len=4097)),
    "base_len not that of the tokens": opening(fenced(base_len=7)),
    "no action": target_pb.VerifyRequest(fence=fenced()),
    "step first": target_pb.VerifyRequest(fence=fenced(), step=target_pb.TargetStep()),
    "acknowledge first": target_pb.VerifyRequest(fence=fenced(), acknowledge=target_pb.Acknowledge()),
    "close first": target_pb.VerifyRequest(fence=fenced(), close=pb.CloseSession()),
    "token id": changed(lambda session: session.token_ids.__setitem__(2, 4096)),
    "max_len past the context": changed(lambda session: setattr(session, "max_len", 4097)),
    "max_len reached": changed(lambda session: setattr(session, "max_len", 6)),
    "rule": changed(lambda session: setattr(session, "rule", 77)),
    "settings": changed(lambda session: setattr(session.acceptance, "lenience", 0.5)),
    "alternatives": changed(lambda session: setattr(session, "logprob_count", 21)),
    "prompt without output": changed(lambda session: setattr(session, "prompt_logprobs", True)),
    "banned": changed(lambda session: session.banned_sequences.add()),
    "banned token id": changed(lambda session: session.banned_sequences.add(token_ids=[4096])),
    "temperature": changed(lambda session: setattr(session.sampling, "temperature", -1.0)),
    "proposed token id": opening(proposal=pb.TokenTree(token_ids=[4096])),
    "parent": opening(proposal=pb.TokenTree(token_ids=[1, 2], parents=[0, 2])),
    "rows": opening(proposal=pb.TokenTree(token_ids=[1] * 33)),
    "depth": changed(lambda session: setattr(session, "max_len", 8)),
    "distributions": opening(proposal=pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution()])),
    "distributions under match": opening(
        proposal=pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution(token_ids=[1], weights=[1])])
    ),
    "no distributions under ratio": opening(proposal=pb.TokenTree(token_ids=[1])),
    "plain budget": opening(plain_budget=4097),
}
BAD_MESSAGES["no distributions under ratio"].open.session.rule = pb.ACCEPTANCE_RULE_RATIO
BAD_MESSAGES["depth"].open.step.proposal.token_ids.extend([1, 2, 3])


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_messages_end_their_own_stream_only(
    name: str, client: TargetClient, channel: grpc.aio.Channel
) -> None:
    """INVALID_ARGUMENT with field, value and limit; a session on another stream goes on."""
    other = TargetClient(channel)
    await other.open(spec_of(PROMPT))
    await other.verdict()
    await client.send(BAD_MESSAGES[name])
    with pytest.raises(InvalidRequest) as caught:
        await client.read()
    assert caught.value.metadata.keys() >= {"field", "value", "limit"}
    assert await client.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await other.step(1, 7)
    await other.verdict()
    await other.close(1)
    assert (await other.info()).session_count == 0


async def test_one_stream_carries_one_session(client: TargetClient) -> None:
    """A message about another session ends it."""
    await client.open(spec_of(PROMPT))
    await client.verdict()
    await client.send(opening(fenced(session_id=bytes(range(16)))))
    with pytest.raises(InvalidRequest, match="session_id"):
        await client.read()


async def test_a_step_after_the_end_is_a_violation(client: TargetClient) -> None:
    """A finished request takes no more steps, though its last verdict is repeated."""
    await client.open(spec_of(PROMPT, 7))
    last = await client.read()
    assert last.verdict.finish_reason == pb.FINISH_REASON_LENGTH
    await client.step(1, 6)
    assert await client.read() == last
    await client.step(1, 7)
    with pytest.raises(ProtocolViolation):
        await client.read()
