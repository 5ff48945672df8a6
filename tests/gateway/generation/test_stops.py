"""Stop strings in pieces of text, against a reference that sees the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation.transcript import StopScanner

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)
QUIET = settings(derandomize=True)


def first_stop(text: str, stops: list[str], num_spared: int = 0) -> tuple[str, str] | None:
    """Text before the stop string that is complete first, and that stop string; looks at every end, naively."""
    for end in range(1 + num_spared, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return None


@QUIET
@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS, max_size=60))
def test_equals_the_reference_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    """The emitted text is that before the first stop string, for every way to cut the text."""
    scanner = StopScanner(stops)
    emitted = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()
    expected = first_stop("".join(pieces), stops)
    assert (emitted, scanner.found) == (expected or ("".join(pieces), None))


@QUIET
@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(LETTERS, max_size=30))
def test_never_emits_what_may_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    """Whatever stop string follows, nothing emitted so far has to be taken back, and no more is held than needed."""
    scanner, emitted, seen = StopScanner(stops), "", ""
    for piece in pieces:
        emitted += scanner.push(piece)
        seen += piece
        if scanner.found is not None:
            return
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_three_pieces() -> None:
    """The stop string is found although no piece holds it, and its beginning was never emitted."""
    scanner = StopScanner(["THE END"])
    assert [scanner.push(piece) for piece in ("so, TH", "E E", "ND and more")] == ["so, ", "", ""]
    assert scanner.found == "THE END"
    assert scanner.push("never") == scanner.flush() == ""


def test_a_false_start_is_emitted() -> None:
    """Held text comes out as soon as it cannot become a stop string any more."""
    scanner = StopScanner(["aab"])
    assert [scanner.push(piece) for piece in "aaab"] == ["", "", "a", ""]
    assert scanner.found == "aab"


def test_without_stop_strings_nothing_is_held() -> None:
    """Text passes through when there is nothing to look for."""
    assert StopScanner([]).push("at once") == "at once"


@QUIET
@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(LETTERS, max_size=30), st.integers(0, 40))
def test_what_is_complete_too_early_is_text(stops: list[str], pieces: list[str], num_spared: int) -> None:
    """Only a stop string whose last character is after the spared ones ends the text, wherever it begins."""
    scanner, seen_len, emitted = StopScanner(stops), 0, ""
    for piece in pieces:
        emitted += scanner.push(piece, num_spared=max(0, num_spared - seen_len))
        seen_len += len(piece)
    text = "".join(pieces)
    expected = first_stop(text, stops, num_spared) or (text, None)
    assert (emitted + scanner.flush(), scanner.found) == expected


NAMES = ("<a>", "<b>")


@QUIET
@given(
    st.lists(st.lists(st.sampled_from(("a", "b", *NAMES)), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.sampled_from(("a", "b", "ab", *NAMES)), max_size=30),
)
def test_names_of_special_tokens_count_where_a_stop_string_has_one(parts: list[list[str]], pieces: list[str]) -> None:
    """A stop string without a name is looked for in what clients read, one with a name in that and the names."""
    stops = ["".join(each) for each in parts]
    naming = [stop for stop in stops if "<" in stop]
    scanner, emitted, read, whole, expected = StopScanner(stops, naming), "", "", "", None
    for piece in pieces:
        emitted += scanner.push(piece, is_name=piece in NAMES)
        for character in piece:
            whole += character
            read += character * (piece not in NAMES)
            ended = [
                stop
                for stop in stops
                if (whole.endswith(stop) if "<" in stop else piece not in NAMES and read.endswith(stop))
            ]
            if ended and expected is None:
                expected = max(ended, key=len)
    assert scanner.found == expected
    emitted += scanner.flush()
    assert "<" not in emitted
    assert read.startswith(emitted)
    assert expected is not None or emitted == read


def test_the_text_of_a_stop_string_with_a_name_goes_with_it() -> None:
    """Of a match only the text before it is emitted, and of a false start all that is text."""
    scanner = StopScanner(["so<end>x"], ["so<end>x"])
    texts = [("so", False), ("<end>", True), (" so", False), ("<end>", True), ("xy", False)]
    assert [scanner.push(text, is_name=is_name) for text, is_name in texts] == ["", "", "so ", "", ""]
    assert scanner.found == "so<end>x"
