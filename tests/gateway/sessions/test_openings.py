"""What does not fit a request is stopped at the gateway: in what a draft says, and in what a target is asked."""

from dataclasses import replace
from typing import Any

import pytest
from support.services.markov import NUM_TOKENS, MarkovModel
from support.services.markov_services import DraftServicer, TargetServicer, linked

from gateway.rounds.round import NO_REQUEST, NOTHING, DrafterId, GuessRequest, Place, TokenLog, Verdict
from gateway.sessions.draft_opening import ALONE, DraftOpening
from gateway.sessions.target_opening import TargetOpening
from outrider.errors import ProtocolViolation
from outrider.parameters import Acceptance, Rule, SamplingParameters, SessionSpec
from outrider.token_tree import TokenTree, TreeShape
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2

PROMPT = (3, 5)
CHAIN, TREE = (0, 1), (0, 0)
DISTRIBUTIONS = tuple(types_pb2.DraftDistribution(token_ids=[1, 2], weights=[40000, 25535]) for _ in CHAIN)
WITH_DISTRIBUTIONS = [rule for rule in Rule if rule.needs_distributions]
WITHOUT_DISTRIBUTIONS = [rule for rule in Rule if not rule.needs_distributions]


async def read(rule: Rule, **proposal: object) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Token ids, parents and number of distributions of a proposal of two tokens, as they are read under a rule."""
    found = await proposed(rule, **proposal)  # type: ignore[arg-type]
    return found.token_ids, found.parents, len(found.distributions)


async def proposed(rule: Rule, *, draft_logprobs: bool = False, **proposal: object) -> TokenTree:
    """The tree of the proposal, for a request that may have asked for log-probabilities."""
    spec = SessionSpec(PROMPT, 2, SamplingParameters(), 9, 60, frozenset({0}), frozenset(), Acceptance(rule=rule))
    spec = replace(spec, draft_logprobs=draft_logprobs)
    async with linked(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())) as link:
        opening = DraftOpening(link, spec, TokenLog(PROMPT), b"0123456789abcdef", ALONE)
        tree = types_pb2.TokenTree(token_ids=[1, 2], **proposal)  # type: ignore[arg-type]
        return opening.proposal(draft_pb.ProposeResponse(proposal=tree), 4, 0, 0).tree


@pytest.mark.parametrize("rule", WITH_DISTRIBUTIONS)
async def test_rules_with_distributions_take_chains_and_trees_with_distributions(rule: Rule) -> None:
    """Whether a chain's parents are written out or not."""
    for parents in (CHAIN, (), TREE):
        assert await read(rule, parents=parents, distributions=DISTRIBUTIONS) == ((1, 2), parents or CHAIN, 2)


@pytest.mark.parametrize("rule", WITHOUT_DISTRIBUTIONS)
async def test_rules_without_distributions_take_trees(rule: Rule) -> None:
    """Of any shape."""
    assert await read(rule, parents=TREE) == ((1, 2), TREE, 0)


@pytest.mark.parametrize("rule", WITH_DISTRIBUTIONS)
async def test_missing_distributions_are_the_draft_s_fault(rule: Rule) -> None:
    """Under every rule that tests with them."""
    with pytest.raises(ProtocolViolation, match=f"without distributions, which does not fit the rule {rule}"):
        await read(rule)


@pytest.mark.parametrize("rule", WITHOUT_DISTRIBUTIONS)
async def test_unwanted_distributions_are_the_draft_s_fault(rule: Rule) -> None:
    """Under every rule that has no use for them."""
    with pytest.raises(ProtocolViolation, match=f"with distributions, which does not fit the rule {rule}"):
        await read(rule, distributions=DISTRIBUTIONS)


@pytest.mark.parametrize(
    ("distribution", "fault"),
    [
        ({"token_ids": [1, 2], "weights": [1]}, "weights is '1 entries'"),
        ({"token_ids": [1, 2], "weights": [1, 0]}, "weights.1 is 0"),
        ({"token_ids": [1, 2], "weights": [1, 65536]}, "weights.1 is 65536"),
        ({"token_ids": [1, 1], "weights": [1, 1]}, "without repetition"),
        ({"token_ids": [1, NUM_TOKENS], "weights": [1, 1]}, f"token_ids.1 is {NUM_TOKENS}"),
        ({"token_ids": [3], "weights": [1]}, "a support of the row's token 2"),
        ({}, "filled for the first of siblings"),
    ],
)
async def test_a_malformed_distribution_is_the_draft_s_fault(distribution: dict[str, list[int]], fault: str) -> None:
    """The message names what is wrong with it."""
    distributions = (DISTRIBUTIONS[0], types_pb2.DraftDistribution(**distribution))  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation, match=r"malformed proposal: proposal\.distributions\.1") as caught:
        await read(Rule.RATIO, distributions=distributions)
    assert fault in str(caught.value)


