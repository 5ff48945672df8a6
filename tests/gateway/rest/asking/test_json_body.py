"""A body that is no JSON, or holds what no request may, is one error, which names the place."""

import pytest

from gateway.rest.asking.json_body import read_json
from outrider.errors import OutriderError

DEPTH = 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "The body names 'c' twice in one object"),
        (b'{"temperature": NaN}', "temperature is nan, but must be a finite number"),
        (b'{"a": [1, {"b": -Infinity}]}', "a.1.b is -inf, but must be a finite number"),
        (b'{"top_p": 1e999}', "top_p is inf, but must be a finite number"),
        (b'{"a": ["\\ud800"]}', "a.0 is '\\ud800', but must be text without lone surrogates"),
        (b'{"a": "\\u00e4", "b": "\\uDBFF"}', "b is '\\udbff', but must be text without lone surrogates"),
        (b'{"\\udfff": 1}', "body has the key '\\udfff', which is not text"),
        (b'{"a": \xff}', "The body is not UTF-8: byte 6 is 0xff"),
        (b'{"a":\n }', "The body is not JSON: expecting value in line 2, column 2"),
        (b"\xef\xbb\xbf{}", "The body is not JSON: unexpected utf-8 bom (decode using utf-8-sig) in line 1, column 1"),
        (b"[" * 9 + b"]" * 9, "The body nests values more than 8 deep"),
        (b"[" * 100_000 + b"]" * 100_000, "The body nests values more than 8 deep"),
        (b'{"a": [' + b"9" * 5000 + b"]}", "a.0 is inf, but must be a finite number"),
        (b'{"a": ' + b"9" * 5000, "The body is not JSON: expecting ',' delimiter in line 1, column 5007"),
        (b"[" + b"9" * 5000 + b"," + b"[" * 100_000, "The body nests values more than 8 deep"),
        (b'{"' + b"x" * 5000 + b'": NaN}', f"{'x' * 197}... is nan, but must be a finite number"),
    ],
)
def test_a_fault_is_named_with_its_place(text: bytes, sentence: str) -> None:
    """What Python lets through, or fails on without a word, is an error of the caller."""
    with pytest.raises(OutriderError) as raised:
        read_json(text, DEPTH)
    assert raised.value.message == sentence
    assert raised.value.status == "INVALID_ARGUMENT"


def test_what_is_in_order_is_read() -> None:
    """The deepest nesting that is allowed, equal keys in different objects, and characters beyond the first plane."""
    assert read_json(b"[" * DEPTH + b"]" * DEPTH, DEPTH) is not None
    assert read_json('{"a": {"k": "\\ud83d\\ude00"}, "b": {"k": "é"}}'.encode(), DEPTH) == {
        "a": {"k": "\N{GRINNING FACE}"},
        "b": {"k": "é"},
    }
