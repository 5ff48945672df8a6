"""Tests of outrider.model_files.vocabulary: two tokenizers fit when every id means the same token."""

from pathlib import Path

import pytest

from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary

MODELS = Path(__file__).resolve().parents[3] / "models"


def tokens(count: int) -> list[tuple[str, int]]:
    """A vocabulary of numbered tokens."""
    return [(f"t{token_id}", token_id) for token_id in range(count)]


def test_the_embedded_pair_fits() -> None:
    """Both models carry the same tokenizer of 4,096 ids."""
    target, draft = Vocabulary.read(MODELS / "target"), Vocabulary.read(MODELS / "draft")
    assert target.difference(draft) is None
    assert (target.size, len(target.digests)) == (4096, 4)


def test_the_order_of_the_file_does_not_matter() -> None:
    """Only pairs of id and token count."""
    assert Vocabulary.of(tokens(2000)).difference(Vocabulary.of(reversed(tokens(2000)))) is None


def test_sizes_are_named() -> None:
    """Another number of ids is the first thing to say."""
    assert Vocabulary.of(tokens(10)).difference(Vocabulary.of(tokens(11))) == "The vocabularies have 10 and 11 ids."


def test_a_single_swapped_pair_is_found() -> None:
    """The sentence says between which ids."""
    swapped = tokens(3000)
    swapped[1500], swapped[1501] = (swapped[1501][0], 1500), (swapped[1500][0], 1501)
    difference = Vocabulary.of(tokens(3000)).difference(Vocabulary.of(swapped))
    assert difference == "The vocabularies of 3000 ids differ between the ids 1024 and 2047."


def test_tokens_cannot_borrow_from_their_neighbours() -> None:
    """The same bytes divided otherwise are another vocabulary."""
    assert Vocabulary.of([("ab", 0), ("c", 1)]).digests != Vocabulary.of([("a", 0), ("bc", 1)]).digests


def test_gaps_and_lone_surrogates_are_allowed() -> None:
    """Ids without a token exist, and so do tokens that are no valid Unicode."""
    vocabulary = Vocabulary.of([("\ud800", 0), ("b", 5000)])
    assert vocabulary.size == 5001
    assert vocabulary.digests[1:4] == (0, 0, 0)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    """Absent and broken files are one sentence each."""
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json"):
        Vocabulary.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelRefused, match="cannot be read"):
        Vocabulary.read(tmp_path)


def test_a_draft_may_state_the_vocabulary_of_its_target(tmp_path: Path) -> None:
    """What is written is read again where no tokenizer lies beside it, and is distinguished from other vocabularies."""
    known = Vocabulary.of(tokens(3000))
    known.write(tmp_path)
    assert Vocabulary.read(tmp_path) == known
    assert Vocabulary.read(tmp_path).difference(Vocabulary.of(tokens(2999))) is not None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelRefused, match="cannot be read as a tokenizer"):
        Vocabulary.read(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"size": 5}', '{"size": 5, "digests": [7]}', '{"size": 5, "digests": []}']
)
def test_a_stated_vocabulary_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """One sentence that names the file."""
    (tmp_path / "vocabulary.json").write_text(text)
    with pytest.raises(ModelRefused, match=r"vocabulary\.json"):
        Vocabulary.read(tmp_path)


def test_digests_of_another_number_are_a_difference() -> None:
    """A peer may send anything; it is distinguished from ours, and nothing fails."""
    vocabulary = Vocabulary(12, (7,))
    assert vocabulary.difference(Vocabulary(12, (7, 8))) == "The vocabularies of 12 ids have 1 and 2 digests."
