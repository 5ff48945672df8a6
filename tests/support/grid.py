"""The parameters of a request with the values that the grid takes of each, and few rows that hold every pair of them.

The rows come from greedy all-pairs, without any randomness.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from outrider.v1 import types_pb2 as pb

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


MATCH, RATIO, BLOCK = pb.ACCEPTANCE_RULE_MATCH, pb.ACCEPTANCE_RULE_RATIO, pb.ACCEPTANCE_RULE_BLOCK
LENIENT, TYPICAL = pb.ACCEPTANCE_RULE_LENIENT, pb.ACCEPTANCE_RULE_TYPICAL
EOS = 0
STORY = "Once upon a time there was a king who had"
STORY_TOKENS = [2256, 677, 259, 513, 443, 307, 259, 540, 390, 337]
BANNED_WORDS = ["the", "a", "daughters", "woodcutter"]
STOP = " and"
Row = Mapping[str, Mapping[str, Any]]

RULES = {"match": MATCH, "ratio": RATIO, "block": BLOCK, "lenient": LENIENT, "typical": TYPICAL}
# A factor of 1 makes `lenient` the same as `ratio`.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lenient": [{}, {"acceptance": pb.AcceptanceSettings(lenience=1.0)}],
    "typical": [{}, {"acceptance": pb.AcceptanceSettings(typical_epsilon=0.5, typical_delta=0.9)}],
}
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "speculation": [{"draft_count": 4}, {"draft_count": 1}, {"draft_count": 0}, {}, {"enabled": False}],
    "drafter": [{}, {"drafter": "model"}, {"drafter": "coupled"}, {"drafter": "sampled"}],
    "temperature": [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.4}],
    "top_k": [{}, {"top_k": 20}, {"top_k": 1}],
    "top_p": [{}, {"top_p": 0.9}],
    "min_p": [{}, {"min_p": 0.05}],
    "repetition_penalty": [{}, {"repetition_penalty": 1.3}],
    "presence_penalty": [{}, {"presence_penalty": 0.8}, {"presence_penalty": -0.8}],
    "frequency_penalty": [{}, {"frequency_penalty": 0.5}, {"frequency_penalty": -0.5}],
    "logit_bias": [{}, {"logit_bias": {12: 6.0, 259: -6.0}}, {"logit_bias": {EOS: 9.0}}],
    "length": [
        {"max_tokens": 16},
        {"max_tokens": 24, "min_tokens": 10},
        {"max_tokens": 16, "min_tokens": 16},
        {"max_tokens": 1},
    ],
    "ignore_eos": [{}, {"ignore_eos": True}],
    "stop_token_ids": [{}, {"stop_token_ids": [12, 14]}],
    "stop": [{}, {"stop": [STOP]}],
    "banned_words": [{}, {"banned_words": BANNED_WORDS}],
    "logprobs": [{}, {"logprob_count": 0}, {"logprob_count": 3}, {"logprob_count": 20, "echo": True}],
    "samples": [{}, {"sample_count": 2}, {"sample_count": 5}],
    "seed": [{"seed": 11}, {"seed": -(2**63)}],
    "prompt": [{"text": STORY}, {"token_ids": STORY_TOKENS}],
}


def parameters_of(rule: str) -> dict[str, list[dict[str, Any]]]:
    """All parameters of requests under a rule; only those drafters that can serve it."""
    drafters = [
        each for each in PARAMETERS["drafter"] if each != {"drafter": "coupled"} or rule in {"match", "typical"}
    ]
    only = {"rule": [{"rule": RULES[rule]}], "acceptance": SETTINGS.get(rule, [{}])}
    return {**only, **PARAMETERS, "drafter": drafters}


def rows(rule: str) -> list[Row]:
    """Rows of a rule in which every pair of values occurs."""
    return list(all_pairs(parameters_of(rule)))


def fields_of(row: Row) -> dict[str, Any]:
    """The fields of the request that a row stands for."""
    return {name: value for fields in row.values() for name, value in fields.items()}


def plain_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same request decoded plainly under `match`."""
    speculative = {"rule", "acceptance", "draft_count", "enabled", "drafter"}
    return {name: value for name, value in fields.items() if name not in speculative} | {"draft_count": 0}


def is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether the request asks for no speculation."""
    return fields.get("draft_count") == 0 or not fields.get("enabled", True)


def is_greedy(fields: Mapping[str, Any]) -> bool:
    """Whether one token alone can be drawn in every place."""
    return fields.get("temperature") == 0.0 or fields.get("top_k") == 1
