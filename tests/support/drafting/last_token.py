"""The simplest drafter there is: the last token comes again. All that a drafter without a model needs."""

from collections.abc import Sequence

from outrider.drafters.drafter import DrafterProposal, DrafterSession, GuessLimits
from outrider.engine.session import Session
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.token_tree import TokenTree


class LastTokenSession(DrafterSession):
    """A session's part: nothing is kept."""

    def __init__(self, spec: SessionSpec) -> None:
        DrafterSession.__init__(self)
        self._spec = spec

    def propose(self, session: Session, limits: GuessLimits) -> None:
        token_id, count = session.token_ids[-1], limits.draft_count
        # Certain of itself: the distribution has one token, whose probability has the logarithm 0.
        certain = [DraftDistribution((token_id,), (1,))] if self._spec.acceptance.rule.needs_distributions else []
        logprobs = [0.0] * count if self._spec.draft_logprobs else []
        self.proposal = DrafterProposal(
            TokenTree.chain([token_id] * count, certain * count, logprobs), ComputeTimes(), 0
        )

    def truncate(self, length: int) -> None:
        self.free()


class LastToken:
    """Proposes the last token again, as often as is asked for."""

    name = "last"
    rules = frozenset(Rule)
    makes_trees = False
    runner = None

    def open(self, spec: SessionSpec, salt: bytes | None) -> LastTokenSession:
        return LastTokenSession(spec)

    def advance(self, sessions: Sequence[LastTokenSession]) -> None:
        """Does nothing: a proposal is there as soon as it is asked for."""
