"""Which rotary embeddings a config.json asks for, or one sentence for what is not served.

Either "rope_parameters" hold everything, or "rope_scaling" does and "rope_theta" stands beside it; as in transformers,
"rope_scaling" goes first where a file has both. What would give other angles than a sound file's is refused, though
transformers only warns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.models.json_keys import FLOAT32_MAX, JsonKeys
from outrider.engine.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope, yarn_amplitude

# Values of "layer_types", and keys under which newer files nest a rotary embedding for each kind of layer.
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_THETA, GLOBAL_THETA, LOCAL_THETA = 10000.0, 1000000.0, 10000.0
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ORIGINAL_LEN = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotary embeddings of a model's layers, and how long a text they make."""

    unlimited: Rope
    windowed: Rope
    """Rope of layers that see a window only, by the file: it may be wider than the context."""
    context_len: int


RopeRule = Callable[[JsonKeys, int, int], Ropes]
"""From keys, "max_position_embeddings" and the size of a head. Raises ModelRefused."""


def read_rope(keys: JsonKeys, max_positions: int, head_dim: int) -> Rope:
    """The embedding of a model with "max_position_embeddings" max_positions. Raises ModelRefused."""
    inside = _parameters(keys)
    for source in (keys, inside):
        if source.values.get("partial_rotary_factor", 1) not in (None, 1):
            raise source.refuse("partial_rotary_factor", "is not 1, but only whole heads are rotated")
    return _rope(keys, inside, _theta(keys, inside), max_positions, head_dim)


def one_rope(keys: JsonKeys, max_positions: int, head_dim: int) -> Ropes:
    """The rule of most families. Raises ModelRefused."""
    rope = read_rope(keys, max_positions, head_dim)
    return Ropes(rope, rope, rope.context_len(max_positions))


def rope_by_window(keys: JsonKeys, max_positions: int, head_dim: int) -> Ropes:
    """Gemma 3's rule: layers with a window have an embedding of their own, and scalings leave max_positions alone.

    Both nest in "rope_parameters", or "rope_local_base_freq" stands beside the other's keys. Raises ModelRefused.
    """
    parameters = keys.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or (parameters and not {FULL, SLIDING} & parameters.keys()):
        raise keys.refuse("rope_parameters", f"is {parameters!r}, but must have an entry for each kind of layer")
    scaling = keys.values.get("rope_scaling") or {}
    made = []
    for kind, more, theta in ((FULL, scaling, "rope_theta"), (SLIDING, {}, "rope_local_base_freq")):
        values = parameters.get(kind) or {}
        if not isinstance(values, dict) or not isinstance(more, dict):
            name = f"rope_parameters.{kind}" if isinstance(more, dict) else "rope_scaling"
            raise keys.refuse(name, "is not an object")
        inside = JsonKeys(keys.path, {**values, **more}, f"rope_parameters.{kind}.", keys.spelled)
        default = keys.number(theta, LOCAL_THETA if kind == SLIDING else GLOBAL_THETA)
        base = inside.number("rope_theta", default)
        made.append(_rope(keys, inside, base, max_positions, head_dim))
    return Ropes(made[0], made[1], max_positions)


