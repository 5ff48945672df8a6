"""The rows of the parameter grid as bodies of REST requests. Knows no gateway."""

from collections.abc import Mapping
from typing import Any

from support.grid import RULES

from outrider.v1 import types_pb2 as pb

RENAMED = {"text": "prompt", "token_ids": "prompt", "logprob_count": "logprobs", "sample_count": "n"}
SPECULATION = {"draft_count", "enabled", "drafter"}
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
        elif name == "logit_bias":
            body[name] = {str(token_id): bias for token_id, bias in value.items()}
        else:
            body[RENAMED.get(name, name)] = value
    return {**body, "speculation": speculation} if speculation else body


def settings_of(acceptance: pb.AcceptanceSettings) -> dict[str, float]:
    """The settings of a rule that are set."""
    return {field.name: round(value, 6) for field, value in acceptance.ListFields()}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters for a conversation."""
    changed = {name: value for name, value in body.items() if name not in {"prompt", "echo", "logprobs"}}
    told = {"logprobs": True, "top_logprobs": body["logprobs"]} if "logprobs" in body else {}
    return {**changed, **told, "messages": [{"role": "user", "content": "Tell me of a king and his daughters."}]}