async def test_log_probabilities_are_read_when_they_were_asked_for() -> None:
    """A draft may have none to report; what was not asked for is not looked at."""
    assert (await proposed(Rule.MATCH, draft_logprobs=True, logprobs=[-0.5, 0])).logprobs == (-0.5, 0.0)
    assert (await proposed(Rule.MATCH, draft_logprobs=True)).logprobs == ()
    assert (await proposed(Rule.MATCH, logprobs=[1, 2, 3])).logprobs == ()


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, 0.5], [-1.0, float("nan")]])
async def test_malformed_log_probabilities_are_the_draft_s_fault(logprobs: list[float]) -> None:
    """Too few, positive, or no number."""
    with pytest.raises(ProtocolViolation, match=r"malformed proposal: proposal\.logprobs"):
        await proposed(Rule.MATCH, draft_logprobs=True, logprobs=logprobs)


# Three rows of which each follows the one before, and a tree of two siblings and a child.
THREE, FORK = {"token_ids": [1, 2, 3]}, {"token_ids": [1, 2, 3], "parents": [0, 0, 1]}


@pytest.mark.parametrize(
    ("max_len", "shape", "proposal", "fault"),
    [
        (5, None, THREE, "3 tokens deep where at most 2 fit"),
        (3, None, {"token_ids": [1]}, "1 tokens deep where at most 0 fit"),
        (60, TreeShape(max_depth=2), THREE, "3 tokens deep where at most 2 fit"),
        (60, TreeShape(expansions=(1, 1)), THREE, "3 tokens deep where at most 2 fit"),
        (60, TreeShape(max_children=1), FORK, "with 2 children of a row where at most 1 were asked for"),
        (60, TreeShape(expansions=(1, 2)), FORK | {"parents": [0, 0, 0]}, "with 3 children of a row where at most 2"),
        (60, TreeShape(), FORK | {"values": [0.5, 0.4, 0.6]}, "with a row of more value than its parent"),
        (60, TreeShape(), FORK | {"values": [float("nan"), 0.4, 0.2]}, "malformed proposal: proposal.values.0"),
        (60, None, {"token_ids": [1] * 5}, "malformed proposal: proposal.token_ids has 5 rows"),
        (60, None, {"token_ids": [NUM_TOKENS]}, "malformed proposal: proposal.token_ids.0"),
        (60, None, FORK | {"parents": [0, 3, 1]}, "malformed proposal: proposal.parents.1"),
    ],
)
async def test_what_was_not_asked_for_or_has_no_room_is_the_draft_s_fault(
    max_len: int, shape: TreeShape | None, proposal: dict[str, list[Any]], fault: str
) -> None:
    """Depth, children and values of a tree; the same fits where there is room for it."""
    async with linked(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())) as link:
        spec = SessionSpec(PROMPT, 2, SamplingParameters(), 9, max_len, frozenset({0}), frozenset())
        opening = DraftOpening(link, spec, TokenLog(PROMPT), b"0123456789abcdef", ALONE)
        with pytest.raises(ProtocolViolation, match=fault):
            opening.proposal(draft_pb.ProposeResponse(proposal=types_pb2.TokenTree(**proposal)), 4, 0, 0, shape)
        right = types_pb2.TokenTree(token_ids=[1, 2, 3], parents=[0, 1, 2], values=[0.5, 0.5, 0.4])
        fitting = DraftOpening(link, replace(spec, max_len=6), TokenLog(PROMPT), b"1123456789abcdef", ALONE)
        found = fitting.proposal(draft_pb.ProposeResponse(proposal=right), 4, 0, 0, TreeShape(3, 1))
        assert len(found.tree) == 3


