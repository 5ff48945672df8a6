"""Figures of the source itself: sizes, folders, one-use helpers, names, prose, and the files that a token passes.

    python -m bench.house [--root DIR] [--static] [--shapes FILE] [--json FILE]

Prints a Markdown table of the figures with their goals, and below it what was counted. For the files on a token's path
a stack serves the embedded pair, and its processes note which functions run while one request is streamed; --static
leaves that out. The tree under --root needs its kernels built; it may be of any version.
"""

import argparse
import json
from pathlib import Path

from bench.house.figures import class_names, shapes, sizes, uses
from bench.house.prose import prose
from bench.house.source import Figure, read_sources
from bench.house.stack import token_path

# The classes on the way of a request and of a verdict, under the names that a checkout gives them.
SHAPES = Path("bench/shapes.json")


def row(figure: Figure) -> str:
    """A row of the Markdown table."""
    goal = "" if figure.goal is None else f"at most {figure.goal:,g}"
    return f"| {figure.name} | {figure.value:,.10g} | {goal} | {figure.verdict} |"


def main() -> None:
    """Prints the figures as a table, each with its goal, and below it the places that were counted."""
    here = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=here, help="the checkout to measure")
    parser.add_argument("--static", action="store_true", help="start nothing")
    parser.add_argument("--shapes", type=Path, help="names of its classes; by default its bench/shapes.json")
    parser.add_argument("--json", type=Path, help="where the same goes as JSON")
    options = parser.parse_args()
    root = options.root.resolve()
    sources = read_sources(root)
    figures = [*sizes(root, sources), *uses(sources), *class_names(sources), *prose(sources)]
    table = options.shapes or root / SHAPES
    if table.exists() or options.shapes:
        figures += shapes(root, json.loads(table.read_text()))
    if not options.static:
        figures += token_path(root, sources)
    print("| figure | value | goal | |", "| --- | --- | --- | --- |", *map(row, figures), sep="\n")
    for each in figures:
        if each.listed:
            print(f"\n{each.name}:\n", *(f"- {line}" for line in each.listed), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
