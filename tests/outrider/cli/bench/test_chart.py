"""The chart as a document: what lies where."""

from xml.etree import ElementTree

import pytest

from outrider.cli.bench.chart import Panel, line_chart
from outrider.cli.bench.common import Spread


def marks(drawn: str) -> list[tuple[float, float]]:
    """Centres of the points, in their order; raises ParseError about what is no XML."""
    circles = (each for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("circle"))
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in circles]


def test_values_rise_and_places_are_logarithmic() -> None:
    """A larger value stands higher, and from 1 to 4 it is as far as from 4 to 16."""
    line = [(1, Spread(0.9, 1.0, 1.1, 3)), (4, Spread(1.4, 1.5, 1.6, 3)), (16, Spread(1.9, 2.0, 2.1, 3))]
    points = marks(line_chart("Title", "x", "y", [Panel("panel", {"auto": line})]))
    (one, low), (four, middle), (sixteen, high) = points
    assert low > middle > high
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert four - one == pytest.approx(sixteen - four, abs=0.2)


def test_words_are_escaped_and_one_place_is_enough() -> None:
    """Names come from users' folders, and a run may have one load, where nothing differs."""
    drawn = line_chart("a <b> & c", "x", "y", [Panel("p", {"K = 2": [(1, Spread(1.0, 1.0, 1.0, 1))]})])
    assert "a &lt;b&gt; &amp; c" in drawn
    assert len(marks(drawn)) == 1


def test_a_chart_of_nothing_is_an_error() -> None:
    """And no empty document."""
    with pytest.raises(ValueError, match="empty"):
        line_chart("Title", "x", "y", [Panel("panel", {})])