def partial_rope(keys: JsonKeys, max_positions: int, head_dim: int) -> Ropes:
    """The rule of Phi 3 and 4: a part of each head may turn, and "longrope" is served as far as its short factors go.

    Raises ModelRefused.
    """
    inside = _parameters(keys)
    source = inside if inside.values.get("partial_rotary_factor") is not None else keys
    share, theta = source.number("partial_rotary_factor", 1.0), _theta(keys, inside)
    num_turning = int(head_dim * share)
    if not 2 <= num_turning <= head_dim or num_turning % 2:
        fault = f"is {share:g}, but must make an even number of a head's {head_dim} coordinates"
        raise source.refuse("partial_rotary_factor", fault)
    kind = _kind(inside)
    if kind == "default":
        rope = Rope(theta=theta, share=share)
    elif kind in ("longrope", "su", "yarn"):
        # transformers takes all three for the same in this family.
        rope = _long_rope(inside, theta, share, num_turning // 2, max_positions, _original_len(keys, inside))
    else:
        raise inside.refuse("rope_type", f"is {kind!r}, but must be default or longrope in this family")
    return Ropes(rope, rope, rope.context_len(max_positions))


def _long_rope(
    inside: JsonKeys, theta: float, share: float, num_pairs: int, max_positions: int, original_len: int
) -> Rope:
    found = inside.values.get("short_factor")
    divisors = found if isinstance(found, list) else []
    is_sound = all(type(each) in (int, float) and 0 < each <= FLOAT32_MAX for each in divisors)
    if len(divisors) != num_pairs or not is_sound:
        raise inside.refuse("short_factor", f"must be a list of {num_pairs} positive numbers")
    factor = inside.number("factor", max_positions / original_len)
    amplitude = 1.0
    if factor > 1:
        if original_len < 2:
            raise inside.refuse(ORIGINAL_LEN, f"is {original_len}, but longrope needs at least 2")
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original_len))
    amplitude = inside.number("attention_factor", amplitude)
    return LongRope(
        theta=theta, share=share, amplitude=amplitude, original_len=original_len, divisors=tuple(map(float, divisors))
    )


def _parameters(keys: JsonKeys) -> JsonKeys:
    """The one object that describes the embedding of all layers."""
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    values = keys.values.get(name) or {}
    if not isinstance(values, dict):
        raise keys.refuse(name, f"is {values!r}, but must be an object")
    nested = next((kind for kind in (FULL, SLIDING) if kind in values), None)
    if nested is not None:
        raise keys.refuse(name, f"has an entry for {nested}, but only one rotary embedding for all layers is served")
    return JsonKeys(keys.path, values, f"{name}.", keys.spelled)


def _theta(keys: JsonKeys, inside: JsonKeys) -> float:
    return (inside if inside.values.get("rope_theta") is not None else keys).number("rope_theta", DEFAULT_THETA)


def _kind(inside: JsonKeys) -> object:
    return inside.values.get("rope_type") or inside.values.get("type") or "default"


def _rope(keys: JsonKeys, inside: JsonKeys, theta: float, max_positions: int, head_dim: int) -> Rope:
    kind = _kind(inside)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return LinearRope(theta=theta, factor=inside.number("factor", minimum=1.0))
    if kind == "dynamic":
        # transformers counts from "max_position_embeddings" here, whatever else the file says.
        if head_dim < 4:
            raise keys.refuse("head_dim", f"is {head_dim}, but a dynamic rotary embedding needs at least 4")
        return DynamicRope(theta=theta, factor=inside.number("factor", minimum=1.0), original_len=max_positions)
    if kind == "llama3":
        original_len = _original_len(keys, inside)
        low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
        if high <= low:
            raise inside.refuse("high_freq_factor", f"is {high:g}, but must be above the low_freq_factor {low:g}")
        factor = inside.number("factor", minimum=1.0)
        return Llama3Rope(
            theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high, original_len=original_len
        )
    if kind == "yarn":
        original_len, factor = _original_len(keys, inside), inside.number("factor", minimum=1.0)
        fast, slow = inside.number("beta_fast", 32.0), inside.number("beta_slow", 1.0)
        if fast < slow:
            raise inside.refuse("beta_fast", f"is {fast:g}, but must be at least the beta_slow {slow:g}")
        if theta <= 1:
            raise inside.refuse("rope_theta", f"is {theta:g}, but yarn needs more than 1")
        scales = (inside.number(name, 0.0, minimum=0.0) for name in ("mscale", "mscale_all_dim"))
        return YarnRope(
            theta=theta,
            amplitude=inside.number("attention_factor", yarn_amplitude(factor, *scales)),
            factor=factor,
            original_len=original_len,
            beta_fast=fast,
            beta_slow=slow,
            truncate=inside.flag("truncate", True),
        )
    raise inside.refuse("rope_type", f"is {kind!r}, but must be one of {', '.join(ROPE_KINDS)}")


def _original_len(keys: JsonKeys, inside: JsonKeys) -> int:
    # Beside the other keys it wins, as in transformers; without it the frequencies would be anyone's guess.
    return (keys if keys.values.get(ORIGINAL_LEN) is not None else inside).integer(ORIGINAL_LEN)
