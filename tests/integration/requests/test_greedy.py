"""Temperature 0 through real servers says what transformers' own greedy decoding says, whatever the draft."""

import warnings
from pathlib import Path

import pytest
from support.basics import slow
from support.models.tiny_models import TARGET, write_drafts
from support.stack import PATIENT, answers, first_difference_is_near_tie, greedy_reference, running_stack, token_ids

from outrider.cli.bench.common import OPENINGS

DRAFT_COUNTS, FEW_DRAFT_COUNTS = (0, 1, 3, 5, 8), (0, 3, 8)
DRAFTS = ("trained", "random", "itself", "adversary")
FEW = OPENINGS[:16]
FEW_TOKENS, MANY_TOKENS = 20, 64


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the four drafts."""
    return write_drafts(tmp_path_factory.mktemp("drafts"))


async def check_float32(
    draft: str, folder: Path, prompts: tuple[str, ...], max_tokens: int, draft_counts: tuple[int, ...]
) -> None:
    """Compares some draft counts with transformers, and the acceptance with what the draft must reach."""
    reference = greedy_reference(TARGET, prompts, max_tokens)
    async with running_stack(str(TARGET), str(folder), dtype="float32", gateway=PATIENT) as stack:
        for draft_count in draft_counts:
            results = await answers(stack, prompts, temperature=0.0, max_tokens=max_tokens, draft_count=draft_count)
            assert token_ids(results) == reference, f"{draft} with {draft_count} draft tokens"
            evaluated = sum(result.completion.speculation.evaluated_tokens for result in results)
            accepted = sum(result.completion.speculation.accepted_tokens for result in results)
            assert (evaluated > 0) == (draft_count > 0)
            if draft == "itself":
                assert accepted == evaluated
            if draft == "adversary":
                assert accepted == 0


@pytest.mark.parametrize("draft", [*slow(DRAFTS[0]), *DRAFTS[1:]])
async def test_a_few_stories_are_those_of_transformers(draft: str, drafts: dict[str, Path]) -> None:
    """In float32, sixteen prompts at a time, any draft gives transformers' first tokens with few and many guesses."""
    await check_float32(draft, drafts[draft], FEW, FEW_TOKENS, FEW_DRAFT_COUNTS)


@pytest.mark.grid
@pytest.mark.parametrize("draft", DRAFTS)
async def test_fifty_stories_are_those_of_transformers(draft: str, drafts: dict[str, Path]) -> None:
    """In float32, sixteen prompts at a time, any draft and draft count gives transformers' tokens."""
    await check_float32(draft, drafts[draft], OPENINGS, MANY_TOKENS, DRAFT_COUNTS)


async def check_bfloat16(
    draft: str, folder: Path, prompts: tuple[str, ...], max_tokens: int, draft_counts: tuple[int, ...]
) -> None:
    """Compares some draft counts with plain decoding, and that with transformers over the same rounded weights."""
    async with running_stack(str(TARGET), str(folder), dtype="bfloat16") as stack:
        fields = {"temperature": 0.0, "max_tokens": max_tokens}
        plain = token_ids(await answers(stack, prompts, draft_count=0, **fields))
        for draft_count in draft_counts[1:]:
            results = await answers(stack, prompts, draft_count=draft_count, **fields)
            assert token_ids(results) == plain, f"{draft} with {draft_count} draft tokens"
    reference = greedy_reference(TARGET, prompts, max_tokens)
    for prompt, ours, theirs in zip(prompts, plain, reference, strict=True):
        near_tie = first_difference_is_near_tie(TARGET, prompt, ours, theirs)
        if near_tie:
            warnings.warn(f"near-tie: {near_tie}", stacklevel=1)


@pytest.mark.slow
async def test_bfloat16_weights_give_plain_decoding_and_transformers(drafts: dict[str, Path]) -> None:
    """With bfloat16 weights a few stories are those of plain decoding, and of transformers but for near-ties."""
    await check_bfloat16("trained", drafts["trained"], FEW, FEW_TOKENS, FEW_DRAFT_COUNTS)


@pytest.mark.grid
@pytest.mark.parametrize("draft", DRAFTS)
async def test_bfloat16_weights_give_plain_decoding_for_every_draft(draft: str, drafts: dict[str, Path]) -> None:
    """With bfloat16 weights stories are those of plain decoding, and of transformers but for near-ties."""
    prompts = OPENINGS if draft == "trained" else OPENINGS[:16]
    await check_bfloat16(draft, drafts[draft], prompts, MANY_TOKENS, DRAFT_COUNTS)
