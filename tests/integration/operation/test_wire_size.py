"""What a round sends stays within 2 KB a hop where a rule needs the draft's distributions, both ways together."""

import asyncio
from typing import Any

import pytest
import torch
from support.stack import PATIENT, Answer, after_the_draft, running_stack

from bench.acceptance.runs import INSTANCE_ID, NUMERICS_ID, SESSION_ID, TIMES, hop_bytes
from gateway.rounds.costs import RoundCosts
from gateway.rounds.tuning import TUNING
from outrider.cli.bench.common import OPENINGS
from outrider.engine.ops.eager import EagerOps
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N, WEIGHT_SUM, quantise
from outrider.estimates.acceptance import MAX_DRAFT_COUNT
from outrider.estimates.timing import ServiceLoad
from outrider.parameters import DraftDistribution
from outrider.rpc.fencing import Fence
from outrider.rpc.messages.round import fence_message, times_message, write_load
from outrider.rpc.messages.tree import tree_message, write_branches, write_tree
from outrider.token_tree import Branch, TokenTree
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2

LIMIT_BYTES = 2048
# Under a rule that needs token ids only.
PLAIN_LIMIT_BYTES = 200
DRAFT_COUNT = 5
NUM_REQUESTS = 8
# As many ids as large open models have, and as long a context.
MANY_TOKENS, MANY_POSITIONS = 152_000, 131_072
# Smallest numbers that take a second and a third byte in a message.
TWO_BYTES, THREE_BYTES = 1 << 7, 1 << 14


async def hops(
    rule: "types_pb2.AcceptanceRule.ValueType", gateway: dict[str, Any] | None = None, **fields: Any
) -> list[tuple[int, int, int]]:
    """Draft count and bytes of both hops of all rounds of some requests but their openings, with the embedded pair."""
    async with running_stack(gateway=gateway) as stack:
        if gateway is not None:
            after_the_draft(stack)

        async def answer(seed: int, text: str) -> Answer:
            return await stack.generate(text=text, seed=seed, rule=rule, draft_count=DRAFT_COUNT, **fields)

        answers = await asyncio.gather(*(answer(seed, text) for seed, text in enumerate(OPENINGS[:NUM_REQUESTS])))
    # The second round opens the draft's session, with the prompt.
    facts = [each.facts for found in answers for each in found.rounds[2:]]
    return [(each.draft_count, each.draft_bytes, each.verify_bytes) for each in facts]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ratio", "block", "lenient"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
async def test_a_round_with_distributions_stays_within_two_kilobytes(rule: str, temperature: float) -> None:
    """At every temperature, the flattest included, and distributions do travel."""
    number = getattr(types_pb2, f"ACCEPTANCE_RULE_{rule.upper()}")
    found = await hops(number, temperature=temperature, max_tokens=32, ignore_eos=True)
    assert max(max(draft_bytes, verify_bytes) for _, draft_bytes, verify_bytes in found) <= LIMIT_BYTES
    full = [each[1:] for each in found if each[0] == DRAFT_COUNT]

    assert max(min(both) for both in full) > DRAFT_COUNT * DEFAULT_TOP_N


@pytest.mark.slow
async def test_a_round_without_distributions_stays_within_two_hundred_bytes() -> None:
    """Under the default rule."""
    found = await hops(types_pb2.ACCEPTANCE_RULE_MATCH, temperature=1.0, max_tokens=32, ignore_eos=True)
    assert max(max(each[1:]) for each in found) <= PLAIN_LIMIT_BYTES


def worst_distribution(top_n: int) -> DraftDistribution:
    """The distribution that takes most bytes: as many large weights as fit into their sum, and no small one."""
    large = (WEIGHT_SUM - top_n * TWO_BYTES) // (THREE_BYTES - TWO_BYTES)
    weights = (THREE_BYTES,) * large + (TWO_BYTES,) * (top_n - large)
    return DraftDistribution(tuple(range(MANY_TOKENS - top_n, MANY_TOKENS)), weights)


def largest_hop(distribution: DraftDistribution) -> int:
    """Bytes of the larger hop of a round whose distributions are all this one."""
    tree = TokenTree.chain([MANY_TOKENS - 1] * DRAFT_COUNT, [distribution] * DRAFT_COUNT)
    return hop_bytes(tree, MANY_POSITIONS - DRAFT_COUNT)


