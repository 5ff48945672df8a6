"""The round loop, against sessions of a tiny model with real draws: the tokens are always those of plain decoding."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.services.markov import EOS, NUM_TOKENS, MarkovDraft, MarkovModel, MarkovTarget, plain_decoding

from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
    DrafterId,
    FallbackReason,
    GuessRequest,
    Makes,
    Place,
    Proposal,
    Round,
    TokenLog,
    TokenOrigin,
    Verdict,
)
from gateway.speculation import speculate
from outrider.errors import PeerLost, ProtocolViolation
from outrider.parameters import FinishReason
from outrider.token_tree import TokenTree, TreeShape

PROMPT = (3, 5)
QUIET = settings(derandomize=True)


class Request:
    """One request over fresh sessions."""

    def __init__(self, draft_count: int | None, seed: int = 0, max_len: int = 64, **draft: object) -> None:
        self.log = TokenLog(PROMPT)
        self.seed, self.max_len = seed, max_len
        self.target = MarkovTarget(log=self.log, seed=seed, max_len=max_len)
        self.draft = MarkovDraft(log=self.log, seed=seed, **draft)  # type: ignore[arg-type]
        self.planner = RoundPlanner(SpeculationPolicy(), draft_count, max_len, max_draft_count=8)

    def rounds(self) -> AsyncIterator[Round]:
        """The rounds of the request."""
        return speculate(self.log, self.planner, self.target, self.draft)

    async def run(self) -> list[Round]:
        """All rounds, after checking that together they are what the target alone would have said."""
        rounds = [committed async for committed in self.rounds()]
        expected = plain_decoding(self.target.model, PROMPT, self.seed, self.max_len)
        assert self.log.tokens() == expected
        assert PROMPT + tuple(token for committed in rounds for token in committed.token_ids) == expected
        assert self.target.closed
        assert self.draft.closed
        return rounds


OWN, OWN_TREES = (DrafterId("own", Place.HOSTED, makes) for makes in (Makes.CHAIN, Makes.TREE))
SHAPED = Drafting((OWN_TREES,), TreeShape())


@QUIET
@given(st.integers(0, 8) | st.none(), st.integers(0, 999), st.integers(3, 80), st.floats(0, 5))
async def test_tokens_equal_plain_decoding(count: int | None, seed: int, max_len: int, noise: float) -> None:
    """Whatever K, seed, limit and quality of the draft, tokens are those of plain decoding."""
    await Request(count, seed, max_len, model=MarkovModel(noise=noise)).run()


@QUIET
@given(
    st.integers(1, 8) | st.none(),
    st.dictionaries(st.integers(1, 12), st.sampled_from(list(FallbackReason))),
    st.frozensets(st.integers(2, 40)),
    st.none() | st.integers(2, 50),
    st.integers(0, 99),
)
async def test_no_fault_of_the_draft_changes_a_token(
    count: int | None,
    faults: dict[int, FallbackReason],
    away: frozenset[int],
    context_len: int | None,
    seed: int,
) -> None:
    """Lost, late, refused, absent at any time, with a short context: the same tokens, and every fallback says why."""
    request = Request(count, seed, 60, faults=faults, away=away, context_len=context_len)
    rounds = await request.run()
    reasons = [committed.proposal.fallback_reason for committed in rounds if committed.proposal.fallback_reason]
    met = [faults[call] for call in faults if call <= len(request.draft.asked)]
    allowed = {*met, FallbackReason.DRAFT_ABSENT, FallbackReason.DRAFT_CONTEXT}
    assert set(met) <= set(reasons) <= allowed
    assert all(committed.draft_count == 0 for committed in rounds if committed.proposal.fallback_reason)


@QUIET
@given(
    st.integers(1, 8) | st.none(),
    st.integers(0, 999),
    st.integers(3, 160),
    st.floats(0, 5),
    st.booleans(),
    st.frozensets(st.integers(2, 60)),
    st.sampled_from([Drafting((OWN,)), Drafting((OWN_TREES,)), SHAPED]),
)
async def test_a_target_that_drafts_for_itself_says_the_same(
    count: int | None, seed: int, max_len: int, noise: float, has_draft: bool, bare: frozenset[int], drafting: Drafting
) -> None:
    """Alone or beside a draft, also where some targets lack the drafter; and what it proposed is in the rounds.

    It makes chains, trees where the gateway likes, or always trees.
    """
    request = Request(count, seed, max_len)
    request.target.own, request.target.own_model, request.target.bare = "own", MarkovModel(noise=noise), bare
    # The draft makes chains.
    if has_draft:
        drafting = Drafting((*drafting.drafters, ANY_DRAFT))
    request.planner = RoundPlanner(SpeculationPolicy(), count, max_len, 8, drafting)
    rounds = await request.run()
    for committed in rounds:
        tree = committed.proposal.tree
        assert [tree.token_ids[row - 1] for row in committed.verdict.accepted_rows] == list(
            committed.token_ids[: committed.accepted_count]
        )
    if has_draft and count is not None:
        assert {committed.proposal.drafter.name for committed in rounds} <= {""}
    elif not bare and len(rounds) > 3:
        assert any(committed.proposal.drafter.name == "own" for committed in rounds)
        grown = [bool(each.proposal.tree.values) for each in rounds if each.proposal.tree]
        assert all(grown) if drafting.shape is not None else OWN_TREES in drafting.drafters or not any(grown)
    assert has_draft or not request.draft.asked


async def test_a_target_that_drafts_for_itself_is_hardly_asked() -> None:
    """Stretches of 64 tokens, most of which come unasked with four guesses that are always right: 5 tokens a pass."""
    request = Request(4, 5, 400, model=MarkovModel())
    request.target.own, request.target.own_model = "own", MarkovModel()
    for row in request.target.model._rows:
        row[EOS] = 1e-12
    for row in request.target.own_model._rows:
        row[EOS] = 1e-12
    request.planner = RoundPlanner(SpeculationPolicy(), 4, 400, 8, Drafting((OWN,)))
    rounds = await request.run()
    num_tokens = sum(len(committed.token_ids) for committed in rounds)
    assert num_tokens == 398
    assert len(rounds) <= 1 + -(-397 // 5) + 2
    assert request.target.steps + request.target.acknowledged <= 2 + -(-398 // 32)


async def test_trees_equal_plain_decoding_too() -> None:
    """A proposal with branches commits the same tokens, and its wrong siblings are never accepted."""
    rounds = await Request(4, 7, branching=True, model=MarkovModel()).run()
    longest = max(rounds, key=lambda committed: committed.accepted_count)
    assert longest.accepted_count == 4
    assert longest.draft_count == 8
    assert longest.origins[-1] is TokenOrigin.BONUS


async def test_a_wrong_verdict_would_be_seen() -> None:
    """The comparison with plain decoding can fail: a target that accepts one wrong guess is caught."""
    request = Request(4, 3)
    walk = request.target._walk

    def planted(proposal: Proposal) -> Verdict:
        """Accepts the first row whatever it is."""
        return Verdict(len(request.log), (1,), 1, None, 1) if proposal.tree else walk(proposal)

    request.target._walk = planted  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        await request.run()


async def test_a_perfect_draft_is_accepted_whole() -> None:
    """With the target itself as draft every round commits K + 1 tokens, the last of them a bonus."""
    first, *rounds = await Request(3, 11, model=MarkovModel()).run()
    assert first.origins == (TokenOrigin.PLAIN,)
    full = [committed for committed in rounds[:-1] if committed.draft_count]
    assert all(committed.accepted_count == committed.draft_count for committed in full)
    assert {committed.origins[-1] for committed in full} == {TokenOrigin.BONUS}


async def test_without_speculation_the_request_is_one_plain_stretch() -> None:
    """K = 0 asks the draft nothing, sends the target one step, and moves its limit now and then."""
    request = Request(0, 5, 200, model=MarkovModel())
    request.target.model._rows = [[*row[:EOS], 0.0001, *row[EOS + 1 :]] for row in request.target.model._rows]
    rounds = await request.run()
    assert request.draft.asked == []
    assert request.target.steps == 1
    assert {committed.proposal.fallback_reason for committed in rounds} == {None}
    assert all(committed.origins == (TokenOrigin.PLAIN,) for committed in rounds)


async def test_speculation_resumes_when_the_draft_is_back() -> None:
    """A draft that is away for a while costs plain rounds with a reason, and then proposes again."""
    request = Request(4, 9, 60, away=frozenset(range(2, 9)), model=MarkovModel())
    rounds = await request.run()
    assert rounds[0].proposal.fallback_reason is None
    assert rounds[1].proposal.fallback_reason is FallbackReason.DRAFT_ABSENT
    assert request.draft.asked
    back = next(committed for committed in rounds if committed.draft_count)
    assert back.verdict.base_len <= 2 * 9


async def test_never_drafts_past_the_limit() -> None:
    """K is at most what is left for the draft: the target adds one token itself."""
    request = Request(8, 1, 9, model=MarkovModel())
    rounds = await request.run()
    assert all(committed.verdict.base_len + committed.draft_count < 9 for committed in rounds)
    assert rounds[-1].verdict.finish_reason in {FinishReason.LENGTH, FinishReason.EOS}


async def test_past_the_drafts_context_rounds_are_plain() -> None:
    """A draft with a short context is not asked past it, and the rounds say why."""
    request = Request(4, 6, 60, context_len=10, model=MarkovModel())
    rounds = await request.run()
    assert all(
        committed.verdict.base_len + committed.draft_count <= 10 for committed in rounds if committed.draft_count
    )
    late = [committed for committed in rounds if committed.verdict.base_len >= 10]
    assert late
    assert {committed.proposal.fallback_reason for committed in late} == {FallbackReason.DRAFT_CONTEXT}


async def test_both_sessions_close_when_the_client_leaves() -> None:
    """A generator that is closed between two rounds leaves no session open."""
    request = Request(4, 2)
    async with aclosing(request.rounds()) as rounds:  # type: ignore[type-var]
        await anext(rounds)
        assert not request.target.closed
    assert request.target.closed
    assert request.draft.closed


async def test_both_sessions_close_when_the_target_fails() -> None:
    """An error of the target reaches the caller after both sessions were left."""
    request = Request(4, 2)

    async def fail(proposal: Proposal, plain_budget: int, own: GuessRequest) -> Verdict:
        """Loses the target."""
        raise PeerLost("gone")

    request.target.verify = fail  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        await request.run()
    assert request.target.closed
    assert request.draft.closed


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, (), 4, None, 0),
        Verdict(3, (), 4, None, 0),
        Verdict(2, (2,), 4, None, 0),
        Verdict(2, (1, 1), 4, None, 0),
        Verdict(2, (4,), 4, None, 0),
        Verdict(2, (1,), None, None, 0),
        Verdict(2, (), None, FinishReason.EOS, 0),
    ],
)
def test_an_impossible_verdict_commits_nothing(verdict: Verdict) -> None:
    """Another length, rows that are no path, no token at all: refused, and the log stays as it was."""
    log = TokenLog(PROMPT)
    with pytest.raises(ProtocolViolation):
        log.commit(Proposal(TokenTree.chain((7, 8, 9))), verdict)
    assert log.tokens() == PROMPT


def test_a_finished_log_takes_nothing_more() -> None:
    """After the last verdict the log never changes."""
    log = TokenLog(PROMPT)
    log.commit(Proposal(), Verdict(2, (), NUM_TOKENS - 1, FinishReason.LENGTH, 0))
    with pytest.raises(ProtocolViolation):
        log.commit(Proposal(), Verdict(3, (), 1, None, 0))
