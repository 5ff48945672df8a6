"""Models that are known by name: where the embedded pair lies, sized models that hold one of the two, simulated ones.

A sized model is an embedded one inside a larger shape. Its name is `sized:PRESET`, `sized:target-PRESET` or
`sized:draft-PRESET`, with `@SEED` after it for other random numbers than those of seed 0.

A simulated model computes no matrices: its forward takes as long as a stated formula says, and its tokens come from a
hash. Its name is `sim:PRESET`, with options after it as in `sim:h100-1b@acceptance=0.8+0.1,stretch=4`.
docs/models.md says what each number stands on.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

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
        return self.parameters(VOCAB_SIZE)

    def parameters(self, vocab_size: int) -> int:
        """Numbers in all its tensors with a vocabulary of this size."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size + 2)
        tables = vocab_size * (1 if self.tied_embeddings else 2)
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


SIM_PREFIX = "sim:"
# What a simulated model stands for: that of Llama 3, in bfloat16. Served are the ids of the embedded tokenizer.
SIM_VOCAB_SIZE, SIM_CONTEXT_LEN, SIM_ITEM_BYTES = 128_256, 131_072, 2
# The options after a name, and what they may be.
SIM_OPTIONS: Mapping[str, tuple[float, float]] = {
    "acceptance": (0.0, 1.0),
    "rows": (0.0, 10.0),
    "stretch": (0.001, 1000.0),
}
# The number of rows that `rows` is about.
SIM_ROWS = 32
# Choices of a draft that are distinguished, and the least probability of each, and of all that come after them.
MAX_RANKS, LEAST_RATE = 8, 0.001
_SIM_NAME = re.compile(r"(?P<preset>[^@]*)(?:@(?P<options>.*))?", re.DOTALL)
_SIM_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_SIM_OPTION = re.compile(rf"(?P<key>[a-z]+)=(?P<value>{_SIM_NUMBER}(?:\+{_SIM_NUMBER})*)")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Rates of a device at best, how much of that a model gets, and what a step costs beside."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    """Bytes a second of its memory."""
    flops: float
    """Products of bfloat16 numbers, dense, a multiplication and an addition each counted."""
    bandwidth_share: float
    flops_share: float
    launch_s: float
    """Seconds of a step that neither memory nor arithmetic explain: launches, draws, exchange between devices."""


# 80 GB, 3.35 TB/s and 989.4 dense TFLOPS: NVIDIA H100 data sheet, column SXM. Share of the bandwidth and launch: chosen
# so that the 8B preset alone takes the 6.32 ms of SGLang's documentation (158.34 tokens/s on one H100). Share of the
# arithmetic: assumed.
H100 = Accelerator("H100 SXM", 80e9, 3.35e12, 989.4e12, bandwidth_share=0.77, flops_share=0.65, launch_s=0.0005)
# Tensor parallelism: a quarter of each matrix on each, and two exchanges a layer of 12 us, assumed, for 80 layers.
FOUR_H100 = replace(
    H100,
    name="4 x H100 SXM",
    memory_bytes=4 * H100.memory_bytes,
    bytes_per_s=4 * H100.bytes_per_s,
    flops=4 * H100.flops,
    launch_s=H100.launch_s + 2 * 80 * 12e-6,
)
# Of the memory, what weights and cache take together: the default of vLLM.
USED_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model and the device whose time it takes; acceptance is that of a draft of a target with acceptance 1."""

    preset: str
    device: Accelerator
    shape: Shape
    acceptance: tuple[float, ...] = (1.0,)
    """The probability that the token which the hash of all simulated models names is its first choice, its second, and
    so on, position by position."""
    stretch: float = 1.0
    """Factor of all times."""
    rows: float = 0.0
    """Share of its time that memory takes longer for SIM_ROWS rows than for one; it grows with their logarithm."""

    @property
    def name(self) -> str:
        """The name with the options that are not the preset's own."""
        own = SIM_PRESETS[self.preset]
        given = {key: getattr(self, key) for key in SIM_OPTIONS if getattr(self, key) != getattr(own, key)}
        options = ",".join(f"{key}={_shown(value)}" for key, value in given.items())
        return f"{SIM_PREFIX}{self.preset}" + (f"@{options}" if options else "")

    @property
    def parameter_count(self) -> int:
        return self.shape.parameters(SIM_VOCAB_SIZE)

    @property
    def multiplied_parameters(self) -> int:
        """Number of parameters that multiply every row: all but an embedding of its own, of which it reads one line."""
        lookup = 0 if self.shape.tied_embeddings else SIM_VOCAB_SIZE * self.shape.hidden_size
        return self.parameter_count - lookup

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * SIM_ITEM_BYTES

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        free = USED_MEMORY * self.device.memory_bytes - self.parameter_count * SIM_ITEM_BYTES
        return int(free / self.token_bytes)

    def step_s(self, num_rows: int, num_keys: int, num_scores: int) -> float:
        """Seconds of a forward: what memory or arithmetic take, whichever is longer, and the launch.

        num_keys are the tokens whose keys and values are read, once for all rows of a session; num_scores is the sum
        over rows of the keys that each one sees.
        """
        width = self.shape.num_heads * self.shape.head_dim
        read_bytes = self.multiplied_parameters * SIM_ITEM_BYTES + self.token_bytes * num_keys
        # Scores and sums of values, two products of a head's size for each key.
        flops = 2 * self.multiplied_parameters * num_rows + 4 * self.shape.num_layers * width * num_scores
        slower = 1 + self.rows * math.log(num_rows, SIM_ROWS)
        memory_s = slower * read_bytes / (self.device.bytes_per_s * self.device.bandwidth_share)
        arithmetic_s = flops / (self.device.flops * self.device.flops_share)
        return self.stretch * (max(memory_s, arithmetic_s) + self.device.launch_s)

    def with_option(self, model: str, text: str) -> Self:
        """A copy with one KEY=VALUE of the name `model`. Raises ModelRefused."""
        option = _SIM_OPTION.fullmatch(text)
        if option is None or option["key"] not in SIM_OPTIONS:
            kinds = ", ".join(f"{key}=NUMBER" for key in SIM_OPTIONS)
            raise ModelRefused(f"{model} has {text!r} behind @; there may be {kinds}, separated by commas", model=model)
        key, given = option["key"], option["value"]
        values = tuple(map(float, given.split("+")))
        low, high = SIM_OPTIONS[key]
        falls = all(one > two for one, two in pairwise(values))
        are_ranks = falls and len(values) <= MAX_RANKS and values[-1] >= LEAST_RATE and sum(values) <= 1 - LEAST_RATE
        limit = ""
        if not all(low <= each <= high for each in values):
            limit = f"in [{low:g}, {high:g}]"
        elif key != "acceptance" and len(values) > 1:
            limit = "one number"
        elif len(values) > 1 and not are_ranks:
            limit = f"at most {MAX_RANKS} falling numbers from {LEAST_RATE:g} on, together {1 - LEAST_RATE:g} at most"
        if limit:
            raise ModelRefused(f"{model}: {key} is {given}, but must be {limit}", model=model)
        if key == "acceptance":
            return replace(self, acceptance=values)
        return replace(self, stretch=values[0]) if key == "stretch" else replace(self, rows=values[0])


