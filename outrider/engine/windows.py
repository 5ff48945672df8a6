"""Which layers of a model see only the last tokens: the keys of config.json, and what each architecture makes of them.

Knows no tensors. A window of W lets the row at position t see the positions above t - W, itself included. Nothing is
freed that a window hides: a truncation may bring it back into sight.
"""

from collections.abc import Callable

from outrider.engine.json_keys import JsonKeys

DEFAULT_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28
FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]
"""For each layer its window, or None where it sees everything."""
WindowRule = Callable[[JsonKeys, int], Windows]


def read_windows(keys: JsonKeys, num_layers: int, context_len: int, rule: WindowRule) -> Windows:
    """The windows of a model's layers; one that hides nothing within the context is none. Raises ModelRefused."""
    _check_layer_types(keys, num_layers)
    windows = rule(keys, num_layers)
    types = [FULL if window is None else SLIDING for window in windows]
    if keys.values.get("layer_types") not in (None, types):
        # transformers would pass over this key, and other engines would follow it: nobody knows who is right.
        layer = next(index for index, kind in enumerate(types) if kind != keys.values["layer_types"][index])
        raise keys.refuse("layer_types", f"does not say {types[layer]} of layer {layer}, as the other keys do")
    return tuple(None if window is None or window >= context_len else window for window in windows)


def no_windows(keys: JsonKeys, num_layers: int) -> Windows:
    """Llama's rule: "sliding_window" means nothing."""
    return (None,) * num_layers


def same_in_every_layer(keys: JsonKeys, num_layers: int) -> Windows:
    """Mistral's rule: "sliding_window" holds everywhere; absent it has a default, and null switches it off."""
    return (_window(keys),) * num_layers


def switched_by_layer(keys: JsonKeys, num_layers: int) -> Windows:
    """The rule of Qwen 2 and 3: "use_sliding_window" switches it on, for the "layer_types" or from a layer onwards."""
    window = _window(keys) if keys.flag("use_sliding_window") else None
    types = keys.values.get("layer_types")
    if types is None:
        first = keys.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        types = [FULL if layer < first or window is None else SLIDING for layer in range(num_layers)]
    if window is None and SLIDING in types:
        raise keys.refuse("layer_types", f"names {SLIDING}, but no window is switched on")
    return tuple(window if kind == SLIDING else None for kind in types)


def _window(keys: JsonKeys) -> int | None:
    # An explicit null means no window; only an absent key has the default.
    if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
        return None
    return keys.integer("sliding_window", DEFAULT_WINDOW)


def _check_layer_types(keys: JsonKeys, num_layers: int) -> None:
    types = keys.values.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.refuse("layer_types", f"must be a list with an entry for each of {num_layers} layers")
    unknown = next((kind for kind in types if kind not in (FULL, SLIDING)), None)
    if unknown is not None:
        raise keys.refuse("layer_types", f"names {unknown!r}, which is not served")
