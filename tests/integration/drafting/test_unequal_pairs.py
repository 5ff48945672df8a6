"""Target and draft that differ in what a pair may differ in: context, width of the logits, type of the weights."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model
from support.stack import PATIENT, Answer, answers, running_stack, token_ids

from outrider.v1 import generation_service_pb2 as pb

PROMPTS = ("Once upon a time there was a miller", "The fox said to the wolf,", "Who is knocking at my door?")
NUM_IDS = 257
SIZES: dict[str, Any] = {"dtype": "float32", "kv_tokens": 2048, "gateway": PATIENT}


def narrow(source: Path, folder: Path, vocab_size: int) -> Path:
    """Writes the same model with fewer rows of padding after the tokenizer's ids."""
    write_tiny_model(folder, "qwen2", vocab_size=vocab_size)
    tensors = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name][:vocab_size].clone()}, folder / "model.safetensors")
    return folder


def accepted(results: list[Answer]) -> int:
    """Draft tokens that were accepted in all answers."""
    return sum(result.completion.speculation.accepted_tokens for result in results)


async def test_past_the_draft_s_context_the_target_goes_on_alone(tmp_path: Path) -> None:
    """The tokens are those of plain decoding; rounds beyond say why they had no draft, and those before had one."""
    target = write_tiny_model(tmp_path / "target", "llama", vocab_size=NUM_IDS, seed=5)
    draft = write_tiny_model(tmp_path / "draft", "llama", vocab_size=NUM_IDS, seed=5, context_len=48)
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    async with running_stack(str(target), str(draft), **SIZES) as stack:
        plain = await answers(stack, PROMPTS, draft_count=0, **fields)
        results = await answers(stack, PROMPTS, draft_count=4, **fields)
    assert token_ids(results) == token_ids(plain)
    for result in results:
        # The last token of a request needs no draft in any case.
        beyond = [each.facts for each in result.rounds[:-1] if each.facts.base_len >= 48]
        assert {facts.fallback_reason for facts in beyond} == {pb.FALLBACK_REASON_DRAFT_CONTEXT}
        assert not any(facts.draft_count for facts in beyond)
        assert any(each.facts.draft_count > 0 for each in result.rounds)


async def test_paddings_of_different_width_are_never_said(tmp_path: Path) -> None:
    """As in Qwen 2.5, whose small model has narrower logits than the large one, and whose tokenizer has fewer ids."""
    # Either of the pair may be the wider one; one in five tokens would be padding if it were not masked.
    wide = write_tiny_model(tmp_path / "wide", "qwen2", vocab_size=320, seed=5)
    slim = narrow(wide, tmp_path / "slim", 264)
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    said: dict[float, list[tuple[int, ...]]] = {}
    for target, draft in ((wide, slim), (slim, wide)):
        async with running_stack(str(target), str(draft), **SIZES) as stack:
            info = await stack.info(stack.target)
            assert info.vocabulary_size == NUM_IDS
            for temperature in (0.0, 1.0):
                plain = await answers(stack, PROMPTS, temperature=temperature, draft_count=0, **fields)
                results = await answers(stack, PROMPTS, temperature=temperature, draft_count=4, **fields)
                assert token_ids(results) == token_ids(plain) == said.setdefault(temperature, token_ids(plain))
                assert all(token_id < NUM_IDS for ids in token_ids(results) for token_id in ids)
                evaluated = sum(result.completion.speculation.evaluated_tokens for result in results)
                assert accepted(results) == evaluated > 0


async def test_a_draft_of_another_type_guesses_for_an_exact_target(tmp_path: Path) -> None:
    """bfloat16 for float32 and the other way round: plain decoding's tokens, most of them guessed."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=NUM_IDS, seed=5)
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        options: dict[str, Any] = SIZES | {"dtype": dtype, "draft_options": {"dtype": other}}
        async with running_stack(str(folder), str(folder), **options) as stack:
            types = [(await stack.info(service)).weight_dtype for service in (stack.target, stack.draft)]
            plain = await answers(stack, PROMPTS, draft_count=0, **fields)
            results = await answers(stack, PROMPTS, draft_count=4, **fields)
        assert types == [dtype, other]
        assert token_ids(results) == token_ids(plain)
        assert accepted(results) > len(PROMPTS) * 12


def test_the_padded_pair_has_one_tokenizer(tmp_path: Path) -> None:
    """The two widths differ, and nothing else that a gateway compares."""
    wide = write_tiny_model(tmp_path / "wide", "qwen2", vocab_size=320)
    slim = narrow(wide, tmp_path / "slim", 264)
    widths = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (wide, slim)]
    assert widths == [320, 264]
    assert (wide / "tokenizer.json").read_text() == (slim / "tokenizer.json").read_text()