def _shown(option: float | tuple[float, ...]) -> str:
    values = option if isinstance(option, tuple) else (option,)
    return "+".join(f"{value:.9f}".rstrip("0").rstrip(".") for value in values)


# Llama 3.1 8B, Llama 3.1 70B and, as drafts, Llama 3.2 1B and Qwen 3 0.6B, each alone on its device. Acceptances are
# assumed.
SIM_PRESETS: Mapping[str, SimulatedModel] = {
    each.preset: each
    for each in (
        SimulatedModel("h100-8b", H100, PRESETS["target"]["8b"]),
        SimulatedModel("h100-70b", FOUR_H100, Shape(8192, 28672, 80, 64, 8, 128, tied_embeddings=False)),
        SimulatedModel("h100-1b", H100, PRESETS["draft"]["1b"], acceptance=(0.78, 0.1, 0.04, 0.02, 0.012)),
        SimulatedModel("h100-600m", H100, PRESETS["draft"]["600m"], acceptance=(0.68, 0.09, 0.04, 0.03, 0.01)),
    )
}


# The draft of a simulated target that has no other.
SIM_DRAFT = SIM_PREFIX + "h100-1b"


def parse_simulated(model: str) -> SimulatedModel | None:
    """The simulated model that a name means; None for the name of any other model. Raises ModelRefused."""
    if not model.startswith(SIM_PREFIX):
        return None
    parts = _SIM_NAME.fullmatch(model.removeprefix(SIM_PREFIX))
    found = SIM_PRESETS.get(parts["preset"]) if parts else None
    if parts is None or found is None:
        presets = ", ".join(SIM_PREFIX + preset for preset in SIM_PRESETS)
        raise ModelRefused(f"{model} is no simulated model; there are {presets}", model=model)
    for text in parts["options"].split(",") if parts["options"] is not None else ():
        found = found.with_option(model, text)
    return found


PACKAGE = Path(__file__).resolve().parents[1]


def embedded_model(role: str, way_out: str | None = None) -> str:
    """Folder of the embedded model, in the package as a wheel installs it, or else in the repository.

    Raises ModelRefused, which ends with the way out: by default the option that names another model.
    """
    folders = [place / "models" / role for place in (PACKAGE, PACKAGE.parent)]
    for folder in folders:
        if (folder / "config.json").is_file():
            return str(folder)
    way_out = way_out or f"name a model with --{role}"
    raise ModelRefused(f"There is no embedded {role} model in {folders[0]}; {way_out}.")


def tokenizer_source(model: str) -> str:
    """The folder of the embedded model inside a sized one, of the embedded target for a simulated one; else `model`.

    Raises ModelRefused for an unknown preset, and when the embedded model is missing.
    """
    sized, simulated = parse(model), parse_simulated(model)
    if simulated is not None:
        return embedded_model("target", f"{model} speaks its tokens")
    return model if sized is None else embedded_model(sized.role, f"{model} is made of it")
