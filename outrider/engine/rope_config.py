"""The rotary embedding that a config.json asks for, in the spelling of transformers 5 or that of older files.

Knows no tensors. Either "rope_parameters" hold everything, or "rope_scaling" does and "rope_theta" stands beside it; as
in transformers, "rope_scaling" goes first where a file has both. What would give other angles than a sound file's is
refused, though transformers only warns.
"""

from outrider.engine.json_keys import JsonKeys
from outrider.engine.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, yarn_amplitude

DEFAULT_THETA = 10000.0
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
# Keys of "layer_types", under which newer files nest an embedding for each kind of layer.
NESTS = ("full_attention", "sliding_attention")
ORIGINAL_LEN = "original_max_position_embeddings"


def read_rope(keys: JsonKeys, max_positions: int, head_dim: int) -> Rope:
    """The embedding of a model with "max_position_embeddings" max_positions. Raises ModelRefused."""
    inside = _parameters(keys)
    for source in (keys, inside):
        if source.values.get("partial_rotary_factor", 1) not in (None, 1):
            raise source.refuse("partial_rotary_factor", "is not 1, but only whole heads are rotated")
    theta = (inside if inside.values.get("rope_theta") is not None else keys).positive("rope_theta", DEFAULT_THETA)
    kind = inside.values.get("rope_type") or inside.values.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return LinearRope(theta=theta, factor=_factor(inside))
    if kind == "dynamic":
        # transformers counts from "max_position_embeddings" here, whatever else the file says.
        if head_dim < 4:
            raise keys.refuse("head_dim", f"is {head_dim}, but a dynamic rotary embedding needs at least 4")
        return DynamicRope(theta=theta, factor=_factor(inside), original_len=max_positions)
    if kind == "llama3":
        return _llama3(theta, inside, _original_len(keys, inside))
    if kind == "yarn":
        return _yarn(theta, inside, _original_len(keys, inside))
    raise inside.refuse("rope_type", f"is {kind!r}, but must be one of {', '.join(KINDS)}")


def _parameters(keys: JsonKeys) -> JsonKeys:
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    values = keys.values.get(name) or {}
    if not isinstance(values, dict):
        raise keys.refuse(name, f"is {values!r}, but must be an object")
    nested = next((kind for kind in NESTS if kind in values), None)
    if nested is not None:
        raise keys.refuse(name, f"has an entry for {nested}, but only one rotary embedding for all layers is served")
    return JsonKeys(keys.path, values, f"{name}.")


def _factor(inside: JsonKeys) -> float:
    return inside.at_least("factor", 1.0)


def _original_len(keys: JsonKeys, inside: JsonKeys) -> int:
    # Beside the other keys it wins, as in transformers; without it the frequencies would be anyone's guess.
    return (keys if keys.values.get(ORIGINAL_LEN) is not None else inside).integer(ORIGINAL_LEN)


def _llama3(theta: float, inside: JsonKeys, original_len: int) -> Llama3Rope:
    low, high = inside.positive("low_freq_factor"), inside.positive("high_freq_factor")
    if high <= low:
        raise inside.refuse("high_freq_factor", f"is {high:g}, but must be above the low_freq_factor {low:g}")
    return Llama3Rope(
        theta=theta,
        factor=_factor(inside),
        low_freq_factor=low,
        high_freq_factor=high,
        original_len=original_len,
    )


def _yarn(theta: float, inside: JsonKeys, original_len: int) -> YarnRope:
    factor = _factor(inside)
    fast, slow = inside.positive("beta_fast", 32.0), inside.positive("beta_slow", 1.0)
    if fast < slow:
        raise inside.refuse("beta_fast", f"is {fast:g}, but must be at least the beta_slow {slow:g}")
    if theta <= 1:
        raise inside.refuse("rope_theta", f"is {theta:g}, but yarn needs more than 1")
    scales = (inside.at_least(name, 0.0, 0.0) for name in ("mscale", "mscale_all_dim"))
    return YarnRope(
        theta=theta,
        amplitude=inside.positive("attention_factor", yarn_amplitude(factor, *scales)),
        factor=factor,
        original_len=original_len,
        beta_fast=fast,
        beta_slow=slow,
        truncate=inside.flag("truncate", True),
    )
