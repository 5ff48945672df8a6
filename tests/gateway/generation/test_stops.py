"""Stop strings in pieces of text, against a reference that sees the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation.transcript import StopScanner

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)
QUIET = settings(deadline=None, derandomize=True)


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """Text before the stop string that is complete first, and that stop string; looks at every end, naively."""
    for end in range(1, len(text) + 1):
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
