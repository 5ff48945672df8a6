"""Texts and states of a target, kept on disk, so that no training has to run the target again.

A shard is some texts of one length, written together from the run's seed and the shard's number: a run that was stopped
makes only those again that it had not finished, with the same bits where torch has as many threads.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.decoding import BatchDecoder, drawn
from training.dialogue import Text
from training.storage import write_whole


def write_shard(
    decoder: BatchDecoder,
    texts: Sequence[Text],
    length: int,
    generator: torch.Generator,
    report: Callable[[int], object] = bool,
) -> dict[str, Tensor]:
    """Writes all texts to this length: token_ids and is_answer [B, L], taps [B, L, F] and normed [B, L, H] bfloat16.

    `report` gets how many tokens each of them has, before the next.

    Where `is_answer`, the target drew the token for an answer. taps and normed are of the row that reads the token.
    """
    count = len(texts)
    decoder.rewind(count, length)
    token_ids = torch.zeros(count, length, dtype=torch.int64)
    is_answer = torch.zeros(count, length, dtype=torch.bool)
    kept: list[Tensor] = []
    found = torch.zeros(count, dtype=torch.int64)
    for position in range(length):
        report(position)
        followed = [text.follow(token_id) for text, token_id in zip(texts, found.tolist(), strict=True)]
        token_ids[:, position] = torch.tensor([token_id for token_id, _ in followed])
        is_answer[:, position] = torch.tensor([own for _, own in followed])
        states = decoder.step(token_ids[:, position])
        if not kept:
            kept = [torch.empty(count, length, each.shape[1], dtype=each.dtype) for each in states]
        for whole, each in zip(kept, states, strict=True):
            whole[:, position] = each
        temperatures = torch.tensor([text.temperature for text in texts])
        found = drawn(decoder.logits(states.normed), temperatures, generator)
    return {"token_ids": token_ids, "is_answer": is_answer, "taps": kept[0], "normed": kept[1]}


def shard_path(folder: Path, number: int) -> Path:
    """Path of a shard by its number."""
    return folder / f"shard-{number:03}.safetensors"


def seeded(words: str) -> torch.Generator:
    """A generator of its own for everything that is called differently."""
    digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def write_shards(
    folder: Path,
    num_answer_tokens: int,
    seed: int,
    write: Callable[[torch.Generator], dict[str, Tensor]],
    report: Callable[[int, int], None],
) -> int:
    """Has shards written until their answers have so many tokens, but those that are there; returns how many there are.

    Each has a generator of its own. `report` gets how many there are, and their answers' tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = number = 0
    while total < num_answer_tokens:
        path = shard_path(folder, number)
        if not path.is_file():
            write_whole(path, partial(save_file, write(seeded(f"{seed} texts {number}"))))
        with safe_open(path, "pt") as file:
            is_answer = file.get_tensor("is_answer")
        total, number = total + int(is_answer.sum()), number + 1
        report(number, total)
    return number
