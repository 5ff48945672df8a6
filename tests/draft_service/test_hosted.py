"""A draft service whose sessions guess with a drafter that is not its model."""

from collections.abc import Iterator

import pytest
from support.basics import spec_of
from support.drafting.last_token import LastToken
from support.drafting.toy_drafters import ToyDrafter, oracle
from support.services.stepped_draft import PROMPT, Draft

from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.token_tree import TreeShape

TOKENS = (*PROMPT, *range(20, 60))
SPEC = spec_of(PROMPT, 40)


@pytest.fixture
def toy() -> ToyDrafter:
    """Knows what comes; its proposals take two steps."""
    return ToyDrafter(oracle(TOKENS), steps=2)


@pytest.fixture
def draft(runner: ModelRunner, toy: ToyDrafter) -> Iterator[Draft]:
    made = Draft(runner, drafters=(toy, LastToken()))
    yield made
    made.table.clear()


def test_its_guesses_follow_the_tokens_that_were_committed(draft: Draft) -> None:
    """Opened, advanced, taken back and opened again; the session's model computes nothing."""
    draft.open(SPEC, 3, drafter="toy")
    assert draft.guesses() == TOKENS[5:8]
    draft.advance(1, 7, TOKENS[5:7], 2)
    assert draft.guesses() == TOKENS[7:9]
    draft.advance(2, 6, TOKENS[5:6], 4)
    assert draft.guesses() == TOKENS[6:10]
    draft.open(spec_of(TOKENS[:9], 40), 3, epoch=3, drafter="toy")
    assert draft.guesses() == TOKENS[9:12]
    assert draft.held.session.cached_len == 0
    # What it reports is what its drafter has read: a gateway would take less for drift, and have it read again.
    assert draft.held.cached_len == 9


def test_a_chain_drafter_is_asked_for_no_tree(draft: Draft) -> None:
    """Neither when a session is opened nor later, and the session stays what it was."""
    with pytest.raises(InvalidRequest, match=r"open\.shape is 'present', but must be absent for the drafter last"):
        draft.open(SPEC, 3, shape=TreeShape(max_depth=2), drafter="last")
    draft.open(SPEC, 3, drafter="last")
    assert draft.guesses() == (PROMPT[-1],) * 3
    with pytest.raises(InvalidRequest, match=r"advance\.shape"):
        draft.advance(1, 6, (9,), 3, shape=TreeShape(max_depth=2))
    draft.advance(1, 6, (9,), 3)
    assert draft.guesses() == (9,) * 3


def test_no_guess_lies_past_the_end(draft: Draft) -> None:
    """The last token of a request is the target's alone."""
    draft.open(spec_of(PROMPT, 8), 5, drafter="last")
    assert draft.guesses() == (PROMPT[-1],) * 2


def test_a_request_that_is_overtaken_is_answered_with_nothing(draft: Draft) -> None:
    """The gateway has moved on before the drafter was ready."""
    draft.open(SPEC, 3, drafter="toy")
    draft.advance(1, 6, TOKENS[5:6], 2)
    assert [answer.content.token_ids for answer in draft.run()] == [(), TOKENS[6:8]]


def test_sessions_of_the_model_are_beside_it(draft: Draft) -> None:
    """Two sessions of one service, each with its own drafter, in one step."""
    first = draft.session_id
    draft.open(SPEC, 3, drafter="last")
    draft.session_id = bytes(16)
    draft.open(SPEC, 3)
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    assert found[first].token_ids == (PROMPT[-1],) * 3
    assert len(found[bytes(16)]) == 3
