"""Drafters that guess from probes: rows of the target's forwards that are computed beside a proposal and never kept.

Probes stand after the last committed token, as a tree of their own, and change no bit of any other row.
What follows a probe is the model's own likeliest token, without noise, and serves the next proposal at the
earliest. So a proposal is a function of what each step of its session has committed before it, and of whether there was
room for the step's probes. A session that is opened again knows less, and proposes less.

Under `ratio` and `block` a guess is therefore drawn from the distribution that has one token: the target accepts it
with its own probability, and else draws from the rest. That is exact for every guess, and for every number of guesses,
none among them, in whose choice the uniforms of their own round have no part: given all earlier rounds, the round
commits tokens of the target's distribution, whatever was proposed. Earlier rounds may have any part in it, because the
noise of a position is used in one round only, the one that commits it. A position that is rolled back is drawn with the
same noise once more, so a session that goes back forgets all that was found.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from outrider.drafters.drafter import DrafterProposal, DrafterSession, GuessLimits
from outrider.engine.batching import Feed
from outrider.engine.models.decoder import ProbedDecoder
from outrider.engine.runner import ModelRunner, StepExtension
from outrider.engine.session import Session
from outrider.errors import CacheFull, InvalidRequest, ModelRefused
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree

LOOKAHEAD = "lookahead"
PASS = "pass"
MIN_DEPTH = 3
"""Least depth: with less there is no row to read the last token of the first column from."""


class Finder(Protocol):
    """Findings of probes for one session, since it was opened or went back."""

    def candidates(self, token_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        """Continuations of these tokens, the best first."""

    def probes(self, token_ids: Sequence[int]) -> TokenTree:
        """Rows to compute after these tokens."""

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes the likeliest token after each of the probes that it asked for last."""


