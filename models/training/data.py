"""A text file becomes one line of token ids, held-out blocks of it, and the blocks that each step learns from.

Documents follow each other in the file's order, each after one `<|endoftext|>`, so that a context may reach back over
everything that its book said before. Blocks are functions of the seed, the stage and the step, so that a resumed run
needs no more than its step to go on with the same data.
"""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from outrider.errors import InvalidRequest

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
IGNORED = -100
HELD_OUT_SHARE = 50  # one block in so many
MAX_WINDOWS = 64  # of each length: the long ones cost minutes on a CPU


def read_documents(path: Path, separator: str) -> list[str]:
    """The documents of a UTF-8 text, plain or compressed as .xz or .gz. Raises InvalidRequest about `--corpus`."""
    try:
        data = path.read_bytes()
        if path.suffix in {".xz", ".gz"}:
            data = lzma.decompress(data) if path.suffix == ".xz" else gzip.decompress(data)
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


def encode(tokenizer: Tokenizer, documents: Sequence[str], separator_id: int = END_OF_TEXT_ID) -> Tensor:
    """All documents as one line [N] int64, each after the id that separates them."""
    token_ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        token_ids += [separator_id, *encoding.ids]
    return torch.tensor(token_ids)


def held_out_blocks(num_tokens: int, block_len: int, seed: int) -> Tensor:
    """The numbers of the held-out blocks [H] among the blocks of block_len tokens, at least one, in no order."""
    num_blocks = num_tokens // block_len
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, num_blocks // HELD_OUT_SHARE)]


def targets_of(token_ids: Tensor, held_out: Tensor, block_len: int) -> Tensor:
    """The tokens [N] with IGNORED in place of every held-out one: it may be context, but nothing is learnt from it."""
    targets = token_ids.clone()
    for number in held_out.tolist():
        targets[number * block_len : (number + 1) * block_len] = IGNORED
    return targets


@dataclass(frozen=True, slots=True)
class TrainingBlocks:
    """Blocks of one stage, every one once in a pass, in another order and with another beginning in every pass."""

    token_ids: Tensor
    targets: Tensor
    block_len: int
    batch: int
    seed: str
    """Text that distinguishes this order of blocks from all others."""

    @property
    def per_pass(self) -> int:
        """Blocks in a pass: one beginning fewer than there are, so that a pass may begin anywhere in a block."""
        return (len(self.token_ids) - 1) // self.block_len - 1

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, block_len] of a step; a target is the token after its input, or IGNORED."""
        places = [divmod(index, self.per_pass) for index in range(step * self.batch, (step + 1) * self.batch)]
        orders = {}
        for number in {number for number, _ in places}:
            digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            offset = torch.randint(self.block_len, (), generator=generator)
            orders[number] = offset + self.block_len * torch.randperm(self.per_pass, generator=generator)
        starts = [int(orders[number][position]) for number, position in places]
        inputs = [self.token_ids[start : start + self.block_len] for start in starts]
        targets = [self.targets[start + 1 : start + 1 + self.block_len] for start in starts]
        return torch.stack(inputs), torch.stack(targets)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out blocks of a text.

    The same held-out tokens, the second halves of blocks, end windows of doubling lengths, so that losses differ by the
    context alone and not by the text. What stands before them may have been learnt from; they themselves never were.
    """

    token_ids: Tensor
    blocks: Tensor
    block_len: int
    context_len: int

    @property
    def window_lens(self) -> list[int]:
        """A block, twice as much and so on, up to the context."""
        doublings = (self.context_len // self.block_len).bit_length()
        return [self.block_len << number for number in range(doublings)]

    def windows(self, length: int) -> Tensor:
        """Windows [W, length] that end with a held-out block, the same blocks for every length."""
        ends = [(number + 1) * self.block_len for number in self.blocks.tolist()]
        ends = [end for end in ends if end >= self.window_lens[-1]][:MAX_WINDOWS]
        windows = [self.token_ids[end - length : end] for end in ends]
        return torch.stack(windows) if windows else self.token_ids.new_empty(0, length)

    def whole_blocks(self) -> Tensor:
        """All held-out blocks [H, block_len]."""
        return torch.stack([self.token_ids[number * self.block_len :][: self.block_len] for number in self.blocks])
