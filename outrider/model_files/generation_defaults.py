"""Defaults of requests: by the model's own files, and by the operator over them.

As vLLM and llama.cpp read them: generation_config.json beside the weights, `general.sampling.*` in a GGUF file. A value
that no request could have is left out there, because the fault would be the model's and not that of the client.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from outrider.errors import InvalidRequest, shown
from outrider.model_files.gguf.header import GgufFile
from outrider.parameters import GenerationDefaults

NAMES = tuple(GenerationDefaults.model_fields)
# What each is called in a generation_config.json, and in a GGUF file.
JSON_KEYS = {name: name for name in NAMES} | {"max_tokens": "max_new_tokens"}
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
NONE = "none"
WORDS = f"NAME=VALUE with commas between, of {', '.join(NAMES)}, or {NONE}"


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Defaults of a model's files, and what of them was left out, each in a sentence."""

    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    faults: tuple[str, ...] = ()

    @classmethod
    def read(cls, place: Path) -> Self:
        """Defaults of a folder, or of a GGUF file; raises ModelRefused about a file that is none."""
        if place.is_file():
            metadata = GgufFile.read(place).metadata
            return cls._of(place, {name: (key, metadata.get(key)) for name, key in GGUF_KEYS.items()})
        path = place / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return cls(faults=(f"{path} cannot be read: {error}",))
        if not isinstance(config, dict):
            return cls(faults=(f"{path} is no JSON object",))
        found = {name: (key, config.get(key)) for name, key in JSON_KEYS.items()}
        samples = config.get("do_sample")
        if samples is False:
            found["temperature"] = ("do_sample", 0.0)
        read = cls._of(path, found)
        if isinstance(samples, bool | None):
            return read
        return cls(read.defaults, (*read.faults, _left_out(path, "do_sample", samples, "true or false")))

    @classmethod
    def _of(cls, path: Path, found: Mapping[str, tuple[str, Any]]) -> Self:
        """Defaults from the key and the value of each name."""
        stated: dict[str, Any] = {}
        faults = []
        for name, (key, value) in found.items():
            # As a request would have it: 0 for no cut, and without the digits that a number has in float32 alone.
            plain = 0 if name == "top_k" and value == -1 else value
            plain = float(f"{plain:.7g}") if isinstance(plain, float) else plain
            try:
                stated |= {} if value is None else GenerationDefaults.checked({name: plain}).stated
            except InvalidRequest as error:
                faults.append(_left_out(path, key, value, "".join(error.limit)))
        return cls(GenerationDefaults.checked(stated), tuple(faults))


def _left_out(path: Path, key: str, value: object, limit: str) -> str:
    return f"{path}: {key} is {shown(value)}, which is left out, for it must be {limit}"


@dataclass(frozen=True, slots=True)
class OperatorDefaults:
    """Defaults of an operator, over the model's."""

    ignores_model: bool = False
    said: GenerationDefaults = field(default_factory=GenerationDefaults)

    @classmethod
    def parse(cls, flag: str, text: str) -> Self:
        """Reads WORDS: of two for one name the later counts, and `none` forgets all before it, the model's too.

        Raises InvalidRequest.
        """
        ignores_model, said = False, dict[str, Any]()
        for entry in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = entry.partition("=")
            if entry == NONE:
                ignores_model, said = True, {}
                continue
            try:
                number = {name: int(value) if value.lstrip("+-").isdecimal() else float(value)}
            except ValueError:
                raise InvalidRequest(flag, entry, WORDS) from None
            if name not in NAMES:
                raise InvalidRequest(flag, entry, WORDS)
            said |= GenerationDefaults.checked(number, f"{flag} ").stated
        return cls(ignores_model, GenerationDefaults.checked(said))

    def over(self, model: GenerationDefaults) -> GenerationDefaults:
        """Defaults that count for a model whose files say this."""
        own = {} if self.ignores_model else model.stated
        return GenerationDefaults.checked({**own, **self.said.stated})
