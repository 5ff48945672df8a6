"""The operations in compiled C for the CPU: checks, allocations, calls.

C trusts its arguments, so shapes, types and layouts are checked here. Slots, positions and list bounds inside a plan
are not: they come from the block tables, which check themselves.
"""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.ops.arena import Arena
from outrider.engine.ops.blocks import (
    LARGEST_WEIGHT,
    MAX_PARTS,
    QUANTISED,
    BlockMatrix,
    StackedMatrix,
    Weight,
    parts_of,
    refuse_weights,
)
from outrider.engine.ops.experts import Experts
from outrider.engine.ops.faults import refuse
from outrider.engine.ops.library import ExpertFields, Kernels, MatrixFields
from outrider.model_files.gguf.types import KINDS, OUTPUTS

MAX_THREADS = 256
MAX_HEAD_DIM = 512
# Of kernels/blocks.h.
FORMAT_PARTS, FORMAT_BF16, FORMAT_F32 = 1, 16, 32
FIRST_KINDS = {8: 256, 15: 512}
"""Number of the first kind of blocks, by the bits of what they are multiplied with."""
# How long an idle worker looks for work before it sleeps. Longer than what one thread does alone in the middle of a
# forward, far shorter than a network round trip, so that a waiting service leaves the processor to others. Measured on
# two processors: without looking a step of the embedded target takes a fifth longer; 50 and 200 save 1 to 4 hundredths.
SPIN_US = 20


