"""docs/options.md is what the settings of the three processes declare."""

from options_page import PAGE, page


def test_the_page_is_what_is_declared() -> None:
    """`make options` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page()