def test_the_default_distribution_fits_with_a_large_vocabulary() -> None:
    """Whatever its weights; a distribution of half as many tokens again would not."""
    assert largest_hop(worst_distribution(DEFAULT_TOP_N)) <= LIMIT_BYTES
    assert largest_hop(worst_distribution(DEFAULT_TOP_N * 3 // 2)) > LIMIT_BYTES


def ahead_bytes(branch_count: int, draft_count: int) -> int:
    """Bytes of both hops of a round with branches, each message in a frame of its own: the most that ids can take."""
    chain, many = TokenTree.chain([MANY_TOKENS - 1] * draft_count), types_pb2.Branches(plain_on_miss=True)
    # Of the outcomes of a chain only those without a row accepted have no number of them.
    write_branches(many, [Branch(draft_count, MANY_TOKENS - 1, chain.token_ids)] * branch_count)
    fence = fence_message(Fence(SESSION_ID, 9, MANY_POSITIONS - 1))
    answer: dict[str, Any] = {"fence": fence, "cached_len": MANY_POSITIONS - 1, "times": times_message(TIMES)}
    sender: dict[str, Any] = {"instance_id": INSTANCE_ID, "numerics_id": NUMERICS_ID}
    tokens = [MANY_TOKENS - 1] * (draft_count + 1)
    advance = draft_pb.DraftAdvance(token_ids=tokens, draft_count=draft_count, branch_count=branch_count, went_on=True)
    verdict = target_pb.Verdict(accepted_rows=range(1, draft_count + 1), next_token_id=tokens[0], goes_on=True)
    verdict.evaluated_count, verdict.is_of_branch = draft_count, True
    write_tree(verdict.proposal, chain)
    asking = [
        draft_pb.DraftServiceLinkRequest(requests=[draft_pb.ProposeRequest(fence=fence, advance=advance)]),
        target_pb.TargetServiceLinkRequest(requests=[target_pb.VerifyRequest(fence=fence, branches=many)]),
    ]
    proposed = draft_pb.ProposeResponse(**answer, proposal=tree_message(chain))
    branched = draft_pb.ProposeResponse(**answer, branches=many)
    answering = [
        *(draft_pb.DraftServiceLinkResponse(responses=[each], **sender) for each in (proposed, branched)),
        target_pb.TargetServiceLinkResponse(responses=[target_pb.VerifyResponse(**answer, verdict=verdict)], **sender),
    ]
    return sum(each.ByteSize() for each in (*asking, *answering))


@pytest.mark.parametrize("draft_count", range(1, MAX_DRAFT_COUNT + 1))
def test_as_many_branches_as_are_asked_for_fit_with_a_large_vocabulary(draft_count: int) -> None:
    """Both hops together, whatever the number of guesses; of five guesses and fewer they may be 32, and of eight 23."""
    costs = RoundCosts(TUNING)
    costs.most_branches = 32
    most = costs.branch_limit(draft_count)
    assert ahead_bytes(most, draft_count) <= LIMIT_BYTES
    assert (most == 32) == (draft_count <= 5)
    if most < 32:
        assert most >= 23
        assert ahead_bytes(most + 3, draft_count) > LIMIT_BYTES


@pytest.mark.slow
async def test_a_round_that_runs_ahead_stays_within_two_kilobytes() -> None:
    """Both hops together under the default rule, with 32 branches of five guesses, and branches do travel."""
    ahead = {**PATIENT, "branches": 32, "lookup": False}
    found = await hops(types_pb2.ACCEPTANCE_RULE_MATCH, gateway=ahead, temperature=1.0, max_tokens=96, ignore_eos=True)
    assert max(draft_bytes + verify_bytes for _, draft_bytes, verify_bytes in found) <= LIMIT_BYTES
    # No hop of a round without branches is larger, as another test says; here most requests have rounds with both.
    with_branches = [each for each in found if min(each[1:]) > PLAIN_LIMIT_BYTES]
    assert len(with_branches) >= 2 * NUM_REQUESTS


def test_a_load_takes_few_bytes() -> None:
    """Of a service as large as any, and it does not leave with every frame; a usual one takes less than 40."""
    sizes = []
    for load in (
        ServiceLoad(1 << 24, 1 << 24, 256, 1 << 24, 1 << 24, 10_000_000, 1 << 16, 26.5, True, 86_400_000),
        ServiceLoad(12_000, 4_000, 3, 20_000, 12_000, 9_000, 300, 26.5),
    ):
        message = types_pb2.ServiceLoad()
        write_load(message, load)
        sizes.append(target_pb.TargetServiceLinkResponse(load=message).ByteSize())
    assert sizes[0] <= 64
    assert sizes[1] < 40


# Rows, each with its own parent, of a chain, of siblings, and of two levels.
SHAPES = {"chain": range(8), "8": [0] * 8, "4x1": [0, 0, 0, 0, 1, 2, 3, 4], "2x3": [0, 0, 1, 1, 1, 2, 2, 2]}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_of_eight_rows_with_distributions_of_32_fits(shape: str) -> None:
    """Drawn independently, where every row carries all of its own; without replacement, the first of siblings does."""
    wide = worst_distribution(32)
    parents = tuple(SHAPES[shape])
    tokens = tuple(wide.token_ids[-1 - row] for row in range(8))
    assert hop_bytes(TokenTree(tokens, parents, (wide,) * 8), MANY_POSITIONS - DRAFT_COUNT) <= LIMIT_BYTES
    left: dict[int, DraftDistribution] = {}
    distributions = []
    for parent, token_id in zip(parents, tokens, strict=True):
        distributions.append(left.get(parent, wide))
        left[parent] = distributions[-1].without(token_id)
    size = hop_bytes(TokenTree(tokens, parents, tuple(distributions)), MANY_POSITIONS - DRAFT_COUNT)
    assert size <= 250 + 230 * len(left)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 16.0])
def test_no_distribution_is_larger_than_the_worst(spread: float) -> None:
    """From equal scores to a single token that has nearly everything."""
    scores = torch.randn(8, MANY_TOKENS, generator=torch.Generator().manual_seed(3)) * spread
    sizes = [largest_hop(distribution) for distribution in quantise(scores, DEFAULT_TOP_N, EagerOps()).distributions()]
    assert max(sizes) <= largest_hop(worst_distribution(DEFAULT_TOP_N))
