"""What model files recommend, which of it is served, and what an operator says over it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import write_tiny_model
from support.stack import TARGET

from outrider.errors import InvalidRequest
from outrider.model_files.generation_defaults import ModelDefaults, OperatorDefaults
from outrider.parameters import GenerationDefaults

FLAG = "--generation-defaults"


def told(folder: Path, text: str) -> ModelDefaults:
    """What is read of a folder with this generation_config.json."""
    (folder / "generation_config.json").write_text(text)
    return ModelDefaults.read(folder)


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "max_new_tokens": 300},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "max_tokens": 300},
        ),
        ({"repetition_penalty": 1.05, "eos_token_id": [1, 2]}, {"repetition_penalty": 1.05}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"top_k": -1, "temperature": 1}, {"top_k": 0, "temperature": 1.0}),
        ({}, {}),
    ],
)
def test_a_folder_says_what_generation_config_says(
    tmp_path: Path, config: dict[str, Any], stated: dict[str, Any]
) -> None:
    """Null is nothing, greedy decoding is temperature 0, and what was not said stays neutral."""
    read = told(tmp_path, json.dumps(config))
    assert (read.defaults.stated, read.faults) == (stated, ())
    assert read.defaults == GenerationDefaults(**stated)


def test_a_folder_without_the_file_recommends_nothing() -> None:
    """The embedded target's says nothing of sampling, and another folder has none."""
    assert ModelDefaults.read(Path(TARGET)) == ModelDefaults() == ModelDefaults.read(Path(TARGET).parent)


BAD = (*("-1", "NaN", "Infinity", "-Infinity", "101", '"x"', '"0.7"', "true", "[0.7]", "{}", "1e999", "1" + 400 * "0"),)


@pytest.mark.parametrize("value", BAD)
def test_a_value_that_no_request_could_have_is_left_out(tmp_path: Path, value: str) -> None:
    """One sentence names the file, the key, the value and the limit; what is right beside it counts."""
    read = told(tmp_path, f'{{"temperature": {value}, "top_p": 0.9}}')
    assert read.defaults.stated == {"top_p": 0.9}
    [fault] = read.faults
    assert fault.startswith(f"{tmp_path / 'generation_config.json'}: temperature is ")
    assert "which is left out, for it must be " in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("top_k", each) for each in ("-2", "0.5", "50.5", "true", '"5"', "4294967296")),
        *(("top_p", each) for each in ("0", "1.01", "-0.1", "NaN", '"x"')),
        *(("min_p", each) for each in ("-0.1", "1.5", "[]")),
        *(("repetition_penalty", each) for each in ("0", "-1", "1000", "NaN")),
        *(("max_new_tokens", each) for each in ("0", "-5", "1.5", "99999999999")),
        *(("do_sample", each) for each in ('"false"', "0", "[]")),
    ],
)
def test_so_is_a_bad_value_of_every_key(tmp_path: Path, key: str, value: str) -> None:
    """By the name that the file has for it."""
    read = told(tmp_path, f'{{"{key}": {value}}}')
    assert read.defaults.stated == {}
    [fault] = read.faults
    assert f": {key} is " in fault


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"', "\x00", "[" * 100_000])
def test_a_file_that_cannot_be_read_is_one_fault(tmp_path: Path, text: str) -> None:
    """Whether its model can be served at all is not said here."""
    read = told(tmp_path, text)
    assert read.defaults.stated == {}
    assert len(read.faults) == 1


def test_a_gguf_file_says_what_its_keys_say(tmp_path: Path) -> None:
    """Its numbers have the digits that were meant, and a bad one is left out."""
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    folder = write_tiny_model(tmp_path / "model", "llama")
    file = write_gguf(
        folder,
        tmp_path / "small.gguf",
        edit=lambda metadata, _: metadata.update({f"general.sampling.{name}": value for name, value in said.items()}),
    )
    read = ModelDefaults.read(file)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    assert (read.defaults.stated, read.faults) == (expected, ())
    bad = write_gguf(
        folder,
        tmp_path / "bad.gguf",
        edit=lambda metadata, _: metadata.update({"general.sampling.temp": "hot", "general.sampling.top_k": -1}),
    )
    read = ModelDefaults.read(bad)
    assert read.defaults.stated == {"top_k": 0}
    assert read.faults == (f"{bad}: general.sampling.temp is 'hot', which is left out, for it must be a valid number",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"temperature": 0.6, "top_k": 20}),
        ("temperature=0.2, top_p=0.9", {"temperature": 0.2, "top_k": 20, "top_p": 0.9}),
        ("none", {}),
        ("none,top_k=5", {"top_k": 5}),
        ("temperature=0.2,none,min_p=0.1", {"min_p": 0.1}),
        ("temperature=0.2,temperature=0", {"temperature": 0.0, "top_k": 20}),
        (
            "max_tokens=7,repetition_penalty=1.1",
            {"temperature": 0.6, "top_k": 20, "max_tokens": 7, "repetition_penalty": 1.1},
        ),
    ],
)
def test_an_operator_has_the_last_word(text: str, expected: dict[str, Any]) -> None:
    """Value by value over the model's, or without any of these."""
    model = GenerationDefaults(temperature=0.6, top_k=20)
    assert OperatorDefaults.parse(FLAG, text).over(model).stated == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("temperature=-1", "--generation-defaults temperature is -1, but must be greater than or equal to 0"),
        ("top_k=0.5", "--generation-defaults top_k is 0.5, but must be a valid integer"),
        ("top_p=nan", "--generation-defaults top_p is nan, but must be a finite number"),
        *(
            (text, f"--generation-defaults is '{text}', but must be NAME=VALUE with commas between, of temperature,")
            for text in ("temperature", "temperature=", "=1", "seed=1", "auto", "temperature=hot", "temperature:1")
        ),
    ],
)
def test_what_an_operator_cannot_say_is_refused(text: str, sentence: str) -> None:
    """By name, value and limit."""
    with pytest.raises(InvalidRequest) as refused:
        OperatorDefaults.parse(FLAG, text)
    assert str(refused.value).startswith(sentence)
