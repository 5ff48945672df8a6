"""Reads keys of a model's JSON files, or refuses the model naming file and key. Knows no model and no default."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
    """Where in the file this object lies, for instance "rope_scaling."; errors name keys with it."""

    def refuse(self, key: str, fault: str) -> ModelRefused:
        """The error about one key, to be raised."""
        return ModelRefused(f'{self.path}: "{self.prefix}{key}" {fault}', file=self.path, key=f"{self.prefix}{key}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = INT32_MAX) -> int:
        """An integer from `minimum` to `maximum`; absent keys without a default are refused."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            limit = f"of at least {minimum}" if maximum == INT32_MAX else f"from {minimum} to {maximum}"
            raise self.refuse(key, f"is {value!r}, but must be an integer {limit}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number that float32 can hold; absent keys without a default are refused."""
        value = self._get(key, default)
        if not _is_number(value) or not 0 < value <= FLOAT32_MAX:
            raise self.refuse(key, f"is {value!r}, but must be a positive number")
        return float(value)

    def at_least(self, key: str, minimum: float, default: float | None = None) -> float:
        """A number of at least `minimum` that float32 can hold; absent keys without a default are refused."""
        value = self._get(key, default)
        if not _is_number(value) or not minimum <= value <= FLOAT32_MAX:
            raise self.refuse(key, f"is {value!r}, but must be a number of at least {minimum:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}, but must be true or false")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(key, "is missing")
        return value


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
