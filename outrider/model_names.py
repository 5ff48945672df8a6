"""Models that are known by name: where the embedded pair lies, and the sized models that hold one of the two.

A sized model is an embedded one inside a larger shape. Its name is `sized:PRESET`, `sized:target-PRESET` or
`sized:draft-PRESET`, with `@SEED` behind it for other random numbers than those of seed 0.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelRefused

PREFIX = "sized:"
ROLES = ("target", "draft")
VOCAB_SIZE = 4096
CONTEXT_LEN = 4096
MAX_SEED = 2**63 - 1
_NAME = re.compile(r"(?:(?P<role>target|draft)-)?(?P<preset>[^@]*)(?:@(?P<seed>[0-9]{1,19}))?")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-shaped model; vocabulary and context are the same for all."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool = True

    @property
    def parameter_count(self) -> int:
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size + 2)
        tables = VOCAB_SIZE * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + self.hidden_size * (tables + 1)


# Heads share keys in groups of at least three under "target" and of two under "draft", as in the models inside.
PRESETS: Mapping[str, Mapping[str, Shape]] = {
    "target": {
        # Qwen 1.5 0.5B, cut to 16 of its 24 layers, with keys and values shared by four heads.
        "200m": Shape(1024, 2816, 16, 16, 4, 64),
        # Llama 3.2 1B.
        "1b": Shape(2048, 8192, 16, 32, 8, 64),
        # Llama 3.2 3B.
        "3b": Shape(3072, 8192, 28, 24, 8, 128),
        # Llama 3.1 8B.
        "8b": Shape(4096, 14336, 32, 32, 8, 128, tied_embeddings=False),
        # Qwen 2.5 32B, without its biases.
        "32b": Shape(5120, 27648, 64, 40, 8, 128, tied_embeddings=False),
    },
    "draft": {
        # Our own embedded target.
        "10m": Shape(384, 1024, 6, 6, 2, 64),
        # SmolLM2 135M.
        "100m": Shape(576, 1536, 30, 9, 3, 64),
        # Qwen 3 0.6B, without the norms of its heads.
        "600m": Shape(1024, 3072, 28, 16, 8, 128),
        # Llama 3.2 1B.
        "1b": Shape(2048, 8192, 16, 32, 8, 64),
    },
}


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A preset that exists: the embedded model of a role inside the preset's shape."""

    role: str
    preset: str
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return PRESETS[self.role][self.preset]

    @property
    def name(self) -> str:
        """The explicit name, which means the same wherever a model is named."""
        return f"{PREFIX}{self.role}-{self.preset}" + (f"@{self.seed}" if self.seed else "")


def parse(model: str, role: str = "target") -> SizedModel | None:
    """The sized model that a name means to a service of this role; None for the name of any other model.

    A bare preset is looked for under the role first, and then under the other one. Raises ModelRefused.
    """
    if not model.startswith(PREFIX):
        return None
    parts = _NAME.fullmatch(model.removeprefix(PREFIX))
    seed = int(parts["seed"] or 0) if parts else 0
    if parts is None or seed > MAX_SEED:
        raise ModelRefused(f"{model} has no seed behind @: that is a number in [0, {MAX_SEED}]", model=model)
    roles = (parts["role"],) if parts["role"] else (role, *(other for other in ROLES if other != role))
    found = next((each for each in roles if parts["preset"] in PRESETS[each]), None)
    if found is None:
        lists = " and ".join(f"{', '.join(presets)} for a {each}" for each, presets in PRESETS.items())
        raise ModelRefused(f"{model} is no sized model; there are {lists}", model=model)
    return SizedModel(found, parts["preset"], seed)


REPOSITORY = Path(__file__).resolve().parents[1]


def embedded_model(role: str, way_out: str | None = None) -> str:
    """Folder of the embedded model, in the repository or in the working directory.

    Raises ModelRefused, which ends with the way out: by default the option that names another model.
    """
    folders = [place / "models" / role for place in (REPOSITORY, Path.cwd())]
    for folder in folders:
        if (folder / "config.json").is_file():
            return str(folder)
    way_out = way_out or f"name a model with --{role}"
    raise ModelRefused(f"There is no embedded {role} model in {folders[0]}; {way_out}.")


def unsized(model: str) -> str:
    """The folder of the embedded model inside a sized one, which has its tokenizer; any other model as it is named.

    Raises ModelRefused for an unknown preset, and when the embedded model is missing.
    """
    sized = parse(model)
    return model if sized is None else embedded_model(sized.role, f"{model} is made of it")