@pytest.mark.parametrize(
    "times",
    [
        {"queue_us": -1},
        {"compute_us": -1},
        {"compute_us": 2**62},
        {"queue_us": 1_000_101},
        {"forward_count": -1},
        {"row_count": -1},
    ],
)
async def test_times_that_cannot_be_are_the_draft_s_fault(times: dict[str, int]) -> None:
    """Below nothing, or longer than was waited, but for what clocks differ; they would be learnt from."""
    async with linked(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())) as link:
        spec = SessionSpec(PROMPT, 2, SamplingParameters(), 9, 60, frozenset({0}), frozenset())
        opening = DraftOpening(link, spec, TokenLog(PROMPT), b"0123456789abcdef", ALONE)
        answer = draft_pb.ProposeResponse(proposal=types_pb2.TokenTree(token_ids=[1]))
        assert opening.proposal(answer, 4, 0, 100).tree.token_ids == (1,)
        answer.times.MergeFrom(types_pb2.ComputeTimes(**times))
        with pytest.raises(ProtocolViolation):
            opening.proposal(answer, 4, 0, 100)


class WithDrafter(TargetServicer):
    """A target that has a drafter in its process."""

    makes_trees: bool = False

    async def GetModelInfo(  # noqa: N802
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        answer = await TargetServicer.GetModelInfo(self, request, context)
        answer.drafters.append("hosted")
        rules = [types_pb2.ACCEPTANCE_RULE_MATCH]
        answer.drafter_offers.add(name="hosted", rules=rules, makes_trees=self.makes_trees)
        return answer


@pytest.mark.parametrize("makes_trees", [True, False])
async def test_only_a_target_that_makes_trees_is_asked_for_some(makes_trees: bool) -> None:
    """Another replica may have a drafter of the same name that makes chains, and would refuse a shape."""
    service = WithDrafter(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    service.makes_trees = makes_trees
    spec = SessionSpec(PROMPT, 2, SamplingParameters(), 9, 60, frozenset({0}), frozenset())
    sent: list[target_pb.VerifyRequest] = []
    async with linked(service) as link:
        fence = types_pb2.Fence(session_id=bytes(16), epoch=1, base_len=2)
        opening = TargetOpening(link, spec, TokenLog(PROMPT), fence, "hosted")
        opening.send = lambda *messages: sent.extend(messages)  # type: ignore[method-assign, assignment]
        own = DrafterId("hosted", Place.HOSTED)
        opening.send_next(NOTHING, 0, GuessRequest(own, 4, TreeShape(max_width=3)))
        opening.send_next(NOTHING, 0, GuessRequest(own, 4))
    assert [message.open.step.own_draft_count for message in sent] == [4, 4]
    assert [message.open.step.HasField("own_shape") for message in sent] == [makes_trees, False]
    assert sent[0].open.step.own_shape.max_width == (3 if makes_trees else 0)


@pytest.mark.parametrize("max_len", [12, 500])
async def test_guesses_end_and_begin_within_a_stretch_at_once(max_len: int) -> None:
    """A target that went on with what it was asked for would guess to the end of a short answer. What stays as it is
    is not said again.
    """
    service = WithDrafter(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    spec = SessionSpec(PROMPT, 2, SamplingParameters(), 9, max_len, frozenset({0}), frozenset())
    sent: list[target_pb.VerifyRequest] = []
    async with linked(service) as link:
        fence = types_pb2.Fence(session_id=bytes(16), epoch=1, base_len=2)
        opening = TargetOpening(link, spec, log := TokenLog(PROMPT), fence, "hosted")
        opening.send = lambda *messages: sent.extend(messages)  # type: ignore[method-assign, assignment]
        opening.is_opening = False
        guesses = GuessRequest(DrafterId("hosted", Place.HOSTED), 4)
        for own, budget in ((guesses, 15), (guesses, 15), (NO_REQUEST, 0), (NO_REQUEST, 15), (NO_REQUEST, 15)):
            opening.send_next(NOTHING, budget, own)
            log.commit(NOTHING, Verdict(len(log), (), 7, None, 0))
        opening.send_next(NOTHING, 15, guesses)
    begun, ended, again = sent
    assert (begun.step.own_draft_count, begun.step.plain_budget) == (4, 15)
    assert (ended.acknowledge.own_draft_count, ended.acknowledge.plain_budget) == (0, 15)
    assert (again.acknowledge.own_draft_count, again.fence.base_len) == (4, 7)
