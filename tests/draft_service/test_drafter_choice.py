"""Which drafter an open may name: one that the service offers and that serves the session's rule, or none."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.basics import spec_of
from support.drafting.rules import ruled
from support.models.tiny_models import write_tiny_model
from support.services.session_clients import DraftClient, channel_to

from draft_service.server import DraftSettings, start
from outrider.errors import InvalidRequest
from outrider.parameters import Rule
from outrider.rpc.messages.rules import RULES_BY_NUMBER
from outrider.rpc.messages.session import open_message
from outrider.rpc.messages.tree import tree_from
from outrider.v1 import draft_service_pb2 as draft_pb

SPEC = spec_of((1, 2, 3), 40, eos=())


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[DraftClient]:
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    running = await start(DraftSettings(str(folder), "127.0.0.1:0", dtype="float32", threads=1, kv_tokens=64))
    async with channel_to(running.address) as channel:
        yield DraftClient(channel)
    await running.stop(0)


async def open_with(client: DraftClient, drafter: str, rule: Rule = Rule.MATCH) -> None:
    """Opens a session with two guesses wanted from a drafter."""
    session = open_message(ruled(SPEC, rule), SPEC.token_ids)
    opening = draft_pb.DraftOpen(session=session, draft_count=2, drafter=drafter)
    await client.send(draft_pb.ProposeRequest(fence=client.fence(1, 3), open=opening))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("drafter", ["", "model", "sampled", "coupled"])
async def test_a_drafter_on_offer_guesses(client: DraftClient, drafter: str, rule: Rule) -> None:
    """An empty name leaves the choice to the service; distributions come where the rule needs them, and only there."""
    if drafter == "coupled" and rule.needs_distributions:
        await open_with(client, drafter, rule)
        limit = f"one that serves the rule {rule}: model, sampled"
        with pytest.raises(InvalidRequest, match=f"open.drafter is 'coupled', but must be {limit}"):
            await client.read()
        assert (await client.info()).session_count == 0
        after = client.beside()
        await open_with(after, "model", rule)
        assert len((await after.read()).proposal.token_ids) == 2
        return
    await open_with(client, drafter, rule)
    proposal = (await client.read()).proposal
    assert len(proposal.token_ids) == 2
    distributions = tree_from(proposal, 257, 32).distributions
    assert len(distributions) == (2 if rule.needs_distributions else 0)
    await client.close(1)


async def test_offers_name_their_rules(client: DraftClient) -> None:
    """What an observer learns, in the order of the service's preference."""
    offers = {
        offer.name: [RULES_BY_NUMBER[rule] for rule in offer.rules] for offer in (await client.info()).drafter_offers
    }
    every = list(Rule)
    assert offers == {"model": every, "coupled": [Rule.MATCH, Rule.TYPICAL], "sampled": every}
    assert list(offers) == ["model", "coupled", "sampled"]


async def test_a_drafter_that_is_not_on_offer_is_refused(client: DraftClient) -> None:
    """Field, value and the names that there are; no session is left."""
    await open_with(client, "oracle")
    with pytest.raises(
        InvalidRequest, match=r"open\.drafter is 'oracle', but must be one of model, coupled, sampled, or empty"
    ):
        await client.read()
    assert (await client.info()).session_count == 0
