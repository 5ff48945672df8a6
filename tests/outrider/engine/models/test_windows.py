"""Which layers have a sliding window: what transformers makes of the same keys, or one sentence for a refusal."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from outrider.engine.models.config import (
    Windows,
    most_layers,
    no_windows,
    read_windows,
    same_in_every_layer,
    switched_by_layer,
)
from outrider.engine.models.json_keys import JsonKeys
from outrider.errors import ModelRefused

RULES = {
    "llama": no_windows,
    "mistral": same_in_every_layer,
    "qwen": switched_by_layer,
    "gemma": most_layers,
}
ON = {"use_sliding_window": True, "sliding_window": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(rule: str, values: dict[str, Any], context_len: int = 100_000) -> Windows:
    """The windows of a model with three layers."""
    return read_windows(JsonKeys(Path("config.json"), values), 3, context_len, RULES[rule])


@pytest.mark.parametrize(
    ("rule", "values", "windows"),
    [
        ("llama", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 3}, (8, 8, 8)),
        ("qwen", {}, (None, None, None)),
        ("qwen", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        ("qwen", ON, (None, None, None)),
        ("qwen", ON | {"max_window_layers": 1}, (None, 8, 8)),
        ("qwen", ON | {"max_window_layers": 0}, (8, 8, 8)),
        ("qwen", ON | {"sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        ("qwen", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ("qwen", ON | {"layer_types": [SLIDING, FULL, SLIDING]}, (8, None, 8)),
        ("qwen", {"layer_types": [FULL] * 3}, (None, None, None)),
        ("gemma", {"sliding_window": 8}, (8, 8, 8)),
        ("gemma", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8)),
        ("gemma", {"sliding_window_pattern": 1}, (None, None, None)),
        (
            "gemma",
            {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": [FULL, FULL, SLIDING]},
            (None, None, 8),
        ),
    ],
)
def test_windows_by_layer(rule: str, values: dict[str, Any], windows: Windows) -> None:
    """Switches, defaults, null, and types of layers."""
    assert read(rule, values) == windows


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("window", [8, None])
@pytest.mark.parametrize("first", [0, 2, 3, 28])
@pytest.mark.parametrize("config_class", [transformers.Qwen2Config, transformers.Qwen3Config])
def test_qwen_agrees_with_the_types_that_transformers_derives(
    config_class: Any, use: bool, window: int | None, first: int
) -> None:
    """From the older keys, and again from what transformers writes for them."""
    values = {"use_sliding_window": use, "sliding_window": window, "max_window_layers": first}
    theirs = config_class(num_hidden_layers=3, **values)
    expected = tuple(theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types)
    assert read("qwen", values) == expected
    assert read("qwen", theirs.to_dict()) == expected


def test_a_window_that_hides_nothing_is_none() -> None:
    """The row at position 7 of a context of 8 sees 8 positions."""
    assert read("mistral", {"sliding_window": 8}, context_len=8) == (None, None, None)
    assert read("mistral", {"sliding_window": 8}, context_len=9) == (8, 8, 8)


@pytest.mark.parametrize(
    ("rule", "values", "key", "words"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window", "is 0, but must be an integer of at least 1"),
        ("mistral", {"sliding_window": "8"}, "sliding_window", "'8'"),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}, "layer_types", "of layer 1"),
        ("llama", {"sliding_window": 8, "layer_types": [FULL, FULL, SLIDING]}, "layer_types", "of layer 2"),
        ("qwen", {"layer_types": [FULL, FULL, SLIDING]}, "layer_types", "no window is switched on"),
        ("qwen", ON | {"layer_types": [FULL, SLIDING]}, "layer_types", "each of 3 layers"),
        ("qwen", ON | {"layer_types": "full_attention"}, "layer_types", "each of 3 layers"),
        ("qwen", ON | {"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types", "'chunked_attention'"),
        ("qwen", ON | {"layer_types": [FULL, [], FULL]}, "layer_types", "names []"),
        ("qwen", ON | {"max_window_layers": -1}, "max_window_layers", "at least 0"),
        ("qwen", {"use_sliding_window": 1}, "use_sliding_window", "true or false"),
        ("gemma", {"sliding_window": None}, "sliding_window", "is null, but there are layers of sliding_attention"),
        (
            "gemma",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern",
            "is 0, but must be an integer of at least 1",
        ),
        ("gemma", {"layer_types": [FULL, FULL, "linear"]}, "layer_types", "'linear', which is not served"),
    ],
)
def test_unsound_windows_are_refused(rule: str, values: dict[str, Any], key: str, words: str) -> None:
    """One sentence with the file, the key and the fault."""
    with pytest.raises(ModelRefused) as caught:
        read(rule, values)
    assert f'config.json: "{key}" ' in caught.value.message
    assert words in caught.value.message
