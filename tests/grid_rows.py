"""The parameters of a request and the values that the grid takes of each, as fields of `stack.request_of`.

The values are such that they change what the embedded pair says: no parameter is there in name only.
"""

from collections.abc import Mapping
from typing import Any

from pairwise import all_pairs

from outrider.v1 import types_pb2 as pb

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
