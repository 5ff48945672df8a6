"""Beam search as all processes speak of it: what is wanted, live beams, the steps of a search, and proposals for them.

Speculation with beams (Leviathan et al., 2023, arXiv 2211.17192, appendix A.4): a draft searches a few steps ahead with
more beams than are wanted. The target computes all its rows in one forward and makes each step from its own rows only;
as long as every beam that a step keeps was proposed, the next step needs no other forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from outrider.errors import InvalidRequest
from outrider.token_tree import TokenTree

MIN_WIDTH, MAX_WIDTH = 2, 8
MAX_LENGTH_PENALTY = 10.0
# Slots that a beam may need beside its own tokens: its copies of blocks that it shares only in part.
BEAM_SLACK = 32

EarlyStopping = Literal["heuristic", "first", "never"]
EARLY_STOPPING = get_args(EarlyStopping)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The beams of a request, as transformers' generate takes them.

    early_stopping: "first" ends with as many finished sequences as beams (True there), "heuristic" when the best live
    beam could not improve them if it ended now (False), "never" when it could not at any length ("never").
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"

    def __post_init__(self) -> None:
        if not MIN_WIDTH <= self.width <= MAX_WIDTH:
            raise InvalidRequest("beam_search.width", self.width, f"between {MIN_WIDTH} and {MAX_WIDTH}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limit = f"between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            raise InvalidRequest("beam_search.length_penalty", self.length_penalty, limit)
        if self.early_stopping not in EARLY_STOPPING:
            limit = f"one of {', '.join(EARLY_STOPPING)}"
            raise InvalidRequest("beam_search.early_stopping", self.early_stopping, limit)


class LiveBeam(NamedTuple):
    """A sequence that goes on: its tokens after the prompt, and the sum of their log-probabilities in float32."""

    token_ids: tuple[int, ...]
    score: float


class Candidate(NamedTuple):
    """A beam with one more token: the place of the beam among the live ones before, the token, and the new sum."""

    parent: int
    token_id: int
    score: float


class BeamStep(NamedTuple):
    """One step of a search, best first: the beams that go on, and those that end with this token."""

    live: tuple[Candidate, ...]
    ended: tuple[Candidate, ...] = ()


class BeamTree(NamedTuple):
    """Guesses after one beam; row r of the tree is row rows[r - 1] of the proposal."""

    tree: TokenTree
    rows: tuple[int, ...]


def plant(last_token_ids: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]) -> TokenTree:
    """A proposal for beams: its first rows are the beams' last tokens, and guesses follow, by their parents' rows."""
    return TokenTree((*last_token_ids, *token_ids), (*(0 for _ in last_token_ids), *parents))


def split(proposal: TokenTree, last_token_ids: Sequence[int]) -> list[BeamTree]:
    """Guesses after each beam, whose last tokens are the proposal's first rows; an empty one guesses nothing.

    Raises InvalidRequest about a proposal that is not for these beams.
    """
    num_beams = len(last_token_ids)
    if not proposal:
        return [BeamTree(TokenTree(), ()) for _ in last_token_ids]
    if proposal.token_ids[:num_beams] != tuple(last_token_ids):
        raise InvalidRequest(
            "proposal.token_ids", list(proposal.token_ids[:num_beams]), "begun by the beams' last tokens"
        )
    if any(proposal.parents[:num_beams]) or not all(proposal.parents[num_beams:]):
        raise InvalidRequest(
            "proposal.parents", list(proposal.parents), f"0 for the {num_beams} beams and no other row"
        )
    places = [(beam, 0) for beam in range(num_beams)]
    rows: list[list[int]] = [[] for _ in last_token_ids]
    parents: list[list[int]] = [[] for _ in last_token_ids]
    for row in range(num_beams + 1, len(proposal) + 1):
        beam, parent = places[proposal.parents[row - 1] - 1]
        rows[beam].append(row)
        parents[beam].append(parent)
        places.append((beam, len(rows[beam])))
    return [
        BeamTree(TokenTree(tuple(proposal.token_ids[row - 1] for row in own), tuple(above)), tuple(own))
        for own, above in zip(rows, parents, strict=True)
    ]


def cache_tokens(prompt_len: int, max_len: int, width: int) -> int:
    """Tokens of a key-value cache that a search may need at most, where its beams share nothing but the prompt."""
    return prompt_len + BEAM_SLACK + width * (max_len - prompt_len + BEAM_SLACK)
