"""bench.surfaces: bursts and chunks become figures."""

import pytest

from bench.surfaces import GRPC, PAGE, REST, Heard, heard, render, token_ids_of


def test_what_has_no_tokens_is_no_burst() -> None:
    """Neither a role nor the end of an answer counts, and an answer without any tokens is a fault."""
    found = heard(iter([(1.0, []), (2.0, [7]), (2.5, []), (2.75, [8, 9]), (3.0, [])]))
    assert found.gaps_ms == [750]
    assert found.token_ids == [7, 8, 9]
    with pytest.raises(RuntimeError, match="without tokens"):
        heard(iter([(1.0, [])]))


def test_tokens_of_chunks_and_of_the_pages_rounds() -> None:
    """Each kind of event names them in its own way, or has none."""
    assert token_ids_of({"index": 0, "token_ids": [1, 2]}) == [1, 2]
    assert token_ids_of({"tokens": [{"token_id": 3, "text": "a"}]}) == [3]
    assert token_ids_of({"finish_reason": "stop"}) == []


def test_first_tokens_are_compared_within_a_turn() -> None:
    """A turn that was slow for all surfaces does not count as a difference between them."""
    late = {GRPC: [10.0, 20.0, 90.0], REST: [11.0, 21.0, 91.0], PAGE: [12.0, 22.0, 92.0]}
    answers = {way: [Heard(first_ms, [1.0], 100.0, [1]) for first_ms in times] for way, times in late.items()}
    text = render(answers, {"/live": [0.5, 0.7]})
    assert "| first tokens | 20.00 (15.00 to 55.00) | 21.00 (16.00 to 56.00) | 22.00 (17.00 to 57.00) |" in text
    assert "| 0.00 (0.00 to 0.00) | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) |" in text
    assert "| GET /live | 0.60 (0.55 to 0.65) |" in text