class NativeOps:
    """Operations on the CPU; see outrider.engine.ops.Ops.

    Owns its threads: two objects in one process do not share any. One object may be called from several Python
    threads, which then take turns. The interpreter's lock is released during every call.
    """

    def __init__(
        self,
        kernels: Kernels,
        num_threads: int,
        spin_us: int = SPIN_US,
        packed_bits: int | None = None,
        input_bits: int = 8,
    ) -> None:
        """Raises ValueError for a number of threads outside 1..256."""
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads is {num_threads}, but must be 1 to {MAX_THREADS}")
        self.name = kernels.name
        self.num_threads = num_threads
        self.functions = kernels.functions
        self._arena = Arena()
        self._packed_bits = packed_bits
        self._input_bits = input_bits
        self._stretch: int = self.functions.outrider_draw_stretch()
        self.pool: int | None = self.functions.outrider_pool_create(num_threads, spin_us)
        if self.pool is None:
            raise MemoryError("no memory for the kernels' thread pool")
        # Not at exit: another thread may still be inside a kernel then, and the process takes the workers along.
        weakref.finalize(self, self.functions.outrider_pool_destroy, self.pool).atexit = False

    def stack(self, weights: Sequence[Weight]) -> Weight:
        """One matrix of all weights, floats in the memory of this object's arena; blocks stay where they are."""
        weights = [self.quantised(weight) for weight in weights]
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(weights) == 1 and not tensors:
            return weights[0]
        if len(tensors) == len(weights) and len({tensor.dtype for tensor in tensors}) == 1:
            return torch.cat(
                tensors, out=self._arena.empty((sum(map(len, tensors)), *tensors[0].shape[1:]), tensors[0].dtype)
            )
        parts = [part for weight in weights for part in parts_of(weight)]
        if len(parts) > MAX_PARTS:
            raise ValueError(f"a matrix has {len(parts)} parts, but must have at most {MAX_PARTS}")
        # `matrix_parts` of kernels/blocks.h, which holds the parts' addresses.
        places = [len(parts)]
        for part in parts:
            num_outputs, num_inputs = part.shape
            places += [*expect_weight("part", part, (num_outputs, num_inputs)), num_outputs]
        return StackedMatrix(tuple(parts), torch.tensor(places))

    def quantised(self, weight: Weight) -> Weight:
        if self._packed_bits is None or not isinstance(weight, Tensor):
            return weight
        matrix = self.blocks(QUANTISED[self._packed_bits], *weight.shape)
        self.quantise_rows(matrix, weight, 0)
        return matrix

    def packed_room(self, num_outputs: int, num_inputs: int) -> BlockMatrix | None:
        """A matrix for `quantise_rows`, with nothing in it yet; None where matrices stay as they are."""
        return self.blocks(QUANTISED[self._packed_bits], num_outputs, num_inputs) if self._packed_bits else None

    def quantise_rows(self, matrix: BlockMatrix, rows: Tensor, first_row: int) -> None:
        """Quantises rows [R, K] of any floats into first_row and on of a matrix of QUANTISED, with quantise's bits.

        Whole blocks of 16 rows but at the end. Raises ModelRefused as quantise does.
        """
        bits, (num_rows, num_inputs) = KINDS[matrix.kind].bits, rows.shape
        # Held until the kernel has read it: the address of a copy without an owner would be of freed memory.
        rows = (rows if rows.dtype is torch.bfloat16 else rows.float()).contiguous()
        place, number = expect_weight("rows", rows, (num_rows, matrix.num_inputs))
        expect("data", matrix.data, torch.uint8, KINDS[matrix.kind].shape(*matrix.shape))
        _check_rows(matrix, first_row, num_rows)
        blocks = matrix.data[first_row // OUTPUTS :].data_ptr()
        sizes = number, num_rows, num_inputs, bits, LARGEST_WEIGHT[bits]
        refuse_weights(self.functions.outrider_quantise(self.pool, place, *sizes, blocks), bits)

    def blocks(self, kind: str, num_outputs: int, num_inputs: int) -> BlockMatrix:
        """A matrix of a kind of GGUF, in this object's memory, with nothing in it yet; see `fill`."""
        return BlockMatrix.empty(kind, num_outputs, num_inputs, self._arena.empty, self._input_bits)

    def fill(self, matrix: BlockMatrix, stored: Tensor, first_row: int, head_dim: int = 0) -> int:
        """Rows first_row and on from those of a file, uint8 [rows, bytes]; returns how many scales are no numbers.

        Whole blocks of 16 rows but at the end. With head_dim whole heads of so many rows, in the order in which
        llama.cpp rotates them: neighbours are pairs, and here halves.
        """
        kind, num_rows = KINDS[matrix.kind], stored.shape[0]
        expect("stored", stored, torch.uint8, (num_rows, kind.row_bytes(matrix.num_inputs)))
        expect("data", matrix.data, torch.uint8, kind.shape(*matrix.shape))
        _check_rows(matrix, first_row, num_rows, head_dim or 1)
        sizes = first_row, num_rows, matrix.num_inputs, head_dim
        found: int = self.functions.outrider_fill_blocks(
            self.pool, matrix.number, stored.data_ptr(), *sizes, matrix.data.data_ptr()
        )
        return found

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        num_rows, (num_ids, num_inputs) = token_ids.shape[0], weight.shape
        expect("token_ids", token_ids, torch.int64, (num_rows,))
        output = torch.empty(num_rows, num_inputs)
        places = *expect_weight("weight", weight, (num_ids, num_inputs)), token_ids.data_ptr(), output.data_ptr()
        self.functions.outrider_embed(*places, num_rows, num_inputs)
        return output

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        (num_rows, num_inputs), num_outputs = _matrix("x", x), weight.shape[0]
        place, number = expect_weight("weight", weight, (num_outputs, num_inputs))
        if bias is not None:
            expect("bias", bias, torch.float32, (num_outputs,))
        output = torch.empty(num_rows, num_outputs)
        address = None if bias is None else bias.data_ptr()
        scratch_bytes = (
            0 if isinstance(weight, Tensor) else self.functions.outrider_linear_scratch(num_rows, num_inputs)
        )
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        places = x.data_ptr(), place, number, address, output.data_ptr()
        sizes = num_rows, num_inputs, num_outputs
        self.functions.outrider_linear(self.pool, *places, *sizes, scratch.data_ptr())
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        num_rows, width = _matrix("x", x)
        expect("weight", weight, torch.float32, (width,))
        output = torch.empty_like(x)
        places = x.data_ptr(), weight.data_ptr(), output.data_ptr()
        self.functions.outrider_rms_norm(self.pool, *places, num_rows, width, epsilon)
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
        num_rows, num_heads, head_dim = query.shape
        num_groups = key.shape[1]
        strides = (ctypes.c_int64 * 6)(
            *_head_strides("query", query, (num_rows, num_heads, head_dim)),
            *_head_strides("key", key, (num_rows, num_groups, head_dim)),
            *_head_strides("value", value, (num_rows, num_groups, head_dim)),
        )
        for name, table in (("cos", cos), ("sin", sin)):
            expect(name, table, torch.float32, (cos.shape[0], min(cos.shape[1], head_dim // 2)))
        number = expect_caches(key_cache, value_cache, (key_cache.shape[0], num_groups, head_dim))
        for name, column in (("positions", plan.positions), ("slots", plan.slots)):
            expect(name, column, torch.int64, (num_rows,))
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}, but must be even")
        output = torch.empty(num_rows, num_heads, head_dim)
        inputs = query.data_ptr(), key.data_ptr(), value.data_ptr(), ctypes.addressof(strides)
        places = plan.positions.data_ptr(), plan.slots.data_ptr(), cos.data_ptr(), sin.data_ptr()
        outputs = output.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), number
        sizes = num_rows, num_heads, num_groups, head_dim, 2 * cos.shape[1]
        self.functions.outrider_rotate_and_store(self.pool, *inputs, *places, *outputs, *sizes)
        return output

    def attention(
        self,
        query: Tensor,
        plan: RowPlan,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_slots, num_groups, _ = key_cache.shape
        expect("query", query, torch.float32, (num_rows, num_heads, head_dim))
        number = expect_caches(key_cache, value_cache, (num_slots, num_groups, head_dim))
        expect("key_slots", plan.key_slots, torch.int32, (plan.key_slots.shape[0],))
        expect("key_starts", plan.key_starts, torch.int64, (num_rows,))
        expect("key_counts", plan.key_counts, torch.int32, (num_rows,))
        if num_heads % num_groups or not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{num_heads} heads of {head_dim} over {num_groups} groups do not fit the kernels")
        if sinks is not None:
            expect("sinks", sinks, torch.float32, (num_heads,))
        output = torch.empty(num_rows, num_heads * head_dim)
        inputs = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), number
        lists = plan.key_slots.data_ptr(), plan.key_starts.data_ptr(), plan.key_counts.data_ptr()
        places = None if sinks is None else sinks.data_ptr(), output.data_ptr()
        sizes = num_rows, num_heads, num_groups, head_dim, plan.max_key_count
        self.functions.outrider_attention(self.pool, *inputs, *lists, *places, *sizes, scale)
        return output

    def gate_multiply(self, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        output = _room_beside(gate_up)
        places = gate_up.data_ptr(), output.data_ptr()
        self.functions.outrider_gate_multiply(self.pool, *places, *output.shape, is_gelu)
        return output

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        output = _room_beside(gate_up)
        places = gate_up.data_ptr(), output.data_ptr()
        self.functions.outrider_clamped_multiply(self.pool, *places, *output.shape, slope, limit)
        return output

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        (num_rows, hidden), output = _matrix("x", x), torch.empty_like(x)
        fields = expert_fields(experts, hidden)
        floats = torch.empty(self.functions.outrider_experts_floats(ctypes.addressof(fields), num_rows))
        places = x.data_ptr(), output.data_ptr(), num_rows, floats.data_ptr()
        self.functions.outrider_experts(self.pool, ctypes.addressof(fields), *places)
        return output

    def softmax(self, scores: Tensor) -> Tensor:
        num_rows, num_tokens = _matrix("scores", scores)
        probs = torch.empty(num_rows, num_tokens, dtype=torch.float64)
        faults = torch.empty(num_rows, dtype=torch.int32)
        places = scores.data_ptr(), probs.data_ptr(), faults.data_ptr()
        self.functions.outrider_softmax(self.pool, *places, num_rows, num_tokens)
        _refuse_faults(bool(faults.any()))
        return probs

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        num_rows, num_tokens = _matrix("scores", scores)
        expect("keys", keys, torch.int64, (num_rows,))
        stretches = -(-num_tokens // self._stretch)
        best, ids = _winners(num_rows * stretches)
        places = scores.data_ptr(), keys.data_ptr(), best.data_ptr(), ids.data_ptr()
        faults = self.functions.outrider_draw(self.pool, *places, num_rows, num_tokens, stretches)
        _refuse_faults(faults > 0)
        return ids if stretches == 1 else ids[:num_rows]

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        num_rows, num_logits = _matrix("logits", logits)
        expect("temperatures", temperatures, torch.float64, (num_rows,))
        expect("keys", keys, torch.int64, (num_rows,))
        if not 1 <= num_tokens <= num_logits:
            raise ValueError(f"num_tokens is {num_tokens}, but must be 1 to {num_logits}")
        stretches = -(-num_tokens // self._stretch)
        best, ids = _winners(num_rows * stretches)
        highest = torch.empty(num_rows)
        inputs = logits.data_ptr(), temperatures.data_ptr(), keys.data_ptr()
        places = highest.data_ptr(), best.data_ptr(), ids.data_ptr()
        sizes = num_rows, num_logits, num_tokens, stretches
        _refuse_faults(self.functions.outrider_choose(self.pool, *inputs, *places, *sizes) > 0)
        return ids if stretches == 1 else ids[:num_rows]

    def mask(self, logits: Tensor, bits: Tensor) -> Tensor:
        num_rows, num_logits = _matrix("logits", logits)
        num_words = bits.shape[-1]
        expect("bits", bits, torch.int32, (num_rows, num_words))
        masked = torch.empty_like(logits)
        places = logits.data_ptr(), bits.data_ptr(), masked.data_ptr()
        self.functions.outrider_mask(self.pool, *places, num_rows, num_logits, num_words)
        return masked

    def rank(self, scores: Tensor, scales: Tensor, count: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = _matrix("scores", scores)
        expect("scales", scales, torch.float64, (num_rows,))
        if keys is not None:
            expect("keys", keys, torch.int64, (num_rows,))
        ids = torch.empty(num_rows, count, dtype=torch.int64)
        shares = torch.empty(num_rows, count, dtype=torch.float64)
        sums, faults = torch.empty(num_rows, num_tokens, dtype=torch.float64), torch.empty(num_rows, dtype=torch.int32)
        inputs = scores.data_ptr(), None, None if keys is None else keys.data_ptr(), scales.data_ptr()
        places = sums.data_ptr(), ids.data_ptr(), shares.data_ptr(), faults.data_ptr()
        self.functions.outrider_rank(self.pool, *inputs, *places, num_rows, num_tokens, count)
        _refuse_faults(bool(faults.numpy().any()))
        return ids, shares


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor that C would misread."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, "
            f"but must be {dtype} {list(shape)}, contiguous, on the CPU"
        )


def expect_weight(name: str, weight: Weight, shape: tuple[int, int]) -> tuple[int, int]:
    """Address of a matrix of this shape, and its format; raises ValueError for what C would misread."""
    if isinstance(weight, Tensor):
        is_bf16 = weight.dtype is torch.bfloat16
        expect(name, weight, torch.bfloat16 if is_bf16 else torch.float32, shape)
        return weight.data_ptr(), FORMAT_BF16 if is_bf16 else FORMAT_F32
    if weight.shape != shape:
        raise ValueError(f"{name} is {list(weight.shape)}, but must be {list(shape)}")
    if isinstance(weight, StackedMatrix):
        return weight.places.data_ptr(), FORMAT_PARTS
    expect(name, weight.data, torch.uint8, KINDS[weight.kind].shape(*shape))
    return weight.data.data_ptr(), FIRST_KINDS[weight.input_bits] + weight.number


def weight_fields(name: str, weight: Weight, bias: Tensor | None, shape: tuple[int, int]) -> MatrixFields:
    """A matrix of this shape with its bias; raises ValueError for any other."""
    place, number = expect_weight(name, weight, shape)
    return MatrixFields(place, address_of(f"bias of {name}", bias, shape[:1]), shape[1], shape[0], number)


def address_of(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
    """Address of a float32 tensor of this shape, None for none; raises ValueError for any other."""
    if tensor is None:
        return None
    expect(name, tensor, torch.float32, shape)
    return tensor.data_ptr()


def expert_fields(experts: Experts, hidden: int) -> ExpertFields:
    """Addresses in the experts' tensors, which must live as long; raises ValueError for what C would misread."""
    count, width = experts.num_experts, experts.down.shape[1]
    if not 1 <= experts.num_chosen <= count:
        raise ValueError(f"{experts.num_chosen} experts are chosen of {count}")
    if any(isinstance(weight, StackedMatrix) for weight in experts.matrices):
        raise ValueError("the matrices of experts are of one type, and not of several parts")
    router = weight_fields("router", experts.router, experts.router_bias, (count, hidden))
    gate, up = (weight_fields("gate", each, None, (count * width, hidden)) for each in (experts.gate, experts.up))
    down = weight_fields("down", experts.down, None, (count * hidden, width))
    # Theirs have a row for each expert.
    gate.bias = address_of("bias of gate and up", experts.gate_up_bias, (count, 2 * width))
    down.bias = address_of("bias of down", experts.down_bias, (count, hidden))
    chosen = experts.num_chosen, experts.is_normalised
    return ExpertFields(router, gate, up, down, count, *chosen, *(experts.clamp or (0.0, 0.0)))


def expect_caches(keys: Tensor, values: Tensor, shape: tuple[int, int, int]) -> int:
    """The format of keys and values of this shape; raises ValueError for what C would misread."""
    dtype = keys.dtype if keys.dtype is torch.bfloat16 else torch.float32
    for name, cache in (("key_cache", keys), ("value_cache", values)):
        expect(name, cache, dtype, shape)
    return FORMAT_BF16 if dtype is torch.bfloat16 else FORMAT_F32


def _winners(num_stretches: int) -> tuple[Tensor, Tensor]:
    """Room for the winners of all stretches of rows: their scores and their ids."""
    return torch.empty(num_stretches, dtype=torch.float64), torch.empty(num_stretches, dtype=torch.int64)


def _check_rows(matrix: BlockMatrix, first_row: int, num_rows: int, head_dim: int = 1) -> None:
    """Raises ValueError for rows that C would write elsewhere."""
    last = first_row + num_rows
    is_whole = first_row % OUTPUTS == 0 and (last % OUTPUTS == 0 or last == matrix.num_outputs)
    if not is_whole or not 0 <= first_row <= last <= matrix.num_outputs or num_rows % head_dim:
        raise ValueError(f"rows {first_row} to {last} are not whole blocks and heads of {matrix.num_outputs}")


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.shape[1] == 0:
        raise ValueError(f"{name} is {list(tensor.shape)}, but must be two-dimensional with at least one column")
    num_rows, width = tensor.shape
    expect(name, tensor, torch.float32, (num_rows, width))
    return num_rows, width


def _room_beside(gate_up: Tensor) -> Tensor:
    """Room for what a gate makes of gate_up."""
    num_rows, width = _matrix("gate_up", gate_up)
    if width % 2:
        raise ValueError(f"gate_up has {width} columns, but must have an even number")
    return torch.empty(num_rows, width // 2)


def _head_strides(name: str, heads: Tensor, shape: tuple[int, int, int]) -> tuple[int, int]:
    if heads.dtype is not torch.float32 or heads.shape != shape or not heads.is_cpu:
        raise ValueError(f"{name} is {heads.dtype} {list(heads.shape)}, but must be float32 {list(shape)} on the CPU")
    row, head, within = heads.stride()
    if within != 1 and shape[2] > 1:
        raise ValueError(f"{name} has stride {within} in its last dimension, but must have 1")
    return row, head


def _refuse_faults(found: bool) -> None:
    if found:
        raise refuse()
