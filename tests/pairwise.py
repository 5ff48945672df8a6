"""Few rows in which every pair of values of any two parameters occurs: greedy all-pairs, without any randomness.

Most faults of parameters need two of them at most, and the pairs fit into as many rows as the two longest parameters
have pairs, or a few more. Knows nothing about what the parameters mean, but which pairs must not be.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

# A parameter by its number, and the number of its value.
Choice = tuple[int, int]
Pair = tuple[Choice, Choice]
Allowed = Callable[[str, Any, str, Any], bool]


def everything_goes(*_: Any) -> bool:
    """No pair of values is forbidden."""
    return True


def all_pairs(parameters: Mapping[str, Sequence[Any]], allowed: Allowed = everything_goes) -> list[dict[str, Any]]:
    """Rows with a value for each parameter. `allowed` gets two parameters in their order, each with a value.

    Raises ValueError when a row cannot be completed, because every value is forbidden beside those in it.
    """
    names = list(parameters)
    sizes = [len(parameters[name]) for name in names]

    def fits(first: Choice, second: Choice) -> bool:
        (one, this), (other, that) = sorted((first, second))
        return allowed(names[one], parameters[names[one]][this], names[other], parameters[names[other]][that])

    # A mapping, because its order is that in which they were put in, which a set's is not.
    missing = {pair: None for pair in _pairs(sizes) if fits(*pair)}
    rows = []
    while missing:
        row = _row(sizes, missing, fits)
        for pair in combinations(row, 2):
            missing.pop(pair, None)
        rows.append({names[number]: parameters[names[number]][value] for number, value in row})
    return rows


def missing_pairs(parameters: Mapping[str, Sequence[Any]], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Pairs of values that no row has."""
    return [
        (one, this, other, that)
        for one, other in combinations(parameters, 2)
        for this, that in product(parameters[one], parameters[other])
        if not any(row[one] == this and row[other] == that for row in rows)
    ]


def _pairs(sizes: Sequence[int]) -> Iterator[Pair]:
    for one, other in combinations(range(len(sizes)), 2):
        for this in range(sizes[one]):
            yield from (((one, this), (other, that)) for that in range(sizes[other]))


def _row(sizes: Sequence[int], missing: Mapping[Pair, None], fits: Callable[[Choice, Choice], bool]) -> list[Choice]:
    """A row that begins with the first missing pair; every further value makes up as many of them as it can."""
    row = list(next(iter(missing)))

    def gain(choice: Choice) -> int:
        return sum(tuple(sorted((choice, each))) in missing for each in row)

    for number in sorted(set(range(len(sizes))) - {taken for taken, _ in row}):
        choices = [(number, value) for value in range(sizes[number])]
        fitting = [choice for choice in choices if all(fits(choice, each) for each in row)]
        if not fitting:
            raise ValueError(f"no value of parameter {number} fits into {row}")
        row.append(max(fitting, key=gain))
    return sorted(row)
