"""Line charts with intervals as SVG, panels side by side: no library that draws is light, has panels and error bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from outrider.cli.bench.common import Spread

# Okabe and Ito's colours, which most people who see colours differently can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 380, 250, 58, 64, 56
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
MOST_TICKS = 8
REFERENCE = 1.0  # a value with a line of its own: plain decoding


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines by their names, each of points: a place on the axis, and a value with its interval."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, Spread]]]


def text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    """SVG element with a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def path(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    """SVG element with a line from point to point."""
    places = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def document(width: float, height: float, drawn: Sequence[str], font_size: int = 13) -> str:
    """SVG document of elements, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        '<rect width="100%" height="100%" fill="#fff"/>'
        f'<g font-family="sans-serif" font-size="{font_size}" fill="#222">{"".join(drawn)}</g></svg>\n'
    )


def line_chart(title: str, x_title: str, y_title: str, panels: Sequence[Panel]) -> str:
    """The chart as an SVG document; all panels have the same axes.

    The x axis is logarithmic and names every place. Raises ValueError when there are no points.
    """
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    places = {x for x, _ in points}
    nearest, farthest = min(places), max(places)
    span = math.log(farthest / nearest) or 1.0
    lowest, highest = (
        min(REFERENCE, *(each.low for _, each in points)),
        max(REFERENCE, *(each.high for _, each in points)),
    )
    step = next((each for each in STEPS if (highest - lowest) / each <= MOST_TICKS - 2), STEPS[-1])
    first, last = math.floor(lowest / step), max(math.ceil(highest / step), math.floor(lowest / step) + 1)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    full_width, full_height = len(panels) * (WIDTH + LEFT) + 20, TOP + HEIGHT + BOTTOM
    drawn = [text(full_width / 2, 20, title, extra='font-weight="bold"')]

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - (value / step - first) / (last - first))

    for number, panel in enumerate(panels):
        left = LEFT + number * (WIDTH + LEFT)
        xs = {x: left + WIDTH * (0.06 + 0.88 * math.log(x / nearest) / span) for x in places}
        drawn.append(text(left + WIDTH / 2, TOP - 12, panel.title))
        for tick in range(first, last + 1):
            y, colour = y_of(tick * step), "#777" if math.isclose(tick * step, REFERENCE) else "#ddd"
            drawn += [path([(left, y), (left + WIDTH, y)], colour, 1), text(left - 6, y + 4, f"{tick * step:g}", "end")]
        drawn += [text(xs[place], TOP + HEIGHT + 16, f"{place:g}") for place in sorted(places)]
        drawn.append(text(left + WIDTH / 2, TOP + HEIGHT + 36, x_title))
        for name, line in panel.lines.items():
            # Lines are a little aside from one another, so that one interval does not hide the next.
            aside, colour = 4 * (names.index(name) - (len(names) - 1) / 2), colours[name]
            drawn.append(path([(xs[x] + aside, y_of(each.median)) for x, each in line], colour, 2))
            for place, each in line:
                x, y = xs[place] + aside, y_of(each.median)
                drawn.append(path([(x, y_of(each.low)), (x, y_of(each.high))], colour, 1))
                drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    # The legend stands below all panels, each name in the colour of its line.
    for number, name in enumerate(names):
        drawn.append(
            text(LEFT + 40 + 80 * number, full_height - 6, name, extra=f'fill="{colours[name]}" font-weight="bold"')
        )
    middle = TOP + HEIGHT / 2
    drawn.append(text(14, middle, y_title, extra=f'transform="rotate(-90 14 {middle:.1f})"'))
    return document(full_width, full_height, drawn)
