"""Trees between a real draft service and a real target service: every token is that of plain decoding."""

import pytest
from support.basics import check_empty, spec_of
from support.models.tiny_models import TARGET, TRAINED
from support.services.session_clients import DraftClient, TargetClient, channel_to

from draft_service import server as draft_server
from draft_service.server import DraftSettings
from outrider.parameters import SessionSpec
from outrider.rpc.messages.session import open_message
from outrider.rpc.messages.tree import tree_from, tree_message
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from target_service import server as target_server
from target_service.server import TargetSettings

PROMPT = (0, 401, 913, 260, 555, 12)
MAX_LEN = 60
DRAFT = DraftSettings(str(TRAINED), "127.0.0.1:0", threads=1, kv_tokens=4096)
TARGET_SETTINGS = TargetSettings(str(TARGET), "127.0.0.1:0", threads=1, kv_tokens=4096)
SHAPES = {
    "two children": pb.TreeShape(max_children=2),
    "any": pb.TreeShape(),
    "expansions": pb.TreeShape(expansions=[3, 1, 1]),
    "two of a level": pb.TreeShape(max_width=2),
    "static": pb.TreeShape(is_static=True),
    "no shape": None,
}


async def plain_tokens(target: TargetClient, spec: SessionSpec) -> list[int]:
    """Steps without a proposal, to the end."""
    tokens = list(spec.token_ids)
    await target.open(spec)
    while len(tokens) < MAX_LEN:
        _, _, token = await target.verdict()
        assert token is not None
        tokens.append(token)
        if len(tokens) < MAX_LEN:
            await target.step(1, len(tokens))
    return tokens


async def speculated(
    draft: DraftClient, target: TargetClient, spec: SessionSpec, shape: pb.TreeShape | None
) -> tuple[list[int], int]:
    """The tokens of a request with proposals of nine rows, and how many rounds they took."""
    tokens, num_rounds, committed = list(spec.token_ids), 0, list[int]()
    await draft.open(spec, 9, shape=shape)
    session = open_message(spec, spec.token_ids)
    while len(tokens) < MAX_LEN:
        if committed:
            await draft.advance(1, len(tokens), committed, 9, shape)
        tree = tree_from((await draft.read()).proposal, 4096, 64, with_logprobs=True)
        step = target_pb.TargetStep(proposal=tree_message(tree))
        action = {"step": step} if committed else {"open": target_pb.TargetOpen(session=session, step=step)}
        await target.send(target.request(target.fence(1, len(tokens)), **action))
        base_len, rows, token = await target.verdict()
        assert base_len == len(tokens)
        committed = [tree.token_ids[row - 1] for row in rows] + ([] if token is None else [token])
        tokens += committed
        num_rounds += 1
    return tokens, num_rounds


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_trees_over_the_wire_change_no_token(temperature: float) -> None:
    """Every shape gives plain decoding's tokens, and a tree of so many rows takes fewer rounds than a chain."""
    draft_service = await draft_server.start(DRAFT)
    target_service = await target_server.start(TARGET_SETTINGS)
    async with channel_to(draft_service.address) as to_draft, channel_to(target_service.address) as to_target:
        rounds = {}
        for seed in range(3):
            spec = spec_of(PROMPT, MAX_LEN, seed=seed, eos=(), temperature=temperature)
            plain = TargetClient(to_target)
            expected = await plain_tokens(plain, spec)
            await plain.close(1)
            for name, shape in SHAPES.items():
                draft, target = DraftClient(to_draft), TargetClient(to_target)
                tokens, count = await speculated(draft, target, spec, shape)
                assert tokens == expected
                rounds[name] = rounds.get(name, 0) + count
                await draft.close(1)
                await target.close(1)
        assert rounds["any"] < rounds["no shape"]
        assert rounds["expansions"] < 3 * (MAX_LEN - len(PROMPT))
    for service in (draft_service, target_service):
        await service.stop(0)
        check_empty(service.runner.pool)
