"""The operations in compiled C for the CPU. Computes nothing in Python: checks, allocates, calls.

C trusts its arguments, so shapes, types and layouts are checked here. Slots, positions and list bounds inside a plan
are not: they come from the block tables, which check themselves.
"""

import ctypes
import weakref

import torch
from torch import Tensor

from outrider.engine.ops.library import Kernels
from outrider.engine.plan import RowPlan

MAX_THREADS = 256
MAX_HEAD_DIM = 512
# How long an idle worker looks for the next operation before it sleeps. Longer than the pause between two operations
# of a forward, far shorter than a network round trip, so that a waiting service leaves the processor to others.
SPIN_US = 20


class NativeOps:
    """Operations on the CPU; see outrider.engine.ops.Ops for shapes.

    Owns its threads: two objects in one process do not share any. One object may be called from several Python
    threads, which then take turns. The interpreter's lock is released during every call.
    """

    def __init__(self, kernels: Kernels, num_threads: int, spin_us: int = SPIN_US) -> None:
        """Raises ValueError for a number of threads outside 1..256."""
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads is {num_threads}, but must be 1 to {MAX_THREADS}")
        self.name = kernels.name
        self.num_threads = num_threads
        self._functions = kernels.functions
        self._stretch: int = self._functions.outrider_draw_stretch()
        self._pool: int | None = self._functions.outrider_pool_create(num_threads, spin_us)
        if self._pool is None:
            raise MemoryError("no memory for the kernels' thread pool")
        # Not at exit: another thread may still be inside a kernel then, and the process takes the workers along.
        weakref.finalize(self, self._functions.outrider_pool_destroy, self._pool).atexit = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K], weight [N, K] -> [R, N] float32."""
        (num_rows, num_inputs), num_outputs = _matrix("x", x), weight.shape[0]
        is_bf16 = weight.dtype is torch.bfloat16
        _expect("weight", weight, torch.bfloat16 if is_bf16 else torch.float32, (num_outputs, num_inputs))
        if bias is not None:
            _expect("bias", bias, torch.float32, (num_outputs,))
        output = torch.empty(num_rows, num_outputs)
        address = None if bias is None else bias.data_ptr()
        places = x.data_ptr(), weight.data_ptr(), is_bf16, address, output.data_ptr()
        self._functions.outrider_linear(self._pool, *places, num_rows, num_inputs, num_outputs)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x [R, D], weight [D] -> [R, D]."""
        num_rows, width = _matrix("x", x)
        _expect("weight", weight, torch.float32, (width,))
        output = torch.empty_like(x)
        places = x.data_ptr(), weight.data_ptr(), output.data_ptr()
        self._functions.outrider_rms_norm(self._pool, *places, num_rows, width, epsilon)
        return output

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
        """Stores the rotated key and the value, returns the rotated query [R, H, D]."""
        num_rows, num_heads, head_dim = query.shape
        num_groups = key.shape[1]
        strides = (ctypes.c_int64 * 6)(
            *_head_strides("query", query, (num_rows, num_heads, head_dim)),
            *_head_strides("key", key, (num_rows, num_groups, head_dim)),
            *_head_strides("value", value, (num_rows, num_groups, head_dim)),
        )
        for name, table in (("cos", cos), ("sin", sin)):
            _expect(name, table, torch.float32, (cos.shape[0], head_dim // 2))
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            _expect(name, cache, torch.float32, (key_cache.shape[0], num_groups, head_dim))
        for name, column in (("positions", plan.positions), ("slots", plan.slots)):
            _expect(name, column, torch.int64, (num_rows,))
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}, but must be even")
        output = torch.empty(num_rows, num_heads, head_dim)
        inputs = query.data_ptr(), key.data_ptr(), value.data_ptr(), ctypes.addressof(strides)
        places = plan.positions.data_ptr(), plan.slots.data_ptr(), cos.data_ptr(), sin.data_ptr()
        outputs = output.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        sizes = num_rows, num_heads, num_groups, head_dim
        self._functions.outrider_rotate_and_store(self._pool, *inputs, *places, *outputs, *sizes)
        return output

    def attention(self, query: Tensor, plan: RowPlan, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """query [R, H, D] -> [R, H*D]."""
        num_rows, num_heads, head_dim = query.shape
        num_slots, num_groups, _ = key_cache.shape
        _expect("query", query, torch.float32, (num_rows, num_heads, head_dim))
        _expect("key_cache", key_cache, torch.float32, (num_slots, num_groups, head_dim))
        _expect("value_cache", value_cache, torch.float32, (num_slots, num_groups, head_dim))
        _expect("key_slots", plan.key_slots, torch.int32, (plan.key_slots.shape[0],))
        _expect("key_starts", plan.key_starts, torch.int64, (num_rows,))
        _expect("key_counts", plan.key_counts, torch.int32, (num_rows,))
        if num_heads % num_groups or not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{num_heads} heads of {head_dim} over {num_groups} groups do not fit the kernels")
        output = torch.empty(num_rows, num_heads * head_dim)
        inputs = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        lists = plan.key_slots.data_ptr(), plan.key_starts.data_ptr(), plan.key_counts.data_ptr()
        sizes = num_rows, num_heads, num_groups, head_dim, plan.max_key_count
        self._functions.outrider_attention(self._pool, *inputs, *lists, output.data_ptr(), *sizes, scale)
        return output

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """gate_up [R, 2M] -> [R, M]."""
        num_rows, width = _matrix("gate_up", gate_up)
        if width % 2:
            raise ValueError(f"gate_up has {width} columns, but must have an even number")
        output = torch.empty(num_rows, width // 2)
        places = gate_up.data_ptr(), output.data_ptr()
        self._functions.outrider_silu_multiply(self._pool, *places, num_rows, width // 2)
        return output

    def softmax(self, scores: Tensor) -> Tensor:
        """scores [R, V] -> float64 [R, V]."""
        num_rows, num_tokens = _matrix("scores", scores)
        probs = torch.empty(num_rows, num_tokens, dtype=torch.float64)
        faults = torch.empty(num_rows, dtype=torch.int32)
        places = scores.data_ptr(), probs.data_ptr(), faults.data_ptr()
        self._functions.outrider_softmax(self._pool, *places, num_rows, num_tokens)
        _refuse_faults(bool(faults.any()))
        return probs

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        """scores [R, V], keys [R] -> ids [R]."""
        num_rows, num_tokens = _matrix("scores", scores)
        _expect("keys", keys, torch.int64, (num_rows,))
        stretches = -(-num_tokens // self._stretch)
        best = torch.empty(num_rows, stretches, dtype=torch.float64)
        ids = torch.empty(num_rows, stretches, dtype=torch.int64)
        places = scores.data_ptr(), keys.data_ptr(), best.data_ptr(), ids.data_ptr()
        self._functions.outrider_draw(self._pool, *places, num_rows, num_tokens, stretches)
        # torch.argmax returns the first of equal maxima, so ties between stretches go to the lowest id as well.
        winners = ids[:, 0] if stretches == 1 else ids.gather(1, best.argmax(1, keepdim=True))[:, 0]
        _refuse_faults(bool((winners == -1).any() or (ids == -2).any()))
        return winners


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, "
            f"but must be {dtype} {list(shape)}, contiguous, on the CPU"
        )


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.shape[1] == 0:
        raise ValueError(f"{name} is {list(tensor.shape)}, but must be two-dimensional with at least one column")
    num_rows, width = tensor.shape
    _expect(name, tensor, torch.float32, (num_rows, width))
    return num_rows, width


def _head_strides(name: str, heads: Tensor, shape: tuple[int, int, int]) -> tuple[int, int]:
    if heads.dtype is not torch.float32 or heads.shape != shape or not heads.is_cpu:
        raise ValueError(f"{name} is {heads.dtype} {list(heads.shape)}, but must be float32 {list(shape)} on the CPU")
    row, head, within = heads.stride()
    if within != 1 and shape[2] > 1:
        raise ValueError(f"{name} has stride {within} in its last dimension, but must have 1")
    return row, head


def _refuse_faults(found: bool) -> None:
    if found:
        raise ValueError("every row of scores needs a finite score and neither NaN nor +inf")
