"""Beam search through real services: transformers' beams in fewer target passes, by every surface, whatever happens."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import transformers
from support.basics import grid
from support.models.model_cases import logprobs_and_reach
from support.models.tiny_models import TARGET
from support.rest.rest_stack import CHAT, COMPLETIONS, rest_stack
from support.stack import PATIENT, HaltedTarget, RunningStack, reference_model, request_of, running_stack

from outrider.cli.bench.common import OPENINGS
from outrider.client import Answer, BeamSearch, InvalidRequest, PromptTooLong, Speculation
from outrider.v1 import generation_service_pb2 as pb

WIDTH, MAX_TOKENS = 4, 24
PLAIN = Speculation(enabled=False)


async def found(stack: RunningStack, prompts: Sequence[str], at_a_time: int = 8, **options: Any) -> list[Answer]:
    """The answers to all prompts, in order."""
    slots = asyncio.Semaphore(at_a_time)
    options = {"beam_search": BeamSearch(WIDTH), "max_tokens": MAX_TOKENS} | options

    async def answer(prompt: str) -> Answer:
        async with slots:
            return await stack.client.generate(prompt, **options).result()

    return await asyncio.gather(*map(answer, prompts))


def sequences(answers: Sequence[Answer]) -> list[list[tuple[int, ...]]]:
    """What was found to each prompt, best first."""
    return [[sample.token_ids for sample in answer.samples] for answer in answers]


def num_passes(answers: Sequence[Answer]) -> int:
    return sum(answer.result.speculation.rounds for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [4, *grid(30)])
async def test_beams_are_those_of_transformers_in_fewer_passes(num_prompts: int) -> None:
    """Many prompts in float32: tokens, order and scores, with guesses and without."""
    prompts, model = OPENINGS[:num_prompts], reference_model(TARGET)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    async with running_stack(str(TARGET), dtype="float32", gateway=PATIENT) as stack:
        plain, guided = await found(stack, prompts, speculation=PLAIN), await found(stack, prompts)
    assert sequences(plain) == sequences(guided)
    assert num_passes(guided) < 0.6 * num_passes(plain)
    _, limit = logprobs_and_reach(model, tokenizer(prompts[0])["input_ids"])
    for prompt, answer in zip(prompts, guided, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for sample, row, score in zip(answer.samples, output.sequences, output.sequences_scores, strict=True):
            assert list(sample.token_ids) == row[length : length + len(sample.token_ids)].tolist()
            assert sample.result.cumulative_logprob is not None
            mean = sample.result.cumulative_logprob / len(sample.token_ids)
            assert mean == pytest.approx(float(score), rel=0, abs=limit)


@pytest.mark.slow
async def test_every_surface_says_the_same() -> None:
    """Tokens come once, after rounds that have none; the figures count passes and guesses."""
    prompt = OPENINGS[0]
    async with rest_stack(gateway=PATIENT) as rest:
        [answer] = await found(rest.stack, [prompt])
        passes = [each for each in answer.samples[0].rounds if not each.tokens]
        figures = answer.result.speculation
        assert len(passes) == 1 + figures.rounds
        assert sum(each.facts.draft_count for each in passes) == figures.draft_tokens > 0
        assert sum(each.facts.accepted_count for each in passes) == figures.accepted_tokens > 0
        assert 1 + figures.rounds + figures.accepted_tokens >= MAX_TOKENS
        assert [len(sample.rounds) for sample in answer.samples[1:]] == [1] * (WIDTH - 1)
        body = {"max_tokens": MAX_TOKENS, "n": WIDTH, "use_beam_search": True, "return_token_ids": True}
        whole = await rest.ask(COMPLETIONS, prompt=prompt, **body)
        texts = [sample.text for sample in answer.samples]
        assert [choice["text"] for choice in whole["choices"]] == texts
        assert [tuple(choice["token_ids"]) for choice in whole["choices"]] == sequences([answer])[0]
        logprobs = [sample.result.cumulative_logprob for sample in answer.samples]
        assert whole["outrider"]["cumulative_logprobs"] == logprobs
        assert whole["outrider"]["rounds"] == figures.rounds
        assert whole["usage"]["completion_tokens"] == sum(map(len, sequences([answer])[0]))
        streamed = await rest.stream(COMPLETIONS, prompt=prompt, **body)
        joined = dict.fromkeys(range(WIDTH), "")
        for chunk in streamed.chunks:
            for choice in chunk["choices"]:
                joined[choice["index"]] += choice["text"]
        assert list(joined.values()) == texts
        messages = [{"role": "user", "content": prompt}]
        chat = await rest.ask(CHAT, messages=messages, early_stopping="never", length_penalty=0.5, **body)
        search = BeamSearch(WIDTH, 0.5, "never")
        said = await rest.stack.client.chat(messages, beam_search=search, max_tokens=MAX_TOKENS).result()
        assert [choice["message"]["content"] for choice in chat["choices"]] == [each.text for each in said.samples]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 0.7}, "sampling.temperature"),
        ({"top_k": 5}, "sampling.top_k"),
        ({"stop": ["x"]}, "stop"),
        ({"sample_count": 2}, "sample_count"),
        ({"logprob_count": 1}, "logprob_count"),
        ({"speculation": Speculation(rule="ratio")}, "speculation.rule"),
        ({"speculation": Speculation(return_rounds=True)}, "speculation.return_rounds"),
    ],
)
async def test_what_a_search_cannot_be_combined_with_is_refused(options: dict[str, Any], field: str) -> None:
    async with running_stack(draft=None) as stack:
        with pytest.raises(InvalidRequest) as refused:
            await found(stack, ["Once"], **options)
        assert refused.value.metadata["field"] == field


async def test_bodies_are_refused_in_their_own_names() -> None:
    """And a search that could fill the cache on its own before anything is spent on it."""
    faults = [
        ({"use_beam_search": True}, "n"),
        ({"use_beam_search": True, "n": 2, "temperature": 1.0}, "temperature"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 1.0, "n": 2}, "length_penalty"),
        ({"use_beam_search": True, "n": 2, "length_penalty": 11}, "length_penalty"),
    ]
    async with rest_stack(draft=None, target_options={"kv_tokens": 512}) as rest:
        for fields, name in faults:
            reply = await rest.http.post(COMPLETIONS, json={"prompt": "Once", **fields})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        with pytest.raises(PromptTooLong, match="may need"):
            await found(rest.stack, ["Once"], beam_search=BeamSearch(8), max_tokens=100)
        with pytest.raises(InvalidRequest, match="width"):
            await rest.stack.generate(text="Once", beam_search=pb.BeamSearch(width=9))


@pytest.mark.slow
async def test_searches_and_others_share_a_full_pool() -> None:
    """None is refused in the middle; the stack checks at its end that no block is lost."""

    async def all_at_once(stack: RunningStack) -> tuple[list[list[tuple[int, ...]]], list[tuple[int, ...]]]:
        requests = [stack.generate(text="Once upon a time", seed=seed, max_tokens=80) for seed in range(4)]
        answers, others = await asyncio.gather(found(stack, OPENINGS[:6]), asyncio.gather(*requests))
        return sequences(answers), [other.token_ids for other in others]

    async with running_stack() as roomy:
        expected = await all_at_once(roomy)
    async with running_stack(target_options={"kv_tokens": 400}, draft_options={"kv_tokens": 640}) as full:
        assert await all_at_once(full) == expected
        assert (await full.info(full.target)).preemption_count > 0


@pytest.mark.slow
async def test_cancelled_searches_leave_no_block_behind() -> None:
    """The stack checks that at its end; others are not disturbed."""

    async def cancel_somewhere(stack: RunningStack, number: int) -> None:
        chance = random.Random(number)
        beams = pb.BeamSearch(width=chance.choice((2, 4, 8)))
        call = stack.call(request_of(text=OPENINGS[number % 50], max_tokens=60, beam_search=beams))
        for _ in range(chance.randrange(12)):
            await call.read()
        call.cancel()

    async with running_stack() as stack:
        undisturbed = await found(stack, OPENINGS[:4])
        cancelling = asyncio.gather(*(cancel_somewhere(stack, number) for number in range(40)))
        disturbed = await found(stack, OPENINGS[:4])
        await cancelling
        assert sequences(disturbed) == sequences(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["target", "draft"])
async def test_a_search_survives_a_service(who: str) -> None:
    """It goes on where it was, on a target that has never heard of it, and without a draft that has died."""
    async with running_stack(gateway=PATIENT) as stack:
        [expected] = await found(stack, OPENINGS[:1], max_tokens=48)
        halted = HaltedTarget(stack, 4)
        options = {"beam_search": BeamSearch(WIDTH), "speculation": Speculation(draft_count=8)}
        stream = stack.client.generate(OPENINGS[0], max_tokens=48, **options)
        await anext(stream)
        await halted.make()
        if who == "draft":
            await stack.stop_draft()
            halted.let_go()
        else:
            await stack.restart_target()
        answer = await stream.result()
        assert sequences([answer]) == sequences([expected])
        if who == "target":
            assert answer.result.target_reopens == 1
        else:
            assert answer.result.speculation.fallback_rounds > 0
