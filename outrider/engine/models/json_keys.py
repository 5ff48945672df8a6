"""JSON files as they come from anywhere: read with a limit, and each key with one sentence for what it must be."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ModelRefused

MAX_JSON_BYTES = 64 << 20
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ModelRefused when there is none."""
    try:
        # A cap, because a folder may come from anywhere and is read before anything about it is known.
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelRefused(f"{path} is larger than {MAX_JSON_BYTES} bytes", file=path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}", file=path) from None
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} is not valid JSON: {error}", file=path) from None
    if not isinstance(values, dict):
        raise ModelRefused(f"{path} does not hold a JSON object", file=path)
    return values


@dataclass(frozen=True, slots=True)
class JsonKeys:
    """Typed access to one JSON object; `null` counts as absent, as it does for transformers."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""
    """Place of this object in the file, for instance "rope_scaling."; errors name keys with it."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Names in errors, for keys that have another name in the file."""

    def refuse(self, key: str, fault: str) -> ModelRefused:
        name = self.spelled.get(key, f"{self.prefix}{key}")
        return ModelRefused(f'{self.path}: "{name}" {fault}', file=self.path, key=name)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = INT32_MAX) -> int:
        """An integer from `minimum` to `maximum`; absent keys without a default are refused."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            # The largest integer is named only for a value above it.
            is_above = isinstance(value, int) and value > maximum
            limit = f"from {minimum} to {maximum}" if is_above or maximum < INT32_MAX else f"of at least {minimum}"
            raise self.refuse(key, f"is {value!r}, but must be an integer {limit}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float | None = None) -> float:
        """A number of at least `minimum`, or a positive one, that float32 can hold; refused as an integer is."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_above = is_number and value > FLOAT32_MAX
        if not is_number or is_above or not (value > 0 if minimum is None else value >= minimum):
            limit = "positive number" if minimum is None else f"number of at least {minimum:g}"
            limit += " that float32 can hold" if is_above else ""
            raise self.refuse(key, f"is {value!r}, but must be a {limit}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}, but must be true or false")
        return value

    def _get(self, key: str, default: object) -> Any:  # noqa: ANN401 - what JSON can hold
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(key, "is missing")
        return value
