"""The vocabulary of a model, by its tokenizer."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from outrider.errors import ModelRefused
from outrider.model_files.digests import DIGEST_BYTES, IDS_PER_DIGEST, VocabularyDigests
from outrider.model_files.folder_tokenizer import folder_tokenizer
from outrider.model_files.gguf.files import gguf_in
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import doubt, read_tokenizer

VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True, slots=True)
class Vocabulary(VocabularyDigests):
    """The digests of a model's tokenizer, read from its files."""

    @classmethod
    def read(cls, place: Path | str) -> Self:
        """The vocabulary of a GGUF file, or of a folder: its tokenizer's, added tokens included, or vocabulary.json.

        A draft needs no tokenizer of its own, only to be distinguished from those that fit other targets. Raises
        ModelRefused.
        """
        tokenizer, path = tokenizer_in(place), Path(place) / VOCABULARY_FILE
        if tokenizer is not None:
            return cls.of(tokenizer.get_vocab(with_added_tokens=True).items())
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            size, digests = int(found["size"]), tuple(int(digest, 16) for digest in found["digests"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelRefused(f"{path} cannot be read as a size and digests: {error!r}") from error
        if size < 1 or len(digests) != -(-size // IDS_PER_DIGEST):
            raise ModelRefused(
                f"{path} has {len(digests)} digests, but {size} ids have one for every {IDS_PER_DIGEST}."
            )
        return cls(size, digests)

    def write(self, folder: Path) -> None:
        """Writes vocabulary.json, which `read` takes where a folder has no tokenizer.json."""
        digests = [f"{digest:0{2 * DIGEST_BYTES}x}" for digest in self.digests]
        text = json.dumps({"size": self.size, "digests": digests}, indent=1) + "\n"
        (folder / VOCABULARY_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def embedded(cls, tokenizer: Tokenizer, num_rows: int, model: str) -> Self:
        """The tokens that a model, which is called so, has one of its rows for; others can be in no answer.

        Only added tokens may lie beyond the rows, as an image's or padding does of which the model knows nothing: a
        prompt that has one is at fault. Raises ModelRefused where others do, because then the tokenizer is another's.
        """
        tokens, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()
        last = max((token_id for token_id in tokens.values() if token_id not in added), default=-1)
        if last >= num_rows:
            message = f"{model}: the tokenizer knows the id {last}, but the model has only {num_rows} rows"
            raise ModelRefused(message, token_id=last, rows=num_rows)
        return cls.of((token, token_id) for token, token_id in tokens.items() if token_id < num_rows)


def misfit(tokenizer: Tokenizer, whole: Vocabulary, model: Vocabulary) -> str | None:
    """Reason why the ids of a model do not mean the tokens of a tokenizer; None where they do, as far as it has rows.

    `whole` is the tokenizer's own vocabulary.
    """
    if model.size < whole.size:
        # Where more than added tokens is missing, the sizes show it.
        with suppress(ModelRefused):
            whole = Vocabulary.embedded(tokenizer, model.size, "")
    return whole.difference(model)


def tokenizer_doubt(place: Path | str) -> str | None:
    """Reason why a model's texts may be cut into other tokens than in training; None for most. Raises ModelRefused."""
    gguf = gguf_in(Path(place))
    return None if gguf is None else doubt(GgufFile.read(gguf))


def tokenizer_in(place: Path | str) -> Tokenizer | None:
    """Tokenizer of a GGUF file or a folder; None of a folder that only states its vocabulary. Raises ModelRefused."""
    folder, gguf = Path(place), gguf_in(Path(place))
    if gguf is not None:
        return read_tokenizer(GgufFile.read(gguf))
    if not (folder / "tokenizer.json").is_file() and (folder / VOCABULARY_FILE).is_file():
        return None
    return folder_tokenizer(folder)
