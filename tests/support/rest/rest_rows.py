"""The rows of the parameter grid as bodies of REST requests. Knows no gateway."""

from collections.abc import Mapping
from typing import Any

from support.grid import RULES

from outrider.v1 import generation_service_pb2 as generation_pb
from outrider.v1 import types_pb2 as pb

RENAMED = {"text": "prompt", "token_ids": "prompt", "logprob_count": "logprobs", "sample_count": "n"}
SPECULATION = {"draft_count", "enabled", "drafter"}
STRUCTURES = {"regex": "regex", "lark": "grammar", "gbnf": "grammar"}
RULE_NAMES = {number: name for name, number in RULES.items()}


def body_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A body of /v1/completions with the fields of a request of gRPC."""
    body: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for name, value in fields.items():
        if name in SPECULATION:
            speculation[name] = value
        elif name == "rule":
            speculation["rule"] = RULE_NAMES[value]
        elif name == "acceptance":
            speculation |= settings_of(value)
        elif name == "drafters":
            speculation["drafter"] = value
        elif name == "shape":
            speculation["shape"] = settings_of(value)
        elif name == "prediction_text":
            body["prediction"] = {"type": "content", "content": value}
        elif name == "constraint":
            body["structured_outputs"] = structure_of(value)
        elif name == "logit_bias":
            body[name] = {str(token_id): bias for token_id, bias in value.items()}
        else:
            body[RENAMED.get(name, name)] = value
    return {**body, "speculation": speculation} if speculation else body


def settings_of(message: pb.AcceptanceSettings | pb.TreeShape) -> dict[str, float]:
    """The settings of a rule or of a shape that are set."""
    return {field.name: round(value, 6) for field, value in message.ListFields()}


def structure_of(constraint: generation_pb.Constraint) -> dict[str, Any]:
    """What the answer has to look like, as far as both surfaces say it by the same rules."""
    kind = constraint.WhichOneof("kind")
    if kind == "choices":
        return {"choice": list(constraint.choices.texts)}
    return {STRUCTURES[str(kind)]: getattr(constraint, str(kind))}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a body, for a conversation."""
    changed = {name: value for name, value in body.items() if name not in {"prompt", "echo", "logprobs"}}
    told = {"logprobs": True, "top_logprobs": body["logprobs"]} if "logprobs" in body else {}
    return {**changed, **told, "messages": [{"role": "user", "content": "Tell me of a king and his daughters."}]}