class Lookahead:
    """Finds n-grams while it solves for the tokens ahead by Jacobi iteration.

    Fu, Bailis, Stoica and Zhang, "Break the sequential dependency of LLM inference using lookahead decoding", 2024,
    arXiv 2402.02057. Column i guesses the tokens from i places after the last committed one on. Of each it has the
    guesses of the last steps, the oldest first, and each of these was found after the one before. A forward finds one
    more token for every column, and whatever it finds goes into a pool, by its first token.
    """

    def __init__(self, window: int = 2, depth: int = 3, num_guesses: int = 4) -> None:
        """W columns of N-grams, N = depth, of which it keeps the last G = num_guesses of each first token.

        That makes W * (N - 1) - 1 probes. The authors have W = 7, N = 5 and more, for devices on which rows are free;
        the default is what pays on a CPU, where they are not (docs/heads.md). Raises InvalidRequest.
        """
        for name, value, minimum in (("window", window, 1), ("depth", depth, MIN_DEPTH), ("guesses", num_guesses, 1)):
            if value < minimum:
                raise InvalidRequest(f"lookahead.{name}", value, f"at least {minimum}")
        self._window, self._depth, self._num_guesses = window, depth, num_guesses
        self._columns: list[tuple[int, ...]] = []
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}

    def candidates(self, token_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        """Continuations of the last token wherever it was found, the newest first."""
        return list(reversed(self._pool.get(token_ids[-1], {})))

    def probes(self, token_ids: Sequence[int]) -> TokenTree:
        if not self._columns:
            # Jacobi iteration may begin with anything; parts of the text are at least of the right language.
            starts = [len(token_ids) * column // self._window for column in range(self._window)]
            offsets = range(self._depth - 1)
            self._columns = [tuple(token_ids[(start + each) % len(token_ids)] for each in offsets) for start in starts]
        # The first column begins with what is known.
        self._columns[0] = (token_ids[-1], *self._columns[0][1:])
        # The oldest guesses are a chain after the last token, and each begins a chain of its own.
        probed, parents = [column[0] for column in self._columns[1:]], list(range(self._window - 1))
        for parent, column in enumerate(self._columns):
            parents += [parent, *range(len(probed) + 1, len(probed) + self._depth - 2)]
            probed += column[1:]
        return TokenTree(tuple(probed), tuple(parents))

    def learn(self, token_ids: Sequence[int]) -> None:
        # Each column's last row; the rows of the first one follow the chain of the others.
        ends = range(self._window + self._depth - 4, len(token_ids), self._depth - 2)
        for column, end in enumerate(ends):
            first, *rest = (*self._columns[column], token_ids[end])
            found = self._pool.setdefault(first, {})
            found.pop(tuple(rest), None)
            found[tuple(rest)] = None
            if len(found) > self._num_guesses:
                del found[next(iter(found))]
            self._columns[column] = tuple(rest)


class PassChain:
    """Reads guesses after embeddings that were trained to stand for tokens that are not known yet.

    Monea, Joulin and Grave, "PaSS: parallel speculative sampling", 2023, arXiv 2311.13581. Probe i is i places
    after the last committed token, and finds the one that follows there. What a forward has found serves the next
    round: all of it if that forward has committed its one token, and what is left of it where it has committed just
    what its first probes had found; else there is no guess.
    """

    def __init__(self, probe_ids: Sequence[int]) -> None:
        """`probe_ids` are those of the embeddings; see embed_probes."""
        self._chain = TokenTree.chain(probe_ids)
        self._found: Sequence[int] = ()
        self._base_len = 0

    def candidates(self, token_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        # The forward's own token is for the place at base_len, and the first probe's for the one after it.
        committed = token_ids[self._base_len + 1 :]
        is_right = list(self._found[: len(committed)]) == list(committed)
        return [self._found[len(committed) :]] if is_right and len(self._found) > len(committed) else []

    def probes(self, token_ids: Sequence[int]) -> TokenTree:
        self._found, self._base_len = (), len(token_ids)
        return self._chain

    def learn(self, token_ids: Sequence[int]) -> None:
        self._found = token_ids


def embed_probes(target: ModelRunner, rows: Tensor) -> range:
    """Embeds rows [L, H], which nothing but probes may name, and returns the ids that these have from now on.

    Raises ModelRefused for a model that embeds no others than its own.
    """
    name, model = target.identity.model_name, target.model
    if not isinstance(model, ProbedDecoder):
        raise ModelRefused(f"{name} cannot embed probes", model=name)
    first = len(model.embedding)
    model.embed_more(rows)
    return range(first, len(model.embedding))


class ProbeRows(StepExtension):
    """Adds probes to a target's forwards, wherever rows and blocks are left, and hands on what they find."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.drafts: WeakKeyDictionary[Session, ProbeDraft] = WeakKeyDictionary()
        """Drafts whose probes the next forward is to compute that finishes their session's feed."""

    def extend(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        return [self._extended(feed) for feed in feeds] if self.drafts else feeds

    def _extended(self, feed: Feed) -> Feed:
        draft = self.drafts.get(feed.session)
        if draft is None or not draft.probes:
            return feed
        tree, probes = feed.tree, draft.probes
        parents = tuple(parent and parent + len(tree) for parent in probes.parents)
        extended = feed._replace(tree=TokenTree(tree.token_ids + probes.token_ids, tree.parents + parents))
        # Where there is no room they are left out: guesses are worth no other session's place.
        with suppress(CacheFull):
            if extended.num_proposed < self.runner.max_rows:
                feed.session.reserve(extended.num_proposed, extended.start)
                return extended
        draft.probes = EMPTY
        return feed

    def take(self, feeds: Sequence[Feed], logits: Tensor, ranges: list[range | None]) -> None:
        for number, feed in enumerate(feeds) if self.drafts else ():
            rows, end = ranges[number], len(feed.depths)
            if rows is not None and len(rows) > end:
                draft = self.drafts.pop(feed.session)
                found = logits[rows.start + end : rows.stop, : self.runner.vocabulary_size]
                draft.probes, draft.found = EMPTY, found.argmax(1)
                ranges[number] = rows[:end]


class ProbeDraft(DrafterSession):
    """A session of such a drafter: what it has found becomes a proposal at once, without a step of its own."""

    def __init__(self, spec: SessionSpec, new_finder: Callable[[], Finder], rows: ProbeRows) -> None:
        DrafterSession.__init__(self)
        self.probes: TokenTree = EMPTY
        """Rows that the target's next forward is to compute after the committed tokens, beside the proposal."""
        self.found: Tensor | None = None
        """The likeliest token after each probe, to be learnt from when the step that computed them can fail no more."""
        self._spec = spec
        self._new_finder = new_finder
        self._finder = new_finder()
        self._rows = rows

    @property
    def num_rows_beside(self) -> int:
        return len(self.probes)

    def propose(self, session: Session, limits: GuessLimits) -> None:
        finder, token_ids = self.learn(), session.token_ids
        candidates = finder.candidates(token_ids) if limits.draft_count else ()
        # The best as a chain where the rule tests with distributions, else as many as there are rows for.
        needs_laws = self._spec.acceptance.rule.needs_distributions
        rows: dict[tuple[int, int], int] = {}
        for candidate in candidates[:1] if needs_laws else candidates:
            parent = 0
            for token_id in candidate:
                place = parent, token_id
                if place not in rows and len(rows) == limits.draft_count:
                    break
                parent = rows.setdefault(place, len(rows) + 1)
        guesses = tuple(token_id for _, token_id in rows)
        tree = TokenTree(
            guesses,
            tuple(parent for parent, _ in rows),
            tuple(DraftDistribution((token_id,), (1,)) for token_id in guesses) if needs_laws else (),
            # The distribution that has one token gives it the logarithm 0.
            (0.0,) * len(rows) if self._spec.draft_logprobs else (),
        )
        self.proposal = DrafterProposal(tree, ComputeTimes(), 0)
        probes = finder.probes(token_ids)
        # No row may stand past the end of the request; so near to it little is left to guess.
        fits = len(token_ids) + max(probes.depths) <= min(self._spec.max_len, self._rows.runner.context_len)
        self.probes = probes if fits else EMPTY
        if fits:
            self._rows.drafts[session] = self

    def learn(self) -> Finder:
        """The finder, which has learnt what the last probes found."""
        if self.found is not None:
            self._finder.learn(self.found.tolist())
            self.found = None
        return self._finder

    def truncate(self, length: int) -> None:
        # What was found since may know the noise of the places that are drawn once more.
        self.free()

    def free(self) -> None:
        DrafterSession.free(self)
        self.probes, self.found = EMPTY, None
        self._finder = self._new_finder()


class ProbeDrafter:
    """The drafter of all sessions whose finders are of one kind."""

    rules = frozenset(Rule)
    makes_trees = False
    runner = None

    def __init__(self, target: ModelRunner, name: str, new_finder: Callable[[], Finder]) -> None:
        self.name = name
        self._new_finder = new_finder
        self._rows = ProbeRows.in_forwards_of(target)

    def open(self, spec: SessionSpec, salt: bytes | None) -> ProbeDraft:
        return ProbeDraft(spec, self._new_finder, self._rows)

    def advance(self, sessions: Sequence[ProbeDraft]) -> None:
        """Does nothing: a proposal is there as soon as it is asked for."""
