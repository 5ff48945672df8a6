"""Tests of the target service over real links: messages that no gateway may send, and what they do not disturb."""

from collections.abc import Callable

import pytest
from support.basics import spec_of
from support.models.tiny_models import PROMPT
from support.services.session_clients import TargetClient

from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.rpc.messages.session import open_message
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb


def fenced(session_id: bytes = bytes(16), epoch: int = 1, base_len: int = 6) -> pb.Fence:
    """A fence that fits PROMPT, unless arguments say otherwise."""
    return pb.Fence(session_id=session_id, epoch=epoch, base_len=base_len)


def opening(fence: pb.Fence | None = None, **step: object) -> target_pb.VerifyRequest:
    """An open of PROMPT."""
    session = open_message(spec_of(PROMPT), PROMPT)
    return target_pb.VerifyRequest(
        fence=fence or fenced(), open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep(**step))
    )


def branching(*branches: pb.Branch) -> target_pb.VerifyRequest:
    """Branches for the verdict after PROMPT."""
    return target_pb.VerifyRequest(fence=fenced(), branches=pb.Branches(branches=branches))


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
    "rows": opening(proposal=pb.TokenTree(token_ids=[1] * 65)),
    "depth": changed(lambda session: setattr(session, "max_len", 8)),
    "distributions": opening(proposal=pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution()])),
    "distributions under match": opening(
        proposal=pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution(token_ids=[1], weights=[1])])
    ),
    "no distributions under ratio": opening(proposal=pb.TokenTree(token_ids=[1])),
    "plain budget": opening(plain_budget=4097),
    "own shape": opening(own_shape=pb.TreeShape(max_depth=33)),
    "own shape with more rows than asked for": opening(own_draft_count=5, own_shape=pb.TreeShape(expansions=[2, 2])),
    "trace": changed(lambda session: session.trace_context.__setitem__("tracestate", "x" * 8183)),
    "part with all tokens": target_pb.VerifyRequest(fence=fenced(), part=pb.OpenPart(token_ids=PROMPT)),
}
BAD_MESSAGES["no distributions under ratio"].open.session.rule = pb.ACCEPTANCE_RULE_RATIO
BRANCH = pb.Branch(accepted_count=1, next_token_id=7, token_ids=[8, 9])
BAD_MESSAGES |= {
    f"branch with {name}": branching(BRANCH, pb.Branch(**{"accepted_count": 2, "token_ids": [8], **fields}))
    for name, fields in {
        "a negative count": {"accepted_count": -1},
        "too many accepted": {"accepted_count": 65},
        "a negative next token": {"next_token_id": -1},
        "a next token id": {"next_token_id": 4096},
        "no guess": {"token_ids": []},
        "too many guesses": {"token_ids": [1] * 65},
        "a token id": {"token_ids": [1, 4096]},
        "a negative token id": {"token_ids": [-1]},
        "one log-probability too many": {"logprobs": [-1.0, -1.0]},
        "a log-probability above 0": {"logprobs": [0.5]},
        "a log-probability that is no number": {"logprobs": [float("nan")]},
        "the outcome of another": {"accepted_count": 1, "next_token_id": 7},
    }.items()
}
BAD_MESSAGES["branches"] = branching(*(pb.Branch(next_token_id=each, token_ids=[1]) for each in range(65)))
# What an open's proposal has to fit is only looked at where the open is taken; one that comes again is answered again.
REPEATED_OPENS = {"depth", "distributions under match", "no distributions under ratio"}
BAD_MESSAGES["depth"].open.step.proposal.token_ids.extend([1, 2, 3])


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_messages_open_nothing_and_harm_nobody(name: str, client: TargetClient) -> None:
    """INVALID_ARGUMENT with field, value and limit, with the message's fence; a session on the same link goes on."""
    other = client.beside()
    await other.open(spec_of(PROMPT))
    await other.verdict()
    await client.send(BAD_MESSAGES[name])
    [answer] = (await client.link.frame()).responses
    assert answer.fence == BAD_MESSAGES[name].fence
    assert answer.error.reason == InvalidRequest.reason
    assert answer.error.metadata.keys() >= {"field", "value", "limit"}
    await other.step(1, 7)
    assert (await other.verdict())[0] == 7
    await other.close(1)
    assert (await other.info()).session_count == 0


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_messages_end_their_own_session_only(name: str, client: TargetClient) -> None:
    """One that is open: it is gone, unless the message's fence is no session's or of an older epoch."""
    own, other = client.beside(bytes(16)), client.beside()
    for each in (own, other):
        await each.open(spec_of(PROMPT))
        await each.verdict()
    await own.settle(BAD_MESSAGES[name])
    spared = {"session id", "epoch", *REPEATED_OPENS}
    assert (await own.info()).session_count == (2 if name in spared else 1)
    await other.step(1, 7)
    assert (await other.verdict())[0] == 7
    await other.close(1)
    await own.close(1)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda client: client.stepping(1, 6),
        lambda client: client.request(client.fence(1, 6), acknowledge=target_pb.Acknowledge()),
        lambda client: client.request(client.fence(1, 6), close=pb.CloseSession()),
    ],
)
async def test_messages_before_the_open_are_no_fault(
    client: TargetClient, request_of: Callable[[TargetClient], target_pb.VerifyRequest]
) -> None:
    """A step is asked for all tokens; acknowledgement and close are not answered; nothing is held."""
    request = request_of(client)
    await client.settle(request)
    assert (await client.info()).session_count == 0
    await client.open(spec_of(PROMPT))
    if request.HasField("step"):
        response = await client.read()
        assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 0)
    assert (await client.verdict())[0] == 6
    await client.close(1)


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
    after = client.beside()
    await after.open(spec_of(PROMPT))
    assert (await after.verdict())[0] == 6
    await after.close(1)
