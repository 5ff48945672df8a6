"""A language model of twelve words that fits into memory and has real draws, with sessions that serve it in process.

Under the rule `match` a token is a function of (weights, prefix, seed). So these sessions can be compared token for
token with plain decoding, whatever the draft guesses and however it fails.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from gateway.rounds.planner import DraftOutlook
from gateway.rounds.round import (
    NO_REQUEST,
    NOTHING,
    DrafterId,
    FallbackReason,
    GuessRequest,
    HopCost,
    Place,
    Proposal,
    Round,
    TokenLog,
    TokenOrigin,
    Verdict,
)
from outrider.parameters import FinishReason
from outrider.token_tree import TokenTree

NUM_TOKENS = 12
EOS = 0


class MarkovModel:
    """The next token depends on the last one; weights are random, and noise pulls them away from another model's."""

    def __init__(self, seed: int = 1, noise: float = 0.0) -> None:
        base, other = random.Random(seed), random.Random(seed + 1)
        self._rows = [
            [base.random() ** 3 + noise * other.random() for _ in range(NUM_TOKENS)] for _ in range(NUM_TOKENS)
        ]
        for row in self._rows:
            row[EOS] = 0.02

    def draw(self, prefix: Sequence[int], seed: int) -> int:
        """The token after a prefix; the same numbers decide for every model, as the shared noise of `match` does."""
        noise = random.Random(f"{seed} {len(prefix)}")
        race = [noise.expovariate(weight) for weight in self._rows[prefix[-1]]]
        return race.index(min(race))

    def logprob(self, last: int, token_id: int) -> float:
        """The log-probability of a token after another one."""
        return math.log(self._rows[last][token_id] / sum(self._rows[last]))


def plain_decoding(model: MarkovModel, prompt: tuple[int, ...], seed: int, max_len: int) -> tuple[int, ...]:
    """What the model alone would have said, prompt included."""
    token_ids = list(prompt)
    while len(token_ids) < max_len and (len(token_ids) == len(prompt) or token_ids[-1] != EOS):
        token_ids.append(model.draw(token_ids, seed))
    return tuple(token_ids)


@dataclass
class Session:
    """What both sessions have in common: a context that can be entered and left once."""

    closed: bool = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True


