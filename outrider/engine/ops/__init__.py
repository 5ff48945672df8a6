"""The few operations that a model calls, and the choice of who computes them.

On the CPU every row of every result is bitwise independent of the number of rows, of its neighbours, of chunking and of
the number of threads. No such promise holds for `eager` on CUDA.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.devices import seen_devices
from outrider.engine.ops.blocks import Weight
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.experts import Experts
from outrider.engine.ops.library import load_kernels
from outrider.engine.ops.native import NativeOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.errors import InvalidRequest

__all__ = ["KERNELS", "Experts", "Ops", "Weight", "choose_ops", "triton_missing"]

KERNELS = ("auto", "eager", "triton", "graphs")
"""Names of what computes on an accelerator: the fastest there is, torch, ours one by one, ours recorded as graphs."""
LEAST_TRITON = "3.6"
# Ampere's, whose matrix units know bfloat16.
LEAST_CAPABILITY = 8, 0


class Ops(Protocol):
    """Operations on float32 rows; weights are bfloat16, float32 or in blocks, sums are float32.

    Sizes: R rows, K inputs, N outputs, D head size, H query heads, G key-value heads, S cache slots, V vocabulary.
    All raise ValueError for shapes and types that do not fit.
    """

    @property
    def name(self) -> str:
        """The kernel set as it stands in the numerics id, for instance "native-v4"."""

    def stack(self, weights: Sequence[Weight]) -> Weight:
        """One matrix of the rows of all weights [N, K], as `linear` reads it fastest; may be the only one itself."""

    def quantised(self, weight: Weight) -> Weight:
        """The weight [N, K] in as many bits as `stack` would make of it, or itself where it would not change it."""

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """Rows [R, K] float32 of weight [V, K], looked up by token_ids [R] int64; exact."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [R, K] times the transpose of weight [N, K], plus bias [N] float32; returns [R, N] float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight for x [R, D] and weight [D] float32 (Zhang and Sennrich, 2019)."""

    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: RowPlan,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Rotates query and key by their positions, stores key and value at plan.slots, returns query [R, H, D].

        query [R, H, D], key and value [R, G, D] may be views into one fused product (last dimension contiguous).
        cos and sin are [P, T/2] float32 tables by position, of the first T of D elements; element i pairs with i + T/2,
        as in Hugging Face's rotate_half (Su et al., 2021), and the others stay. The caches are [S, G, D].
        """

    def attention(
        self,
        query: Tensor,
        plan: RowPlan,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale * query . keys) values over each row's own list; returns [R, H*D] float32.

        query [R, H, D]; head h reads key-value head h // (H // G) (Ainslie et al., 2023). sinks [H] float32 are scores
        of one key more for each head, whose value is zero (Xiao et al., 2024).
        """

    def gate_multiply(self, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        """silu(gate) * up for gate_up [R, 2M] = gate [R, M] beside up [R, M]; returns [R, M].

        With is_gelu in the place of silu gelu in its tanh form (Hendrycks and Gimpel, 2016).
        """

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        """For each row x [R, H] the sum of what its chosen experts make of it, times their shares; returns [R, H].

        An expert is down(silu(gate) * up), or has another gate by its clamp, and a row adds its own in the order of
        their scores. Each expert's weights are read once for all its rows.
        """

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        """g sigmoid(slope g) (u + 1), with g the gate up to limit, and u what is beside it from -limit to limit."""

    def softmax(self, scores: Tensor) -> Tensor:
        """Probabilities [R, V] float64 of scores [R, V] float32, which may hold -inf; faults as in `draw`."""

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Ids [R] int64: argmax over v of scores[r, v] + gumbel(keys[r], v) in float64, ties to the lowest id.

        scores [R, V] float32 up to a constant, keys [R] int64 (outrider.engine.noise). -inf never wins. A row without
        a finite score, or with NaN or +inf, is a fault: on the CPU a ValueError, elsewhere a negative id, and NaN in
        all places of what softmax gives (outrider.engine.ops.faults).
        """

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        """Ids [R] int64 of what `draw` draws from the first num_tokens of logits [R, V] at temperatures [R] float64.

        Scores are logits at temperature 1, and outrider.engine.ops.temperature otherwise, with the same bits as
        outrider.engine.sampling.transforms.transform. Faults as in `draw`.
        """

    def mask(self, logits: Tensor, bits: Tensor) -> Tensor:
        """logits [R, V] float32 with -inf for every id whose bit in bits [R, W] int32 is not set; a new tensor.

        Bit v % 32 of word v // 32, the lowest first, is that of id v; ids after the last word have none.
        """

    def rank(self, scores: Tensor, scales: Tensor, count: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens with the greatest sums in each row, ids [R, count] int64, and their shares [R, count] float64.

        A sum is what `draw` compares, scores[r, v] + gumbel(keys[r], v), or the score alone without keys; the order is
        that of (-sum, id), and so the first is the one that `draw` draws. A share is a token's part of all tokens'
        e^(sum / scales[r]). Where there are no more tokens, the id is -1 and the share 0. scores and faults as in
        `draw`, whose negative id is the first of its row; scales [R] float64.
        """


def choose_ops(
    device: torch.device,
    num_threads: int,
    packed_bits: int | None = None,
    kernels: str = "auto",
    input_bits: int = 8,
) -> Ops:
    """The fastest operations for a device: compiled kernels where it and this machine have them, torch otherwise.

    With packed_bits, 8 or 4, stacked matrices are quantised to that (outrider.engine.ops.blocks), on the CPU, where a
    file's blocks are multiplied with activations of input_bits, 8 or 15.
    `kernels` are those of an accelerator; raises InvalidRequest where it names some that are not to be had.
    """
    if kernels not in KERNELS:
        raise InvalidRequest("kernels", kernels, f"one of {', '.join(KERNELS)}")
    if device.type != "cpu":
        missing = _missing(device)
        if kernels in ("triton", "graphs") and missing is not None:
            raise InvalidRequest("kernels", kernels, f'"auto" or "eager" here: {missing}')
        if kernels == "eager" or missing is not None:
            return EagerOps(packed_bits)
        ops: Ops = import_module("outrider.engine.ops.triton_ops").TritonOps(device, has_graphs=kernels != "triton")
        return ops
    if kernels != "auto":
        raise InvalidRequest("kernels", kernels, '"auto" on the CPU, which has kernels of its own')
    compiled = load_kernels()
    if compiled is None:
        return ReferenceOps(packed_bits)
    return NativeOps(compiled, num_threads, packed_bits=packed_bits, input_bits=input_bits)


def _missing(device: torch.device) -> str | None:
    """Why our kernels cannot compute on a device that is not the CPU; None where they can."""
    if not torch.cuda.is_available():
        return seen_devices()
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        return f"our kernels need compute capability {needed}, and {device} has {found}"
    return triton_missing()


def triton_missing() -> str | None:
    """Why Triton compiles no kernels for CUDA devices here; None where it does."""
    if torch.version.hip is not None:
        return "Triton's kernels are for CUDA, and this torch is built for ROCm"
    try:
        found = version("triton")
    except PackageNotFoundError:
        return f"triton {LEAST_TRITON} or later is not installed"
    if tuple(map(int, found.split(".")[:2])) < tuple(map(int, LEAST_TRITON.split("."))):
        return f"triton is {found}, and {LEAST_TRITON} is the least"
    return None
