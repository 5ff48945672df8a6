"""A GGUF file through real servers against transformers' own reading of it: greedy tokens of chat prompts, in float32.

    python -m bench.gguf --model FILE.gguf --questions FILE [--prompts 40] [--tokens 128] [--threads 1]

Questions are JSON lines whose "turns" begin with what a user asks; the prompts are taken evenly over them. A target
service and a gateway serve the file in processes of their own, and a client asks over gRPC, once plainly and once with
guesses that are looked up. Where the tokens part, transformers' logits of both are compared: less than 1e-4 apart is a
near-tie, and listed; anything else is a difference, and the exit code is 1. transformers reads GGUF files only where
the accelerate package is installed, which nothing else here needs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.common import machine, revision
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.cli.local_stack import Flags, Stack, start_stack
from outrider.cli.running import note, service_log
from outrider.client import AsyncClient, Speculation
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.generation_defaults import NONE
from outrider.model_service.settings import Dtype
from outrider.process.children import Supervisor

NEAR_TIE = 1e-4
SETTINGS = {"plain": Speculation(enabled=False), "looked up": Speculation()}


@dataclass(frozen=True, slots=True)
class Difference:
    """Place where the tokens of an answer part, and the distance of transformers' logits of the two tokens."""

    number: int
    place: int
    ours: int | None
    theirs: int | None
    gap: float


def read_questions(path: Path, count: int) -> list[str]:
    """The first turns of so many questions, evenly over the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = [lines[index * len(lines) // count] for index in range(min(count, len(lines)))]
    return [str(json.loads(line)["turns"][0]) for line in chosen]


async def served_answers(
    model: Path, questions: Sequence[str], max_tokens: int, threads: int
) -> dict[str, list[tuple[int, ...]]]:
    """Token ids of the answers to all questions under each setting, over chat."""
    # transformers' answers have no defaults of a GGUF file either.
    flags: Flags = {"--generation-defaults": NONE}
    stack = Stack(str(model), None, gateway_flags=flags, dtype=Dtype.FLOAT32.value, threads=threads)
    said: dict[str, list[tuple[int, ...]]] = {}
    async with Supervisor(note, service_log) as supervisor:
        addresses = await start_stack(supervisor, stack)
        async with AsyncClient(addresses.gateway) as client:
            for name, speculation in SETTINGS.items():
                said[name] = []
                for question in questions:
                    messages = [{"role": "user", "content": question}]
                    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "speculation": speculation}
                    answer = await client.chat(messages, **options).result()
                    said[name].append(answer.token_ids)
    return said


async def prompt_ids(model: Path, questions: Sequence[str]) -> list[tuple[int, ...]]:
    """The prompts as the gateway makes them."""
    tokenizer, template, made = Tokenizer(str(model)), ChatTemplate.read(str(model)), []
    for question in questions:
        prompt = template.render([{"role": "user", "content": question}])
        made.append(await tokenizer.encode(prompt.text, special=prompt.add_special_tokens))
    return made


def generated(reference: Any, prompt: Sequence[int], max_tokens: int, ends: Sequence[int]) -> tuple[int, ...]:  # noqa: ANN401 - transformers has no types
    """Tokens that transformers generates greedily."""
    inputs = torch.tensor([prompt])
    output = reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
    )
    return tuple(output[0, len(prompt) :].tolist())


def difference(
    reference: Any,  # noqa: ANN401 - transformers has no types
    number: int,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
) -> Difference | None:
    """First difference of two answers; None for equal ones."""
    if tuple(ours) == tuple(theirs):
        return None
    shorter = min(len(ours), len(theirs))
    place = next((index for index in range(shorter) if ours[index] != theirs[index]), shorter)
    mine, other = (side[place] if place < len(side) else None for side in (ours, theirs))
    if mine is None or other is None:
        return Difference(number, place, mine, other, float("inf"))
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
    return Difference(number, place, mine, other, abs(float(logits[mine] - logits[other])))


def main() -> int:
    """Prints what was compared; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gguf", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--prompts", type=int, default=40, help="how many questions to ask")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    given = parser.parse_args()
    questions = read_questions(given.questions, given.prompts)
    prompts = asyncio.run(prompt_ids(given.model, questions))
    said = asyncio.run(served_answers(given.model, questions, given.tokens, given.threads))
    torch.set_num_threads(given.threads)
    place = {"pretrained_model_name_or_path": str(given.model.parent), "gguf_file": given.model.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    spelling = transformers.AutoTokenizer.from_pretrained(**place)
    template = ChatTemplate.read(str(given.model))
    texts = [template.render([{"role": "user", "content": each}]).text for each in questions]
    theirs_read = [tuple(spelling(text, add_special_tokens=False)["input_ids"]) for text in texts]
    num_spelled = sum(ours != theirs for ours, theirs in zip(prompts, theirs_read, strict=True))
    ends = sorted(find_checkpoint(str(given.model)).config.eos_token_ids)
    expected = [generated(reference, prompt, given.tokens, ends) for prompt in prompts]
    print(f"{given.model.name}, {machine()}, commit {revision()}")
    print(f"{len(prompts)} prompts, {sum(map(len, expected)):,} tokens by transformers {transformers.__version__}")
    print(f"prompts that transformers' tokenizer spells otherwise: {num_spelled}")
    is_wrong = False
    for name, answers in said.items():
        rows = enumerate(zip(prompts, answers, expected, strict=True))
        found = [difference(reference, number, prompt, mine, other) for number, (prompt, mine, other) in rows]
        parted = [each for each in found if each is not None]
        wrong = [each for each in parted if each.gap >= NEAR_TIE]
        print(f"{name}: {len(found) - len(parted)} equal, {len(parted) - len(wrong)} near-ties, {len(wrong)} different")
        for each in parted:
            print(f"  prompt {each.number}, token {each.place}: {each.ours}, not {each.theirs}, {each.gap:.1e} apart")
        is_wrong |= bool(wrong)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
