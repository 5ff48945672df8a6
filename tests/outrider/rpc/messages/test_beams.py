"""Beams as messages, and as trees whose first rows they are."""

import math

import pytest
from support.basics import spec_of

from outrider.beams import BeamSearch, BeamStep, BeamTree, Candidate, LiveBeam, plant, split
from outrider.errors import InvalidRequest
from outrider.rpc.messages.round import step_message, steps_from
from outrider.rpc.messages.session import live_beams_from, live_beams_message, open_message, search_spec_from
from outrider.token_tree import TokenTree
from outrider.v1 import types_pb2 as pb

LIVE = (LiveBeam((5, 6), -1.5), LiveBeam((5, 7), -2.25))
SIZE = 100


def test_what_is_written_is_read() -> None:
    assert live_beams_from(live_beams_message(2, LIVE), "beams", SIZE) == LIVE
    step = BeamStep((Candidate(1, 9, -2.5),), (Candidate(0, 0, -1.75), Candidate(1, 0, -3.5)))
    assert steps_from([step_message(step)]) == (step,)
    message = open_message(spec_of((1, 2, 3), 9, temperature=1.0), (1, 2, 3))
    assert search_spec_from(message, LIVE, 5, SIZE, ()).token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("width", "live", "field"),
    [
        (1, (), "beams.width"),
        (9, (), "beams.width"),
        (2, (*LIVE, LiveBeam((8, 9), -3.0)), "beams.beams"),
        (2, (LIVE[0], LiveBeam((5,), -1.0)), "beams.beams"),
        (2, (LiveBeam((), 0.0),), "beams.beams"),
        (2, (LiveBeam((5,), math.nan),), "beams.beams.0.score"),
        (2, (LiveBeam((SIZE,), -1.0),), "beams.beams.0"),
    ],
)
def test_beams_that_cannot_be_are_refused(width: int, live: tuple[LiveBeam, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        live_beams_from(live_beams_message(width, live), "beams", SIZE)
    assert refused.value.metadata["field"].startswith(field)


@pytest.mark.parametrize(
    ("change", "base_len", "field"),
    [
        (pb.OpenSession(rule=pb.ACCEPTANCE_RULE_TYPICAL), 5, "session.rule"),
        (pb.OpenSession(logprob_count=2), 5, "session.logprob_count"),
        (pb.OpenSession(sampling=pb.SamplingParameters(temperature=0.5)), 5, "session.sampling"),
        (pb.OpenSession(sampling=pb.SamplingParameters(top_k=3)), 5, "session.sampling"),
        (pb.OpenSession(max_len=5), 5, "session.max_len"),
        (pb.OpenSession(prompt_len=2), 5, "session.prompt_len"),
        (pb.OpenSession(), 6, "session.token_ids"),
    ],
)
def test_what_a_search_cannot_be_is_refused(change: pb.OpenSession, base_len: int, field: str) -> None:
    message = open_message(spec_of((1, 2, 3), 9, temperature=1.0), (1, 2, 3))
    message.MergeFrom(change)
    with pytest.raises(InvalidRequest) as refused:
        search_spec_from(message, LIVE, base_len, SIZE, ())
    assert refused.value.metadata["field"] == field


def test_guesses_are_found_behind_their_beams() -> None:
    proposal = plant([6, 7], [2, 1, 3, 3], [20, 21, 22, 23])
    assert split(proposal, [6, 7]) == [
        BeamTree(TokenTree((21,), (0,)), (4,)),
        BeamTree(TokenTree((20, 22, 23), (0, 1, 1)), (3, 5, 6)),
    ]
    assert split(TokenTree(), [6, 7]) == [BeamTree(TokenTree(), ())] * 2


@pytest.mark.parametrize(
    "proposal",
    [plant([6, 8], [1], [20]), TokenTree((6, 7, 20), (0, 0, 0)), TokenTree((6, 7), (0, 1)), plant([6], [], [])],
)
def test_a_proposal_for_other_beams_is_refused(proposal: TokenTree) -> None:
    with pytest.raises(InvalidRequest, match="proposal"):
        split(proposal, [6, 7])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"width": 1}, "width"),
        ({"width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"width": 2, "early_stopping": "later"}, "early_stopping"),
    ],
)
def test_a_search_has_limits(fields: dict, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"beam_search.{name}"):
        BeamSearch(**fields)
