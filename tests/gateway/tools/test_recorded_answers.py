"""Recorded answers of the families that are served are read as their authors say, however they are cut."""

import pytest
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent
from support.requests.recorded_answers import FAMILIES, Piece, pieces_of, read

FIXTURES = load_fixtures(families=FAMILIES)
STRATEGIES = (*DEFAULT_STRATEGIES, ChunkStrategy.parse("char:1"))


def test_all_families_are_recorded() -> None:
    """The suite has the answers that it is said to have."""
    assert len(FIXTURES) == 185


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda each: each.id)
def test_recorded_answers_are_read_alike_in_every_cutting(fixture: Fixture) -> None:
    """Whole, by special tokens, by tokens, by groups of tokens and by characters."""
    pieces = pieces_of(fixture)
    assert "".join(each.text for each in pieces) == fixture.raw_output
    whole, _ = read(fixture, [pieces])
    # Of white space a suite of several engines does not demand all.
    assert_conforms(fixture, whole, soft=True)
    for strategy in STRATEGIES:
        units = pieces if strategy.kind != "char" else [each for piece in pieces for each in characters(piece)]
        groups = split(units, strategy, special={each for each in units if each.is_special})
        cut, _ = read(fixture, groups)
        assert_equivalent(whole, cut)


def characters(piece: Piece) -> list[Piece]:
    """A token's characters, but a special one is never cut."""
    return [piece] if piece.is_special else [Piece(character) for character in piece.text]
