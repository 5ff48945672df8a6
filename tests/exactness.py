"""Runs many requests at a time through a stack, and asks transformers what the target alone says."""

import asyncio
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from stack import Answer, RunningStack

AT_A_TIME = 16
NEAR_TIE = 1e-4


async def answers(
    stack: RunningStack, prompts: Sequence[str], at_a_time: int = AT_A_TIME, **fields: Any
) -> list[Answer]:
    """The answers to all prompts, in order; each has its own seed, so that no two share their noise.

    Each call has its own salt: what is compared with another call's answers must not be served from its cached keys.
    """
    fields = {"cache_salt": secrets.token_hex()} | fields
    slots = asyncio.Semaphore(at_a_time)

    async def answer(seed: int, prompt: str) -> Answer:
        async with slots:
            return await stack.generate(text=prompt, seed=seed, **fields)

    return await asyncio.gather(*(answer(seed, prompt) for seed, prompt in enumerate(prompts)))


def token_ids(results: Sequence[Answer]) -> list[tuple[int, ...]]:
    """What was said."""
    return [result.token_ids for result in results]


@cache
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The model in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def greedy_reference(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers' own generate says to each prompt, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = reference_model(folder).generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        said.append(tuple(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return said


def first_difference_is_near_tie(folder: Path, prompt: str, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """None for equal tokens; else a description of the near-tie where they part. Fails when it is none."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((index for index, (mine, other) in pairs if mine != other), None)
    if place is None:
        assert len(ours) == len(theirs)
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer(prompt)["input_ids"] + list(theirs[:place])
    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([prefix])).logits[0, -1]
    gap = abs(float(logits[ours[place]] - logits[theirs[place]]))
    assert gap < NEAR_TIE, f"{prompt!r}: token {place} is {ours[place]} and not {theirs[place]}, {gap:.2e} apart"
    return f"{prompt!r}: token {place}, logits {gap:.1e} apart"
