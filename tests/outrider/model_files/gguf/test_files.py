"""Names of GGUF files."""

import pytest

from outrider.model_files.gguf.files import model_stem


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen2.5-7B-Instruct-Q4_K_M-00001-of-00003.gguf", "Qwen2.5-7B-Instruct"),
        ("Llama-3.2-1B-IQ3_XXS.gguf", "Llama-3.2-1B"),
        ("Model.i1-Q5_K_S.gguf", "Model"),
        ("Model-UD-Q4_K_XL.gguf", "Model"),
        ("gemma-f16.gguf", "gemma"),
        ("gemma_BF16.GGUF", "gemma"),
        ("gpt-MXFP4_MOE.gguf", "gpt"),
        ("Model-TQ1_0.gguf", "Model"),
        ("Model-Q8_0-fast.gguf", "Model-Q8_0-fast"),
        ("Qwen2.5-7B.gguf", "Qwen2.5-7B"),
        ("Quiet-Q.gguf", "Quiet-Q"),
        ("FAQ8.gguf", "FAQ8"),
        ("Q8_0.gguf", "Q8_0"),
    ],
)
def test_a_model_is_called_without_how_it_is_quantised(file: str, name: str) -> None:
    """Its file's name without suffix, part and the types of llama.cpp; what only looks like one stays."""
    assert model_stem(file) == name
