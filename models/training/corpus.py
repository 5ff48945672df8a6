"""A text file becomes one line of token ids. Knows no models.

Documents follow each other in the file's order, each behind one `<|endoftext|>`, so that a context may reach back over
everything that its book said before.
"""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidRequest

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def read_documents(path: Path, separator: str) -> list[str]:
    """The documents of a UTF-8 text, plain or compressed as .xz or .gz. Raises InvalidRequest about `--corpus`."""
    try:
        with _open(path) as file:
            data = file.read()
        # Line ends of other systems would be tokens of their own.
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("--corpus", str(path), f"UTF-8 text, unlike its byte {error.start:,}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InvalidRequest("--corpus", str(path), f"a file that can be read: {error}") from error
    documents = [part.strip("\n") for part in (text.split(separator) if separator else [text])]
    documents = [part for part in documents if part.strip()]
    if not documents:
        raise InvalidRequest("--corpus", str(path), "a file with text in it")
    return documents


def _open(path: Path) -> BufferedIOBase:
    if path.suffix == ".xz":
        return lzma.LZMAFile(path)
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def digest(documents: Sequence[str]) -> str:
    """Thirty-two hexadecimal digits that name the text, however it was compressed."""
    state = hashlib.sha256()
    for document in documents:
        state.update(document.encode() + b"\xff")
    return state.hexdigest()[:32]


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most vocab_size tokens: a short text has fewer pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # By lines, because the trainer counts words and a book is one very long string to it.
    tokenizer.train_from_iterator((line for each in documents for line in each.splitlines(keepends=True)), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json as transformers has them."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    wrapped.save_pretrained(str(folder))


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Tensor:
    """All documents as one line [N] int64, each behind END_OF_TEXT_ID."""
    token_ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        token_ids += [END_OF_TEXT_ID, *encoding.ids]
    return torch.tensor(token_ids)
