"""The round loop with lookups and several drafters: whatever is guessed, the tokens are plain decoding's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.services.markov import EOS, NUM_TOKENS, MarkovDraft, MarkovTarget, plain_decoding

from gateway.lookup.guesses import LookupGuesses
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession
from gateway.lookup.votes import Look
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
    LOOKUP,
    DrafterId,
    Makes,
    Place,
    Proposal,
    Round,
    TokenLog,
    TokenOrigin,
)
from gateway.speculation import speculate
from outrider.parameters import Rule
from outrider.token_tree import TokenTree, TreeShape

PROMPT = (3, 5)
QUIET = settings(derandomize=True)
OWN = DrafterId("own", Place.HOSTED)
ALONE, MERGED = Drafting((LOOKUP,)), Drafting((DrafterId("lookup+model"), LOOKUP), merges=True)
KINDS = ("oracle", "random", "adversary", "stale", "empty", "real")


@dataclass
class Guesses(LookupGuesses):
    """A lookup that finds what a test wants: the right tokens, any, only wrong ones, those of before, or none."""

    kind: str
    log: TokenLog
    seed: int
    expected: Sequence[int] = ()
    looks: int = 0
    _found: Look = field(default_factory=Look)

    def __post_init__(self) -> None:
        session = LookupSession(PROMPT, rates=LookupRates()) if self.kind == "real" else None
        super().__init__(session, Rule.MATCH, 8)

    def look(self, room: int, least: float = 0.0) -> Look:
        """Up to eight rows, of which some branch."""
        self.looks += 1
        if self.kind == "real":
            return super().look(room, least)
        noise, length = random.Random(f"{self.seed} {len(self.log)} look"), len(self.log)
        count = min(8, room)
        right = [*self.expected[length : length + count]]
        if self.kind == "empty" or not count or not right:
            self._look = Look()
        elif self.kind != "stale" or not self._look.tree:
            tokens = {
                "oracle": right,
                "stale": right,
                "random": [noise.randrange(NUM_TOKENS) for _ in right],
                "adversary": [(token + 1) % NUM_TOKENS for token in right],
            }[self.kind]
            parents = [noise.randint(0, row) for row in range(len(tokens))] if self.kind == "random" else None
            values = [0.9**row for row in range(1, len(tokens) + 1)]
            tree = TokenTree(tuple(tokens), tuple(parents or range(len(tokens))), values=tuple(values))
            self._look = Look(tree, (LOOKUP.name,) * len(tree))
        else:
            self._look = self._look.cut(count)
        return self._look

    def commit(self, token_ids: Sequence[int]) -> None:
        """A stale lookup goes on with what it found before."""
        found = self._look
        super().commit(token_ids)
        self._look = found if self.kind == "stale" else Look()


class Request:
    """One request over fresh sessions."""

    def __init__(
        self, kind: str, drafting: Drafting, draft_count: int | None, seed: int, max_len: int = 60, own: str = ""
    ) -> None:
        # Half a millisecond passes between two looks at the clock, so no choice of the policy depends on a machine.
        self.log = TokenLog(PROMPT, partial(next, count(step=500_000)))
        self.target = MarkovTarget(log=self.log, seed=seed, max_len=max_len, own=own)
        self.expected = plain_decoding(self.target.model, PROMPT, seed, max_len)
        self.draft = MarkovDraft(log=self.log, seed=seed, max_len=max_len)
        self.planner = RoundPlanner(SpeculationPolicy(), draft_count, max_len, 8, drafting)
        self.lookup = Guesses(kind, self.log, seed, self.expected)

    async def run(self) -> list[Round]:
        """All rounds, which together say what the target alone says."""
        rounds = [
            each
            async for each in speculate(self.log, self.planner, self.target, self.draft, self.lookup)  # type: ignore[arg-type]
        ]
        assert self.log.tokens() == self.expected
        return rounds


@QUIET
@given(
    st.sampled_from(KINDS),
    st.integers(0, 8) | st.none(),
    st.integers(0, 999),
    st.integers(3, 90),
    st.sampled_from(
        [
            ALONE,
            Drafting((ANY_DRAFT, LOOKUP)),
            Drafting((OWN, ANY_DRAFT, LOOKUP)),
            MERGED,
            Drafting((DrafterId(makes=Makes.TREE), LOOKUP)),
            Drafting((DrafterId(makes=Makes.TREE), LOOKUP), TreeShape()),
        ]
    ),
)
async def test_tokens_equal_plain_decoding(
    kind: str, count: int | None, seed: int, max_len: int, drafting: Drafting
) -> None:
    """With any lookup, beside any drafters, chosen or merged."""
    await Request(kind, drafting, count, seed, max_len, "own" if OWN in drafting.drafters else "").run()


@pytest.mark.parametrize("drafting", [ALONE, MERGED])
async def test_an_oracle_is_believed(drafting: Drafting) -> None:
    """What is always right is proposed and accepted, and says that it was the lookup."""
    request = Request("oracle", drafting, None, 5, 200)
    rounds = await request.run()
    kept = [each for each in rounds if each.accepted_count]
    assert kept
    assert LOOKUP.name in {each.proposal.source(row) for each in kept for row in each.verdict.accepted_rows}


async def test_stretches_end_for_what_was_found() -> None:
    """An oracle that begins in the middle of a stretch halts it; a verdict that came too late counts as plain."""
    request = Request("oracle", ALONE, None, 8, 300)
    for row in request.target.model._rows:
        row[EOS] = 1e-12
    request.expected = request.lookup.expected = plain_decoding(request.target.model, PROMPT, 8, 300)
    look = request.lookup.look

    def from_forty(room: int, least: float) -> Look:
        return look(room, least) if len(request.log) % 80 >= 40 else Look()

    request.lookup.look = from_forty  # type: ignore[method-assign]
    rounds = await request.run()
    assert request.target.halts > 0
    late = [each for each in rounds if not each.draft_count]
    assert {each.origins for each in late} == {(TokenOrigin.PLAIN,)}
    assert sum(each.accepted_count for each in rounds) > 60


async def test_a_useless_lookup_is_soon_left_alone() -> None:
    """Guesses that are never right cost a few rounds, and then the real index says what they are worth."""
    request = Request("real", ALONE, None, 2, 400)
    rounds = await request.run()
    assert sum(each.draft_count > 0 for each in rounds) <= len(rounds)
    empty = Request("empty", ALONE, None, 2, 400)
    assert all(each.draft_count == 0 for each in await empty.run())
    assert empty.target.halts == 0
    assert empty.target.steps == 1


def test_a_lookup_that_lies_about_nothing_is_nothing() -> None:
    """Without a session there are no guesses, and no message for them."""
    nobody = LookupGuesses()
    assert nobody.look(10).tree == TokenTree()
    assert nobody.proposal(0) == Proposal()
