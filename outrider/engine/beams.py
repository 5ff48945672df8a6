"""The live beams of one request: sessions forked from one, the trunk, which holds the prompt.

Beams that begin alike share blocks, and the one that writes first gets a copy (Kwon et al., 2023). The trunk is kept,
so that beams which have lost their caches read the prompt once for all of them. Belongs to the device thread.
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.beams import Candidate, LiveBeam
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, rows_of, scores_behind
from outrider.engine.session import Session

Place = tuple[int, int]
"""A beam, and a row of its tree or the root."""


class Beams:
    """Beams in order; none before the first step, whose one beam is the trunk."""

    def __init__(self, trunk: Session) -> None:
        self.trunk = trunk
        self.sessions: list[Session] = []
        self.scores: list[float] = []
        self.parents: list[Session] = []
        """Earlier beams that are kept beside these."""
        self._ended_len = 0

    @property
    def all_sessions(self) -> tuple[Session, ...]:
        """Sessions that hold blocks for the request."""
        return (self.trunk, *self.parents, *self.sessions)

    @property
    def length(self) -> int:
        """Tokens of each beam, the prompt included."""
        return len(self.sessions[0]) if self.sessions else self._ended_len or len(self.trunk)

    @property
    def cached_len(self) -> int:
        """Number of these tokens that every beam has cached; all where none is left."""
        if self._ended_len:
            return self._ended_len
        return min(session.cached_len for session in self.sessions or [self.trunk])

    @property
    def last_token_ids(self) -> list[int]:
        """Last token of each beam, or of the trunk while there is none."""
        return [session.token_ids[-1] for session in self.sessions or [self.trunk]]

    @property
    def next_sessions(self) -> list[Session]:
        """Sessions that the next forward feeds: the beams, or the trunk while the prompt has to be read.

        Beams without a cache take what the trunk has. All have waited as long as the one that waited longest: rows are
        granted to the session that waited (outrider.engine.sharing), and those of some beams alone lead nowhere.
        """
        if self.trunk.cached_len < len(self.trunk) or not self.sessions:
            return [self.trunk]
        for place, session in enumerate(self.sessions):
            if session.cached_len < len(self.trunk):
                self.sessions[place] = self._rooted(self.trunk, session.token_ids)
                session.free()
        last_forward = min(session.last_forward for session in self.sessions)
        for session in self.sessions:
            session.last_forward = last_forward
        return self.sessions

    def become(self, live: Sequence[LiveBeam]) -> None:
        """Makes these the live beams; each takes over what any session has cached of its beginning."""
        prompt, before = self.trunk.token_ids, list(self.all_sessions)
        sessions = []
        for beam in live:
            token_ids = [*prompt, *beam.token_ids]
            sessions.append(self._rooted(max(before, key=lambda each: _common(each, token_ids)), token_ids))
        self.free_beams()
        self.sessions, self.scores = sessions, [beam.score for beam in live]

    def step(self, places: Sequence[Place], chosen: Sequence[Candidate], *, keep_parents: bool = False) -> None:
        """Makes beams of candidates: each goes on from the place of its parent, with its token appended.

        The last forward fed what `places` are about. Beams from which none goes on are freed; with keep_parents all
        stay, beside the new ones, until the next `become`.
        """
        before, scores = self.sessions or [self.trunk], [each.score for each in chosen]
        origins = [places[each.parent] for each in chosen]
        # The last one that goes on from a beam takes it over, when the others have what they need of it.
        heirs = {} if keep_parents or not self.sessions else {beam: place for place, (beam, _) in enumerate(origins)}
        sessions = []
        for place, (beam, row) in enumerate(origins):
            path = before[beam].tree.path(row)
            if heirs.get(beam) == place:
                before[beam].keep_with_room(path)
                sessions.append(before[beam])
            else:
                sessions.append(before[beam].fork(path))
            sessions[-1].extend([chosen[place].token_id])
        if keep_parents:
            self.parents += self.sessions
        else:
            for beam, session in enumerate(self.sessions):
                if beam not in heirs:
                    session.free()
        self.sessions, self.scores = sessions, scores

    def free_beams(self) -> None:
        """Ends all beams; the trunk stays."""
        for session in (*self.parents, *self.sessions):
            session.free()
        self.parents, self.sessions, self.scores, self._ended_len = [], [], [], 0

    def end(self, length: int) -> None:
        """Ends every sequence, at this length."""
        self.free_beams()
        self._ended_len = length

    def _rooted(self, donor: Session, token_ids: Sequence[int]) -> Session:
        session = donor.fork()
        session.replace_tail(len(self.trunk), token_ids[len(self.trunk) :])
        return session


def beam_logprobs(
    runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput], ranges: Sequence[range]
) -> tuple[Tensor, list[int]]:
    """Log-probabilities [R, V] float32 after all rows of all inputs, after the request's edits of single tokens.

    Also where in them each input's begin. Edits come before the softmax, so that they sum to 1.
    """
    starts = [0]
    for rows in ranges:
        starts.append(starts[-1] + len(rows))
    return scores_behind(runner, rows_of(logits, ranges), inputs).log_softmax(dim=-1), starts[:-1]


def _common(session: Session, token_ids: Sequence[int]) -> int:
    """Number of leading tokens of a sequence that a session has cached."""
    pairs = zip(session.token_ids[: session.cached_len], token_ids, strict=False)
    return next(
        (place for place, (own, other) in enumerate(pairs) if own != other), min(session.cached_len, len(token_ids))
    )
