"""Reading rotary keys: two spellings, the context that a scaling makes, and one sentence for each that is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.models.model_cases import SCALINGS

from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from outrider.engine.models.rope_keys import RopeRule, Ropes, partial_rope, read_rope, rope_by_window
from outrider.errors import ModelRefused

LLAMA3 = SCALINGS["llama3"]
YARN = SCALINGS["yarn"]


def read(head_dim: int = 16, **values: Any) -> Rope:
    """The embedding of a file with these keys and 64 positions."""
    return read_rope(JsonKeys(Path("config.json"), json.loads(json.dumps(values))), 64, head_dim)


@pytest.mark.parametrize("parameters", SCALINGS.values(), ids=SCALINGS)
def test_spellings_mean_the_same(parameters: dict[str, Any]) -> None:
    """Everything in `rope_parameters`, or `rope_scaling` with `type` or `rope_type` and `rope_theta` beside it."""
    new = read(rope_parameters={"rope_theta": 5e5, **parameters})
    old = {key: value for key, value in parameters.items() if key != "rope_type"}
    assert new.theta == 5e5
    assert new == read(rope_theta=5e5, rope_scaling={"type": parameters["rope_type"], **old})
    assert new == read(rope_theta=5e5, rope_scaling=parameters)
    assert new == read(rope_theta=5e5, rope_parameters=parameters)
    assert new == read(
        rope_theta=1.0, rope_scaling={"rope_theta": 5e5, **parameters}, rope_parameters={"rope_type": "x"}
    )


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    """Nothing, null, and an object without a type: the unscaled embedding."""
    for values in ({}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_scaling": {"type": "default"}}):
        assert read(**values) == Rope(theta=10000.0)


def test_every_key_is_read() -> None:
    """Values that are not the defaults."""
    assert read(rope_scaling={"type": "linear", "factor": 3}) == LinearRope(theta=10000.0, factor=3.0)
    assert read(rope_scaling={"type": "dynamic", "factor": 3}) == DynamicRope(
        theta=10000.0, factor=3.0, original_len=64
    )
    assert read(rope_scaling=LLAMA3) == Llama3Rope(
        theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=64
    )
    keys = {"attention_factor": 0.5, "beta_fast": 20, "beta_slow": 2, "truncate": False}
    assert read(rope_scaling={**YARN, **keys}) == YarnRope(
        theta=10000.0,
        amplitude=0.5,
        factor=4.0,
        original_len=64,
        beta_fast=20.0,
        beta_slow=2.0,
        truncate=False,
    )


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_the_original_length_beside_the_other_keys_wins(scaling: dict[str, Any]) -> None:
    """As transformers takes it from the files of Phi-3 and those like them."""
    rope = read(rope_scaling=scaling, original_max_position_embeddings=32)
    assert isinstance(rope, Llama3Rope | YarnRope)
    assert rope.original_len == 32


@pytest.mark.parametrize(
    ("scaling", "context_len"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "dynamic", "factor": 2.5}, 160),
        (LLAMA3 | {"original_max_position_embeddings": 16}, 64),
        (YARN | {"original_max_position_embeddings": 32}, 128),
        (YARN | {"original_max_position_embeddings": 16}, 64),
    ],
)
def test_context_lengths_are_those_of_vllm(scaling: dict[str, Any], context_len: int) -> None:
    """Linear and dynamic stretch the file's positions, YaRN its original ones, and Llama 3 files count scaled ones."""
    assert read(rope_scaling=scaling).context_len(64) == context_len


