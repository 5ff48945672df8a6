"""Requests that are asked again and again with one seed follow the target's distribution each time, whatever is
remembered.

What a request said before was decided by uniforms of its seed. A lookup in the memory of answers, or a prediction that
is the answer, proposes just that; were it tested with the same uniforms, the likelier token would come too often.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.basics import grid
from support.models.tiny_models import write_tiny_model
from support.stack import Answer, reference_model, running_stack

from gateway.generation import sample
from gateway.generation.request import CheckedRequest, sample_seed
from gateway.rounds.planner import Drafting
from outrider.v1 import types_pb2

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_RUNS, MAX_TOKENS = 16, 5, 5
# All tokens of an answer but the first, which is plain decoding, are looked at: 4,000 samples in each run.
NUM_SEEDS = 1000
# After it the second and third token are a choice of about three to one, where a bias shows most.
PROMPT = [11, 11, 2, 14]
AT_A_TIME = 32
FIELDS: dict[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "draft_count": 2,
    "temperature": 0.5,
    "top_k": 2,
    "ignore_eos": True,
}
# How the text of the runs before comes to be guessed.
SOURCES = ("one memory", "a memory for each seed", "prediction")
MOST = 4.5  # standard deviations, p = 7e-6: the largest of some dozen is looked at


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target of sixteen tokens, and a draft that keeps rounds in step and is hardly ever right."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (write_tiny_model(folder / each, "llama", NUM_TOKENS) for each in ("target", "draft"))
    tensors = load_file(draft / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor.fill_(1)
        elif name == "lm_head.weight":
            # The state is the same everywhere, and says token 0.
            tensor.zero_()[0] = 1
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    return target, draft


def repeatable(monkeypatch: pytest.MonkeyPatch, *, is_shared: bool) -> None:
    """New noise is made from the request's seed and how often it was asked, so that this test always says the same.

    With is_shared there is none: tests use the seed's own noise each time, as they once did.
    """
    asked: dict[int, int] = {}

    def seed_of(request: CheckedRequest, drafting: Drafting) -> int:
        seed = request.spec.seed
        asked[seed] = asked.get(seed, 0) + 1
        is_new = generate_noise_seed(request, drafting) != seed
        return sample_seed(seed, asked[seed]) if is_new and not is_shared else seed

    generate_noise_seed = sample.noise_seed
    monkeypatch.setattr(sample, "noise_seed", seed_of)


def deviation(model: Path, answers: Sequence[Answer]) -> float:
    """How much the likelier of two tokens came too often, or too rarely, in standard deviations of what the
    distribution allows.

    Of the sums over the first one, two and all tokens that were tested the largest. Each is of log-probability plus
    entropy, which has a mean of 0 under the distribution whatever came before.
    """
    ids = torch.tensor([[*PROMPT, *answer.token_ids] for answer in answers])
    with torch.no_grad():
        logits = reference_model(model)(ids).logits[:, len(PROMPT) : -1].double()
    best = logits.topk(2, dim=-1)
    logprobs = (best.values / FIELDS["temperature"]).log_softmax(dim=-1).numpy()
    said = (best.indices == ids[:, len(PROMPT) + 1 :, None]).numpy()
    assert (said.sum(axis=-1) == 1).all()
    means = (np.exp(logprobs) * logprobs).sum(axis=-1)
    variances = (np.exp(logprobs) * logprobs**2).sum(axis=-1) - means**2
    excess = ((logprobs * said).sum(axis=-1) - means).sum(axis=0).cumsum() / np.sqrt(variances.sum(axis=0).cumsum())
    return float(max(excess[[0, 1, -1]], key=abs))


async def deviations(
    pair: tuple[Path, Path],
    rule: str,
    sources: Sequence[str] = SOURCES,
    num_runs: int = NUM_RUNS,
    num_seeds: int = NUM_SEEDS,
) -> list[float]:
    """Deviations of each run of all seeds, which take turns to use the sources."""
    slots = asyncio.Semaphore(AT_A_TIME)
    number = getattr(types_pb2, f"ACCEPTANCE_RULE_{rule.upper()}")
    target, draft = map(str, pair)
    async with running_stack(target, draft, dtype="float32") as stack:

        async def answer(seed: int, run: int, before: Answer | None) -> Answer:
            source = sources[seed % len(sources)]
            salt = {"one memory": "", "prediction": f"{seed} {run}"}.get(source, f"{seed}")
            fields: dict[str, Any] = {"cache_salt": salt}
            if source == "prediction" and before is not None:
                fields["prediction_token_ids"] = types_pb2.TokenIds(token_ids=before.token_ids)
            async with slots:
                return await stack.generate(
                    token_ids=PROMPT, seed=seed, rule=number, drafters=["lookup", "model"], **fields, **FIELDS
                )

        found: list[float] = []
        answers: list[Answer | None] = [None] * num_seeds
        for run in range(num_runs):
            answers = [*await asyncio.gather(*(answer(seed, run, each) for seed, each in enumerate(answers)))]
            found.append(deviation(pair[0], [each for each in answers if each is not None]))
            looked = sum(
                figures.draft_tokens
                for each in answers
                if each is not None
                for figures in each.completion.speculation.drafters
                if figures.drafter in {"lookup", "prediction"}
            )
            assert not run or looked > num_seeds
    return found


@pytest.mark.parametrize("rule", [*grid("ratio"), "block"])
async def test_each_repetition_of_a_seed_follows_the_law(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Five runs of 1,000 seeds, four tokens of each answer; a third of the seeds with each source."""
    repeatable(monkeypatch, is_shared=False)
    assert max(map(abs, await deviations(pair, rule))) < MOST


@pytest.mark.parametrize("rule", [*grid("ratio"), "block"])
async def test_guesses_that_know_the_noise_of_their_seed_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Tested with the uniforms that decided what a memory holds, as it once was: the likelier token comes too often."""
    repeatable(monkeypatch, is_shared=True)
    assert max(await deviations(pair, rule, SOURCES[1:2], num_runs=3)) > 1.2 * MOST


@pytest.mark.grid
@pytest.mark.parametrize("rule", ["ratio", "block"])
async def test_each_repetition_of_many_seeds_follows_the_law(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Five runs of 4,000 seeds, a third of them with each source."""
    repeatable(monkeypatch, is_shared=False)
    assert max(map(abs, await deviations(pair, rule, num_seeds=4 * NUM_SEEDS))) < MOST


@pytest.mark.grid
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rule", ["ratio", "block"])
async def test_each_repetition_follows_the_law_with_each_source(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str, source: str
) -> None:
    """Five runs of 1,000 seeds with one source alone."""
    repeatable(monkeypatch, is_shared=False)
    assert max(map(abs, await deviations(pair, rule, [source]))) < MOST
