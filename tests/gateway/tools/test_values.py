"""Python's literals as models write them, of which nothing is evaluated."""

import pytest

from gateway.tools.values import MAX_DEPTH, read_calls, read_literal


def test_any_word_names_a_tool_or_a_parameter() -> None:
    """Those of Python's too, and those with signs in them that Python would compute with."""
    found = read_calls("[find-trains(from='Kiel', max-changes=1), lambda(in={'x': (1, 2)}), rest()]")
    assert found == [
        ("find-trains", {"from": "Kiel", "max-changes": 1}),
        ("lambda", {"in": {"x": [1, 2]}}),
        ("rest", {}),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\nb' \"c\"", "a\nbc"),
        (r"'\d\x41\ud83d\ude00'", r"\dA" + "\N{GRINNING FACE}"),
        ("(007)", 7),
        ("(-1.5e3,)", [-1500.0]),
        ("{'a': true, \"b\": None,}", {"a": True, "b": None}),
    ],
)
def test_a_literal_is_what_it_is_in_python(text: str, value: object) -> None:
    """And what models write beside that: line ends in strings, JSON's words, zeros before a number."""
    assert read_literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1 -1",
            "1, 2",
            "f()",
            "x[0]",
            "{'a'}",
            "{1: 2}",
            "{'a': 1, 'a': 2}",
            "b'a'",
            "1e999",
            "'a' # b",
            "word",
            "(",
        ),
        "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
        "[" * 10_000,
        "1" + " -1" * 10_000,
        "9" * 5_000,
    ],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    """However large it is."""
    with pytest.raises(ValueError):  # noqa: PT011 - what it says is read by nobody
        read_literal(text)


@pytest.mark.parametrize("text", ["f()", "[1]", "[f(1)]", "[f(a=1, a=2)]", "[f(a=1)(b=2)]", "[f(a=g())]", "[f(a=1)"])
def test_what_is_no_list_of_calls_is_refused(text: str) -> None:
    """Every argument has a name, once, and is a literal."""
    with pytest.raises(ValueError):  # noqa: PT011 - what it says is read by nobody
        read_calls(text)