@pytest.mark.parametrize(
    ("scaling", "key", "words"),
    [
        ({"type": "longrope", "factor": 4.0}, "rope_type", "'longrope', but must be one of default, linear"),
        ({"type": "su"}, "rope_type", "'su'"),
        ({"type": "mrope"}, "rope_type", "'mrope'"),
        ({"rope_type": ["linear"]}, "rope_type", "['linear']"),
        ({"type": "linear"}, "factor", "is missing"),
        ({"type": "dynamic"}, "factor", "is missing"),
        ({"type": "linear", "factor": 0.5}, "factor", "is 0.5, but must be a number of at least 1"),
        ({"type": "linear", "factor": float("nan")}, "factor", "nan"),
        ({"type": "linear", "factor": float("inf")}, "factor", "inf"),
        ({"type": "linear", "factor": 10**400}, "factor", "at least 1"),
        ({"type": "linear", "factor": "2"}, "factor", "'2'"),
        ({"type": "linear", "factor": True}, "factor", "True"),
        (YARN | {"original_max_position_embeddings": None}, "original_max_position_embeddings", "is missing"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings", "is 0"),
        (YARN | {"original_max_position_embeddings": 64.0}, "original_max_position_embeddings", "an integer"),
        (YARN | {"attention_factor": -1.0}, "attention_factor", "positive"),
        (YARN | {"mscale": -1.0}, "mscale", "at least 0"),
        (YARN | {"mscale_all_dim": "1"}, "mscale_all_dim", "'1'"),
        (YARN | {"beta_fast": 0.5}, "beta_fast", "at least the beta_slow 1"),
        (YARN | {"beta_slow": 0}, "beta_slow", "positive"),
        (YARN | {"truncate": 1}, "truncate", "true or false"),
        (YARN | {"rope_theta": 1}, "rope_theta", "more than 1"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor", "is missing"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "above the low_freq_factor 1"),
        (LLAMA3 | {"original_max_position_embeddings": None}, "original_max_position_embeddings", "is missing"),
        ({"rope_theta": float("nan")}, "rope_theta", "positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole heads"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_unsound_scalings_are_refused(spelling: str, scaling: dict[str, Any], key: str, words: str) -> None:
    """One sentence with the file, the key where it lies, and the fault."""
    with pytest.raises(ModelRefused) as caught:
        read(**{spelling: scaling})
    assert f'config.json: "{spelling}.{key}" ' in caught.value.message
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def read_by(rule: RopeRule, **values: Any) -> Ropes:
    """The embeddings of a file with these keys, 256 positions and heads of 20."""
    return rule(JsonKeys(Path("config.json"), json.loads(json.dumps(values))), 256, 20)


def test_two_embeddings_are_read_in_both_spellings() -> None:
    """Gemma 3's: that of layers with a window is never scaled by the other's keys, and a scaling adds no positions."""
    scaling, found = (
        {"rope_type": "linear", "factor": 8.0},
        Ropes(LinearRope(theta=5e5, factor=8.0), Rope(theta=7.0), 256),
    )
    nested = {"full_attention": scaling | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7.0}}
    assert read_by(rope_by_window, rope_parameters=nested) == found
    assert read_by(rope_by_window, rope_theta=5e5, rope_local_base_freq=7.0, rope_scaling=scaling) == found
    assert read_by(rope_by_window) == Ropes(Rope(theta=1e6), Rope(theta=1e4), 256)


LONG = {"rope_type": "longrope", "short_factor": [1, 2, 3, 4, 5, 6], "long_factor": [9.0] * 6}


def test_longrope_is_read_as_far_as_its_short_factors_go() -> None:
    """Phi's: the original positions beside the scaling, in older files under other names, and its amplitude."""
    amplitude = math.sqrt(1 + math.log(4) / math.log(64))
    rope = LongRope(theta=5e5, share=0.6, amplitude=amplitude, original_len=64, divisors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    both = {"rope_theta": 5e5, "partial_rotary_factor": 0.6, "original_max_position_embeddings": 64}
    for spelled in ({"rope_parameters": LONG | both}, {"rope_scaling": LONG} | both):
        assert read_by(partial_rope, **spelled) == Ropes(rope, rope, 64)
    for name in ("su", "yarn"):
        assert read_by(partial_rope, rope_scaling=LONG | {"type": name, "rope_type": None}, **both).unlimited == rope
    stated = LONG | {"attention_factor": 1.25, "factor": 32.0}
    assert read_by(partial_rope, rope_scaling=stated, **both).unlimited.amplitude == 1.25
    assert read_by(partial_rope, partial_rotary_factor=0.5) == Ropes(*(Rope(theta=10000.0, share=0.5),) * 2, 256)


@pytest.mark.parametrize(
    ("rule", "values", "key", "words"),
    [
        (
            rope_by_window,
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters",
            "an entry for each kind of layer",
        ),
        (
            rope_by_window,
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters.full_attention",
            "is not an object",
        ),
        (rope_by_window, {"rope_scaling": "linear"}, "rope_scaling", "is not an object"),
        (rope_by_window, {"rope_scaling": {"type": "linear"}}, "rope_parameters.full_attention.factor", "is missing"),
        (rope_by_window, {"rope_local_base_freq": 0}, "rope_local_base_freq", "positive"),
        (partial_rope, {"partial_rotary_factor": 0.55}, "partial_rotary_factor", "must make an even number"),
        (partial_rope, {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "must make an even number"),
        (
            partial_rope,
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling.rope_type",
            "'linear', but must",
        ),
        (partial_rope, {"rope_scaling": LONG}, "rope_scaling.original_max_position_embeddings", "is missing"),
        (
            partial_rope,
            {"rope_scaling": LONG, "original_max_position_embeddings": 64},
            "rope_scaling.short_factor",
            "a list of 10 positive numbers",
        ),
    ],
)
def test_unsound_embeddings_of_such_families_are_refused(
    rule: RopeRule, values: dict[str, Any], key: str, words: str
) -> None:
    """One sentence with the key and the fault."""
    with pytest.raises(ModelRefused) as caught:
        read_by(rule, **values)
    assert f'config.json: "{key}" ' in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "all layers"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "whole heads"),
        ({"partial_rotary_factor": [1]}, "partial_rotary_factor", "whole heads"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "head_dim", "at least 4"),
    ],
)
def test_what_lies_beside_the_scaling_is_refused_too(values: dict[str, Any], key: str, words: str) -> None:
    """No object, embeddings by kind of layer, partial rotation, heads without a second pair."""
    with pytest.raises(ModelRefused, match=words) as caught:
        read(values.pop("head_dim", 16), **values)
    assert f'config.json: "{key}" ' in caught.value.message
