"""The rule `match` at any temperature and with any parameter says what plain decoding says with the same seed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.basics import grid
from support.models.engine_cases import native
from support.models.gguf_blocks import FORMS
from support.models.tiny_gguf import DYNAMIC, MIXES, write_gguf
from support.models.tiny_models import TARGET, TRAINED, write_tiny_model
from support.stack import PATIENT, Answer, HaltedTarget, RunningStack, answers, running_stack, token_ids

from outrider.cli.bench.common import OPENINGS
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.v1 import types_pb2

TEMPERATURES = (0.7, 1.0, 1.3)
EOS = 0
LIKELY_EOS = {EOS: 11.0}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"logit_bias": {11: 4.0, 263: -3.5}},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.6},
    {"frequency_penalty": 0.4},
    {"min_tokens": 20, "stop_token_ids": [11, 14]},
    {"logit_bias": LIKELY_EOS},
    {"logit_bias": LIKELY_EOS, "ignore_eos": True},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
)
DRAFT_COUNTS = (4, None)
OTHER_MIXES = sorted(MIXES.keys() - {"Q4_K_M"})
# Requests of these are long: no end may come before the draft has been restarted twice.
LONG_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9, "ignore_eos": True},
    {"repetition_penalty": 1.2, "ignore_eos": True},
    {"logit_bias": {11: 4.0, 263: -3.5, **LIKELY_EOS}, "ignore_eos": True},
    {"min_tokens": 100, "stop_token_ids": [11, 14]},
    PARAMETERS[-1] | {"ignore_eos": True},
)


def named(parameters: dict[str, Any]) -> str:
    """A name for a test."""
    likely = "likely EOS+" if parameters.get("logit_bias", {}).get(EOS) else ""
    return likely + "+".join(parameters) or "plain"


def check_ends(results: list[Answer], parameters: dict[str, Any]) -> None:
    """Where EOS is likely it is drawn, and ends a request or does not, as the parameters say."""
    ended = [answer.completion.finish_reason == types_pb2.FINISH_REASON_EOS for answer in results]
    passed = [EOS in answer.token_ids[:-1] for answer in results]
    ignored = parameters.get("ignore_eos", False)
    assert not any(ended if ignored else passed)
    if parameters.get("logit_bias", {}).get(EOS):
        assert any(passed if ignored else ended)


async def check(
    stack: RunningStack,
    prompts: tuple[str, ...],
    temperatures: tuple[float, ...],
    draft_counts: tuple[int | None, ...],
    parameters: dict[str, Any],
    max_tokens: int,
) -> None:
    """Compares draft counts, alone and sixteen at a time, with draft count 0."""
    for temperature in temperatures:
        fields = {"temperature": temperature, "max_tokens": max_tokens, **parameters}
        results = await answers(stack, prompts, draft_count=0, **fields)
        check_ends(results, parameters)
        plain = token_ids(results)
        for draft_count in draft_counts:
            # No draft count at all lets the gateway choose for every round.
            count = {} if draft_count is None else {"draft_count": draft_count}
            together = await answers(stack, prompts, **count, **fields)
            assert token_ids(together) == plain, f"{temperature=} {draft_count=}"
        alone = await answers(stack, prompts[:2], at_a_time=1, draft_count=4, **fields)
        assert token_ids(alone) == plain[:2], f"{temperature=} alone"


@pytest.mark.parametrize("parameters", PARAMETERS, ids=named)
async def test_a_parameter_changes_no_token_by_speculation(parameters: dict[str, Any]) -> None:
    """With each parameter in turn, at temperature 1, a few prompts give the tokens of plain decoding."""
    async with running_stack(str(TARGET), str(TRAINED)) as stack:
        await check(stack, OPENINGS[:4], (1.0,), (4, None), parameters, max_tokens=24)


@pytest.mark.parametrize(
    ("mix", "dtype"),
    [
        *(("Q4_K_M", dtype) for dtype in BLOCK_DTYPES),
        *((DYNAMIC, dtype) for dtype in BLOCK_DTYPES),
        *(pytest.param(mix, "file", marks=pytest.mark.slow) for mix in OTHER_MIXES),
    ],
)
async def test_the_bits_of_a_gguf_file_change_no_token_by_speculation(tmp_path: Path, mix: str, dtype: str) -> None:
    """The embedded target in a mix, whose widths make types of 32 and 256 of it, with its draft in bfloat16."""
    native()
    file = write_gguf(TARGET, tmp_path / "target.gguf", mix)
    async with running_stack(str(file), str(TRAINED), target_options={"dtype": dtype}) as stack:
        await check(stack, OPENINGS[:4], (0.0, 1.0), DRAFT_COUNTS, {}, max_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
async def test_no_type_of_gguf_changes_a_token_by_speculation(tmp_path: Path, kind: str) -> None:
    """A model all of whose matrices have the type, and one that guesses for it: itself in other bits, often wrong."""
    native()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=4096, **sizes)
    target, draft = (
        write_gguf(model, tmp_path / f"{each}.gguf", each) for each in (kind, "Q3_K" if kind == "Q2_K" else "Q2_K")
    )
    async with running_stack(str(target), str(draft), dtype="file") as stack:
        await check(stack, OPENINGS[:4], (0.0, 1.0), (4,), {}, max_tokens=16)
        found = [
            each.completion.speculation for each in await answers(stack, OPENINGS[:4], draft_count=4, max_tokens=16)
        ]
    assert 0 < sum(each.accepted_tokens for each in found) < sum(each.draft_tokens for each in found)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=named)
async def test_no_parameter_changes_a_token_by_speculation(parameters: dict[str, Any], dtype: str) -> None:
    """With each parameter at three temperatures, alone and sixteen at once, tokens are those of plain decoding."""
    async with running_stack(str(TARGET), str(TRAINED), dtype=dtype) as stack:
        await check(stack, OPENINGS[:16], TEMPERATURES, DRAFT_COUNTS, parameters, max_tokens=32)


async def check_restarts(stack: RunningStack, parameters: dict[str, Any], **fields: Any) -> None:
    """Stops the draft service and starts it again, twice, while sixteen requests run; compares with draft count 0."""
    plain = await answers(stack, OPENINGS[:16], draft_count=0, **fields, **parameters)
    check_ends(plain, parameters)
    halted = HaltedTarget(stack)
    running = asyncio.create_task(answers(stack, OPENINGS[:16], draft_count=4, **fields, **parameters))
    for _ in range(2):
        await halted.make(6)
        await stack.stop_draft()
        await halted.make(3)
        await stack.start_draft()
    assert not running.done()
    halted.let_go()
    results = await running
    assert token_ids(results) == token_ids(plain)
    assert sum(each.completion.speculation.fallback_rounds for each in results) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", *grid("float32", "int4")])
async def test_restarts_of_the_draft_change_no_token(dtype: str) -> None:
    """Sixteen requests, during which the draft service is restarted twice, get the tokens of plain decoding."""
    async with running_stack(str(TARGET), str(TRAINED), dtype=dtype) as stack:
        await check_restarts(stack, {"ignore_eos": True}, temperature=1.0, max_tokens=200)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("parameters", LONG_PARAMETERS, ids=named)
async def test_no_parameter_changes_a_token_by_restarts_of_the_draft(
    parameters: dict[str, Any], temperature: float
) -> None:
    """With each of several parameters, at two temperatures, restarts leave the tokens of plain decoding."""
    async with running_stack(str(TARGET), str(TRAINED)) as stack:
        await check_restarts(stack, parameters, temperature=temperature, max_tokens=140)


async def test_a_draft_that_is_absent_from_the_start_changes_no_token() -> None:
    """Before the draft service has ever been started, and after it came up, the tokens are those of plain decoding."""
    fields = {"temperature": 1.0, "max_tokens": 32}
    async with running_stack(str(TARGET), str(TRAINED), gateway=PATIENT) as stack:
        plain = token_ids(await answers(stack, OPENINGS[:4], draft_count=0, **fields))
        await stack.stop_draft()
        absent = await answers(stack, OPENINGS[:4], draft_count=4, **fields)
        await stack.start_draft()
        present = await answers(stack, OPENINGS[:4], draft_count=4, **fields)
        assert token_ids(absent) == token_ids(present) == plain
        assert all(each.completion.speculation.draft_tokens == 0 for each in absent)
        assert all(each.completion.speculation.fallback_rounds == 0 for each in present)