@dataclass
class MarkovTarget(Session):
    """Verifies by drawing, row by row, and goes on alone within its budget, with guesses of its own where asked for.

    It guesses with `own_model` if it has a drafter; at the lengths in `bare` it has none.
    """

    model: MarkovModel = field(default_factory=MarkovModel)
    log: TokenLog = field(default_factory=lambda: TokenLog((1,)))
    seed: int = 0
    max_len: int = 64
    steps: int = 0
    acknowledged: int = 0
    limit: int = 0
    own: str = ""
    own_model: MarkovModel = field(default_factory=lambda: MarkovModel(noise=0.3))
    own_asked: GuessRequest = NO_REQUEST
    bare: frozenset[int] = frozenset()
    halts: int = 0
    went_on: bool = False
    takes_branches: bool = True

    @property
    def drafter(self) -> str:
        """The drafter in its process, at this length."""
        return "" if len(self.log) in self.bare else self.own

    @property
    def outstanding(self) -> int:
        """Tokens that may still come unasked."""
        return max(0, min(self.limit, self.max_len) - len(self.log))

    async def verify(self, proposal: Proposal, plain_budget: int, own: GuessRequest = NO_REQUEST) -> Verdict:
        """Follows the tree along the target's own draws.

        A proposal on top of unasked tokens ends these, but half of the time the target has the next one already.
        """
        if proposal.tree and self.outstanding:
            self.halts += 1
            is_late = random.Random(f"{self.seed} {len(self.log)}").random() < 0.5
            self.limit = len(self.log) + (2 if is_late else 0)
            if is_late:
                return self._walk(NOTHING)
        asked = not self.outstanding
        if plain_budget or asked:
            self.own_asked = own if self.drafter else NO_REQUEST
        assert len(self.log) + max(proposal.tree.depths) < self.max_len
        if self.outstanding:
            self.acknowledged += plain_budget > 0 and self.limit < self.max_len
        else:
            self.steps += 1
        if plain_budget or not self.outstanding:
            self.limit = len(self.log) + 1 + plain_budget
        guessed = None if proposal.tree else self._guess(asked)
        verdict = self._walk(guessed or proposal)
        verdict.own = guessed
        return verdict

    def _guess(self, asked: bool) -> Proposal | None:
        end = self.max_len if asked else min(self.limit, self.max_len)
        count = min(self.own_asked.count, end - len(self.log) - 1)
        if count < 1 or len(self.log) == self.log.prompt_len:
            return None
        prefix = list(self.log.tokens())
        for _ in range(count):
            prefix.append(self.own_model.draw(prefix, self.seed))
        guesses = prefix[len(self.log) :]
        tree = TokenTree.chain(guesses)
        if self.own_asked.shape is not None:
            # Every second row stands aside.
            rows = [(guesses[row // 2] + row % 2, max(row - row % 2 - 1, 0)) for row in range(count)]
            values = tuple(0.8 ** (1 + row // 2) * (0.2 if row % 2 else 1.0) for row in range(count))
            tree = TokenTree(*zip(*rows, strict=True), values=values)
        return Proposal(
            tree, compute_us=10 * count, forward_count=count, row_count=count, drafter=DrafterId(self.own, Place.HOSTED)
        )

    def _walk(self, proposal: Proposal) -> Verdict:
        prefix, rows, row = list(self.log.tokens()), [], 0
        while True:
            token_id = self.model.draw(prefix, self.seed)
            prefix.append(token_id)
            finish = self._finish(prefix)
            children = proposal.tree.children(row)
            hits = [child for child in children if proposal.tree.token_ids[child - 1] == token_id]
            if not hits:
                return Verdict(len(self.log), tuple(rows), token_id, finish, len(rows) + bool(children))
            row = hits[0]
            rows.append(row)
            if finish:
                return Verdict(len(self.log), tuple(rows), None, finish, len(rows))

    def _finish(self, prefix: list[int]) -> FinishReason | None:
        if prefix[-1] == EOS:
            return FinishReason.EOS
        return FinishReason.LENGTH if len(prefix) == self.max_len else None


@dataclass
class MarkovDraft(Session):
    """Guesses with its own model and the shared noise; `faults` names the answers, counted from 1, that fail."""

    model: MarkovModel = field(default_factory=lambda: MarkovModel(noise=0.3))
    log: TokenLog = field(default_factory=lambda: TokenLog((1,)))
    seed: int = 0
    faults: dict[int, FallbackReason] = field(default_factory=dict)
    away: frozenset[int] = frozenset()  # committed lengths at which the draft is absent
    context_len: int | None = None
    max_draft_count: int | None = 8
    branching: bool = False
    max_len: int = 1 << 30  # of the request: a tree is as deep as there is room
    asked: list[int] = field(default_factory=list)

    @property
    def outlook(self) -> DraftOutlook:
        """Absent at the lengths that the test wants."""
        obstacle = FallbackReason.DRAFT_ABSENT if len(self.log) in self.away else None
        return DraftOutlook(obstacle, self.context_len, self.max_draft_count)

    async def propose(self, asked: GuessRequest) -> Proposal:
        """A chain of guesses, or with `branching` a tree that carries a wrong sibling before each of them."""
        draft_count = asked.count
        if draft_count == 0:
            return NOTHING
        self.asked.append(draft_count)
        if (fault := self.faults.get(len(self.asked))) is not None:
            return Proposal(fallback_reason=fault)
        prefix = list(self.log.tokens())
        for _ in range(min(draft_count, self.max_len - len(prefix) - 1)):
            prefix.append(self.model.draw(prefix, self.seed))
        guesses = prefix[len(self.log) :]
        if self.branching:
            return Proposal(branching_tree(guesses))
        return Proposal(TokenTree.chain(guesses), compute_us=10 * draft_count)


def branching_tree(guesses: Sequence[int]) -> TokenTree:
    """A tree with a wrong sibling before each guess; a guess has three times the value of its sibling."""
    token_ids, parents, values, parent = list[int](), list[int](), list[float](), 0
    for depth, guess in enumerate(guesses):
        token_ids += [(guess + 1) % NUM_TOKENS, guess]
        parents += [parent, parent]
        values += [0.25 * 0.75**depth, 0.75 * 0.75**depth]
        parent = len(token_ids)
    return TokenTree(tuple(token_ids), tuple(parents), values=tuple(values))


def round_of(
    token_ids: Sequence[int],
    origins: Sequence[TokenOrigin],
    *,
    draft_count: int = 0,
    accepted_count: int = 0,
    evaluated_count: int = 0,
    fallback_reason: FallbackReason | None = None,
    finish_reason: FinishReason | None = None,
    draft_compute_us: int = 0,
    verify_compute_us: int = 0,
    draft_hop: HopCost | None = None,
    verify_hop: HopCost | None = None,
    round_us: int = 0,
    gap_us: int = 0,
    is_first: bool = False,
) -> Round:
    """A round on top of five tokens, in which the first tokens of a chain were accepted."""
    guesses = TokenTree.chain((1,) * draft_count)
    rows = tuple(range(1, accepted_count + 1))
    proposal = Proposal(guesses, fallback_reason, draft_compute_us, hop=draft_hop or HopCost())
    hop = verify_hop or HopCost()
    verdict = Verdict(5, rows, None, finish_reason, evaluated_count, verify_compute_us, numerics_id="numerics", hop=hop)
    return Round(proposal, verdict, tuple(token_ids), tuple(origins), round_us, gap_us, is_first)


def merged_round() -> Round:
    """A tree of three drafters' guesses, of which a path along a side branch was accepted."""
    tree = TokenTree((50, 60, 61, 70, 71), (0, 0, 1, 2, 2), values=(0.625, 0.25, 0.5, 0.125, 0.0625))
    proposal = Proposal(tree, sources=("model", "lookup", "model", "prediction", "prediction"))
    verdict = Verdict(5, (2, 4), 80, None, 2, numerics_id="numerics")
    return Round(proposal, verdict, (60, 70, 80), (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.BONUS))
