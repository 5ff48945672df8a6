"""A model some layers at a time: the lower ones as a model that guesses, and a forward that goes on from them.

Elhoushi et al., 2024, "LayerSkip", arXiv 2404.16710. The lower layers of a row are computed once: where it was guessed.
Guesses lie in the slots after the target's own tokens, where the rows of the next forward will.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import pairwise, takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.decoder import Decoder, LayeredDecoder
from outrider.engine.ops import Weight
from outrider.engine.runner import Compute, ForwardCounts, ModelRunner, StepExtension
from outrider.engine.sampling.transforms import index
from outrider.engine.session import Session
from outrider.errors import ModelRefused
from outrider.token_tree import EMPTY


class LowerLayers(Decoder):
    """The first layers of a model over its cache, then its own final norm and matrix, or no logits."""

    def __init__(self, model: LayeredDecoder, num_layers: int, *, has_logits: bool) -> None:
        self.config, self.ops, self.embedding = model.config, model.ops, model.embedding
        self._model = model
        self._layers = range(num_layers)
        self._has_logits = has_logits

    @property
    def weights(self) -> Sequence[Weight]:
        return ()

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        return self._model.forward_layers(plan, cache, wanted if self._has_logits else wanted[:0], self._layers)


def resume(model: LayeredDecoder, starts: Sequence[int], plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
    """A whole forward of rows of which row r has been computed up to boundary starts[r]; logits as of forward.

    The cache taps each of these boundaries but 0, and holds what is tapped there in the slots of those rows.
    """
    edges = sorted(set(starts))
    for first, last in pairwise(edges):
        rows = index([row for row, start in enumerate(starts) if start <= first], plan.slots)
        model.forward_layers(plan.select(rows), cache, wanted[:0], range(first, last))
    return model.forward_layers(plan, cache, wanted, range(edges[-1], model.config.num_layers))


def lower_runner(target: ModelRunner, num_layers: int, *, has_logits: bool = True) -> ModelRunner:
    """A runner of the first layers with the same cache, where their keys and values are the target's own.

    It lets the target store what leaves them; see ModelRunner.tap. Logits are what the final norm and the output matrix
    make of that, where there are any. Raises ModelRefused for a model that cannot be computed layer by layer, or that
    has no more layers.
    """
    name, most = target.identity.model_name, target.config.num_layers - 1
    if not isinstance(target.model, LayeredDecoder):
        raise ModelRefused(f"{name} cannot be computed layer by layer, and so has no exit layer", model=name)
    if not 1 <= num_layers <= most:
        message = f"{name}: the exit layer is {num_layers}, but must be in [1, {most}]"
        raise ModelRefused(message, exit_layer=num_layers)
    target.tap((num_layers,))
    lower = copy(target)
    lower.model = LowerLayers(target.model, num_layers, has_logits=has_logits)
    lower.extensions, lower.forward_counts = [], ForwardCounts()
    return lower


def session_ahead(session: Session, num_rows: int) -> Session:
    """A session of the same tokens and blocks, with room for so many guesses where a tree's rows would lie.

    It may be extended, and its rows computed; never truncated or freed, because the blocks are not its own. What lay
    after the tokens is dropped. Raises CacheFull.
    """
    session.advance(session.cached_len, EMPTY)
    session.reserve(num_rows)
    ahead = Session(session.table, session.token_ids, min(session.prompt_len, len(session)))
    ahead.cached_len = session.next_position
    return ahead


class LowerRows(NamedTuple):
    """Rows from a session's last token on, each after the one before, of which a drafter has computed lower layers.

    They lie where the session's own rows will, as provisional as a tree's: any change of the session ends them.
    """

    token_ids: tuple[int, ...]
    boundary: int
    """The first layer that is left; what enters it lies in the rows' slots (KVCache.taps)."""
    revision: int
    """Revision of the session after which they were computed."""


NO_ROWS = LowerRows((), 0, 0)


class BegunRows(StepExtension):
    """Takes part in a target's forwards, which go on where the lower layers of a row have been computed already."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._rows: WeakKeyDictionary[Session, LowerRows] = WeakKeyDictionary()

    def add(self, session: Session, ahead: Session, boundary: int) -> None:
        """Lets a session's next forward go on where those rows have ended that lie ahead of it."""
        token_ids = tuple(ahead.token_ids[len(session) - 1 : ahead.cached_len])
        self._rows[session] = LowerRows(token_ids, boundary, session.revision)

    def of(self, session: Session) -> LowerRows:
        """Rows that the session's next forward need not begin anew."""
        rows = self._rows.get(session, NO_ROWS)
        return rows if rows.revision == session.revision else NO_ROWS

    def compute(self, feeds: Sequence[Feed], grants: Sequence[int]) -> Compute | None:
        model = self.runner.model
        # Bits of a row would depend on who else is there, where they do so anyway.
        if not (self.runner.is_row_invariant and isinstance(model, LayeredDecoder)):
            return None
        if not any(self.of(feed.session).token_ids for feed in feeds):
            return None
        return partial(resume, model, self.starts(feeds, grants))

    def starts(self, feeds: Sequence[Feed], grants: Sequence[int]) -> list[int]:
        """The boundary at which each row of a forward begins, 0 where nothing of it is computed."""
        found: list[int] = []
        for feed, grant in zip(feeds, grants, strict=True):
            first = feed.session.next_position
            token_ids = feed.session.token_ids[first : first + grant]
            # Guesses were a chain, and rows of a tree lie elsewhere.
            token_ids += feed.tree.token_ids[: grant - len(token_ids)] if feed.tree.is_chain else ()
            rows = self.of(feed.session)
            begun = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, rows.token_ids, strict=False))
            num_begun = len(list(begun))
            found += [rows.boundary] * num_begun + [0] * (grant - num_begun)
        return found
