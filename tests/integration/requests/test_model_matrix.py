"""Every family through real services: what transformers' own generate says, with speculation and without.

The draft is the target with rounded weights, which guesses well and not always; so both accepted and refused tokens
come about, and a draft of another type is tested with each family. Models with experts guess in their own process too.
"""

from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_heads import change, specforge
from support.models.tiny_models import write_tiny_model
from support.stack import answers, first_difference_is_near_tie, greedy_reference, running_stack, token_ids

PROMPTS = (
    "Once upon a time there was a miller",
    "The fox said to the wolf, and he went on",
    "A",
    "Nobody knew where the shoemaker's elves had gone when winter came",
)
MAX_TOKENS = 24
DRAFT_COUNTS = (0, 3, 8)
# Texts are a byte a token, so that windows of these lengths end within them.
THETA = {"rope_theta": 1000.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2": ("llama", {"rope_parameters": THETA | {"rope_type": "llama3", **LLAMA3}, "tie_word_embeddings": True}),
    "qwen-2.5": ("qwen2", {"tie_word_embeddings": False}),
    "smollm2": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 3}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25, "hidden_size": 64}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {}),
}
WITH_EXPERTS, OWN_DRAFTERS = ("qwen3_moe", "gpt_oss"), ("eagle3", "layer_skip", "lookahead")
"""Cases whose target guesses in its own process too, and by what."""


def own_options(folder: Path) -> dict[str, Any]:
    """Options of a target of three layers that guesses in its own process, by a head of its features too."""
    head = change(specforge(folder, ids=(0, 1), vocab_size=257), tensors={"t2d": None})
    return {"head": str(head), "exit_layer": 1, "lookahead": True}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """In float32, four requests at once, with 0, 3 and 8 guesses of a bfloat16 draft; those of others change none."""
    family, overrides = CASES[case]
    folder = write_tiny_model(tmp_path / case, family, vocab_size=257, seed=5, **overrides)
    reference = greedy_reference(folder, PROMPTS, MAX_TOKENS)
    sizes: dict[str, Any] = {"dtype": "float32", "kv_tokens": 2048}
    own = OWN_DRAFTERS if case in WITH_EXPERTS else ()
    sizes["target_options"] = own_options(tmp_path / "head") if own else {}
    async with running_stack(str(folder), str(folder), draft_options={"dtype": "bfloat16"}, **sizes) as stack:
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        by_count = {count: await answers(stack, PROMPTS, draft_count=count, **fields) for count in DRAFT_COUNTS}
        drawn = fields | {"temperature": 0.8}
        drawn_plain = token_ids(await answers(stack, PROMPTS, draft_count=0, **drawn)) if own else []
        by_drafter = {
            each: [await answers(stack, PROMPTS, draft_count=4, drafter=each, **asked) for asked in (fields, drawn)]
            for each in own
        }
        info = await stack.info(stack.draft)
    assert info.weight_dtype == "bfloat16"
    plain = token_ids(by_count[0])
    for prompt, ours, theirs in zip(PROMPTS, plain, reference, strict=True):
        assert first_difference_is_near_tie(folder, prompt, ours, theirs) is None
    for count in DRAFT_COUNTS[1:]:
        assert token_ids(by_count[count]) == plain, f"{count} draft tokens"
        accepted = sum(answer.completion.speculation.accepted_tokens for answer in by_count[count])
        assert accepted > 0
    for drafter, (greedy, sampled) in by_drafter.items():
        assert (token_ids(greedy), token_ids(sampled)) == (plain, drawn_plain), drafter
        assert sum(answer.completion.speculation.draft_tokens for answer in greedy + sampled) > 0, drafter
