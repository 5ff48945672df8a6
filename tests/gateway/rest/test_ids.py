"""Every answer has an id, refusals come at a pace, and an unexpected error says nothing."""

import json

import pytest
from support.network import turns_taken
from support.rest.echo import posted


async def test_refusals_take_turns_and_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks again as soon as it is refused gets no more than its pace."""
    turns = turns_taken(monkeypatch)
    assert (await posted(b"{}"))[0] == 200
    assert (await posted(b'"surprise"'))[0] == 500
    assert turns == []
    assert (await posted(b"{"))[0] == 400
    assert len(turns) == 1


async def test_what_nobody_expected_is_told_to_nobody() -> None:
    """500 with two words, in the shape of all errors."""
    status, told, _ = await posted(b'"surprise"')
    assert status == 500
    assert told["error"]["message"] == "internal error"
    assert "secret" not in json.dumps(told)


@pytest.mark.parametrize(
    ("given", "is_kept"), [("abc-1.2:3_Z", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_every_answer_has_an_id(given: str, is_kept: bool) -> None:
    """The client's own where it is short and plain, and a new one else."""
    _, _, headers = await posted(b"{}", **{"x-request-id": given})
    assert (headers["x-request-id"] == given) == is_kept
    assert headers["x-request-id"]
    assert headers["x-content-type-options"] == "nosniff"
