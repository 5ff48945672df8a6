"""The operations as kernels that Triton compiles for a GPU. A row's bits depend on nothing but the row.

Weights and cache are read in their own type, sums are float32. The only module that imports Triton's kernels, so that
machines without Triton need not have it.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import triton
from torch import Tensor

from outrider.engine.batching import CHUNK, RowPlan
from outrider.engine.ops.blocks import Weight
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.triton import attention, choose, linear, rows

# Of a persistent grid and of a product that is divided: this many programs for each multiprocessor.
PROGRAMS_EACH = 4
DIVIDED_BELOW = 3
FEW_ROWS = 64
# Numbers that attention's chunks may leave for a forward, 256 MiB: rows of long prompts are computed in turns.
PARTIAL_FLOATS = 1 << 26
LOG2_E = 1.4426950408889634
# Products and sums are not contracted, or their bits would depend on the compiler's version.
OPTIONS = {"enable_fp_fusion": False}


class TritonOps(EagerOps):
    """Operations as compiled kernels; see outrider.engine.ops.Ops."""

    def __init__(self, device: torch.device, has_graphs: bool = True) -> None:
        """With graphs the forwards of a transformer are recorded and replayed."""
        super().__init__()
        self.device, self.has_graphs = device, has_graphs
        self.is_interpreted: bool = triton.knobs.runtime.interpret

    @cached_property
    def name(self) -> str:  # type: ignore[override]
        """With what the order of sums hangs on: the card's kind, the length of a chunk, the compiler's version."""
        release = ".".join(triton.__version__.split(".")[:2])
        kind = "" if self.is_interpreted else "sm{}{}-".format(*self.capability)
        return f"{kind}triton-v1.c{CHUNK}.t{release}"

    @cached_property
    def capability(self) -> tuple[int, int]:
        """The card's kind; (0, 0) in the interpreter."""
        return (0, 0) if self.is_interpreted else torch.cuda.get_device_capability(self.device)

    @cached_property
    def overlap(self) -> dict[str, bool]:
        """Options of a kernel that begins while the one before it ends, where the card knows that (from Hopper on)."""
        if self.capability < (9, 0):
            return {"OVERLAPS": False}
        return {"OVERLAPS": True, "launch_pdl": True}

    @cached_property
    def options(self) -> dict[str, bool]:
        """What kernels of a chain are compiled and launched with."""
        return {**OPTIONS, **self.overlap}

    @cached_property
    def num_processors(self) -> int:
        """Multiprocessors of the device; a few where Triton's interpreter stands for one."""
        return 4 if self.is_interpreted else torch.cuda.get_device_properties(self.device).multi_processor_count

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory that one program may have; no bound in the interpreter, which has none."""
        if self.is_interpreted:
            return 1 << 30
        found: int = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        return found

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        partials = self.parts_of_product(x, weight)
        if partials.shape[0] == 1 and bias is None:
            return partials[0]
        num_parts, num_rows, num_outputs = partials.shape
        output = torch.empty(num_rows, num_outputs, device=x.device)
        grid, sizes = (num_rows, triton.cdiv(num_outputs, 1024)), (num_rows, num_outputs)
        given = partials if bias is None else bias
        constants = {"NUM_PARTS": num_parts, "HAS_BIAS": bias is not None, "BLOCK": 1024, **OPTIONS}
        linear.sum_units[grid](partials, given, output, *sizes, **constants)
        return output

    def parts_of_product(self, x: Tensor, weight: Weight) -> Tensor:
        """Parts [P, R, N] whose sum, in order, is x [R, K] times the transpose of weight [N, K], in its type."""
        if not isinstance(weight, Tensor):
            raise ValueError("packed matrices are for the CPU")
        x = x.to(weight.dtype).contiguous()
        (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
        few = num_rows <= FEW_ROWS
        if weight.dtype is torch.float32:
            block = 32, 16, 32
        elif few:
            block = 64, max(16, triton.next_power_of_2(num_rows)), 128
        else:
            block = 128, 128, 64
        unit = linear.unit_of(num_outputs, num_inputs)
        num_units = triton.cdiv(num_inputs, unit)
        tiles = triton.cdiv(num_outputs, block[0]) * triton.cdiv(num_rows, block[1])
        # A division changes who adds, and not what is added to what.
        is_divided = num_units > 1 and tiles < (DIVIDED_BELOW if few else 1) * self.num_processors
        num_parts = num_units if is_divided else 1
        partials = torch.empty(num_parts, num_rows, num_outputs, device=x.device)
        grid = triton.cdiv(num_outputs, block[0]), num_parts, triton.cdiv(num_rows, block[1])
        linear.linear_units[grid](
            x,
            weight,
            partials,
            num_rows,
            num_outputs,
            num_inputs,
            1 if is_divided else num_units,
            UNIT=unit,
            BLOCK_OUTPUTS=block[0],
            BLOCK_ROWS=block[1],
            BLOCK_INPUTS=block[2],
            IS_EVEN=num_outputs % block[0] == 0 and num_inputs % block[2] == 0,
            WIDE=self.is_wide(weight.dtype),
            BRANCHES=self.capability[0] == 10,
            num_warps=4 if few else 8,
            num_stages=stages_that_fit(5 if few else 3, block, weight.dtype, self.shared_bytes),
            **self.options,
        )
        return partials

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        num_rows, size = x.shape
        output = torch.empty_like(x)
        rows.rms_norm[(num_rows,)](x, weight, output, size, epsilon, **norm_options(size))
        return output

    def gate_multiply(self, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(num_rows, width, device=gate_up.device)
        grid, sizes = (num_rows, triton.cdiv(width, 1024)), {"IS_GELU": is_gelu, "BLOCK": 1024}
        rows.gate_multiply[grid](gate_up, output, width, **sizes, **OPTIONS)
        return output

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(num_rows, width, device=gate_up.device)
        grid = num_rows, triton.cdiv(width, 1024)
        rows.clamped_multiply[grid](gate_up, output, width, slope, limit, BLOCK=1024, **OPTIONS)
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
        output = torch.empty(num_rows, num_heads, head_dim, device=query.device)
        rows.rotate_and_store[(num_rows, num_heads + num_groups)](
            query,
            key,
            value,
            plan.positions,
            plan.slots,
            cos,
            sin,
            output,
            key_cache,
            value_cache,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            num_heads,
            num_groups,
            HEAD_DIM=head_dim,
            TURNING=2 * cos.shape[1],
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
            **OPTIONS,
        )
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
        """Rows that see the same list share its chunks where the plan has the work for it."""
        num_rows, num_heads, head_dim = query.shape
        query, output = query.contiguous(), torch.empty(num_rows, num_heads * head_dim, device=query.device)
        if plan.work is not None:
            partials = self.room_for_chunks(plan.num_row_chunks, num_heads, head_dim)
            self.attend_together(
                query, plan.work, plan.tile_rows, key_cache, value_cache, scale, partials, output, sinks
            )
            return output
        num_chunks = triton.cdiv(plan.max_key_count, CHUNK)
        at_once = max(1, PARTIAL_FLOATS // (num_chunks * num_heads * (head_dim + 2)))
        for first in range(0, num_rows, at_once):
            part = slice(first, first + at_once)
            self._attend_alone(query[part], plan, part, key_cache, value_cache, scale, output[part], sinks)
        return output

    def _attend_alone(
        self,
        query: Tensor,
        plan: RowPlan,
        part: slice,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        output: Tensor,
        sinks: Tensor | None,
    ) -> None:
        num_rows, num_heads, head_dim = query.shape
        num_groups, num_chunks = key_cache.shape[1], triton.cdiv(plan.max_key_count, CHUNK)
        heads = triton.next_power_of_2(num_heads // num_groups)
        partials = self.room_for_chunks(num_rows * num_chunks, num_heads, head_dim)
        attention.sum_own_chunks[(num_chunks, num_groups, num_rows)](
            query,
            key_cache,
            value_cache,
            plan.key_slots,
            plan.key_starts[part],
            plan.key_counts[part],
            *partials,
            num_chunks,
            num_heads,
            num_groups,
            scale * LOG2_E,
            **self._sum_constants(key_cache, heads, max(16, heads)),
        )
        attention.join_own_chunks[(num_rows, num_heads)](
            *partials,
            plan.key_counts[part],
            output if sinks is None else sinks,
            output,
            num_heads,
            num_chunks,
            **_join_constants(head_dim, sinks),
        )

    def attend_together(  # noqa: PLR0913, PLR0917 - what a kernel reads
        self,
        query: Tensor,
        work: Tensor,
        tile_rows: int,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        partials: Sequence[Tensor],
        output: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes `attention` of query [R, H, D] into output [R, H * D], by shared work with items of tile_rows."""
        num_rows, num_heads, head_dim = query.shape
        num_groups = key_cache.shape[1]
        heads = triton.next_power_of_2(num_heads // num_groups)
        attention.sum_shared_chunks[(PROGRAMS_EACH * self.num_processors,)](
            query,
            key_cache,
            value_cache,
            work,
            *partials,
            num_heads,
            num_groups,
            scale * LOG2_E,
            **self._sum_constants(key_cache, heads, heads * tile_rows),
            **self.overlap,
        )
        attention.join_shared_chunks[(num_rows, num_heads)](
            *partials,
            work,
            output if sinks is None else sinks,
            output,
            num_heads,
            **_join_constants(head_dim, sinks),
            **self.overlap,
        )

    def room_for_chunks(self, num_row_chunks: int, num_heads: int, head_dim: int) -> Sequence[Tensor]:
        """Room for maxima and sums [chunks, H] and weighted values [chunks, H, D] of the chunks of all rows."""
        shape = num_row_chunks, num_heads
        empty = torch.empty(2, *shape, device=self.device)
        return empty[0], empty[1], torch.empty(*shape, head_dim, device=self.device)

    def _sum_constants(self, key_cache: Tensor, heads: int, tile: int) -> dict[str, int | bool]:
        head_dim = key_cache.shape[2]
        is_wide = self.is_wide(key_cache.dtype)
        sizes = {"CHUNK": CHUNK, "STEP": 64, "TILE": tile, "HEADS": heads}
        dims = {"HEAD_DIM": head_dim, "BLOCK_DIM": triton.next_power_of_2(head_dim)}
        return {**sizes, **dims, "WIDE": is_wide, "num_warps": 4, "num_stages": 3, **OPTIONS}

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Whether products of this type are made of float32: it is float32, or the interpreter knows no other way."""
        return dtype is torch.float32 or (self.is_interpreted and dtype is torch.bfloat16)

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        num_rows = logits.shape[0]
        num_pieces = triton.cdiv(num_tokens, choose.PIECE)
        best = torch.empty(num_rows, num_pieces, device=logits.device)
        tokens = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=logits.device)
        sums, winners = torch.empty_like(best, dtype=torch.float64), torch.empty_like(tokens)
        ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        grid, sizes = (num_rows, num_pieces), (num_tokens, logits.stride(0), num_pieces)
        blocks = {"PIECE": choose.PIECE, "BLOCK": choose.BLOCK, **OPTIONS}
        pieces = triton.next_power_of_2(num_pieces)
        choose.find_best[grid](logits, best, tokens, *sizes, **blocks)
        found = best, tokens, sums, winners
        choose.add_noise[grid](logits, temperatures, keys, *found, *sizes, PIECES=pieces, **blocks)
        choose.settle[(num_rows,)](sums, winners, ids, num_pieces, PIECES=pieces, num_warps=1, **OPTIONS)
        return ids


def _join_constants(head_dim: int, sinks: Tensor | None) -> dict[str, int | bool]:
    """What attention's chunks of this head dimension are joined with."""
    dims = {"HEAD_DIM": head_dim, "BLOCK_DIM": triton.next_power_of_2(head_dim), "HAS_SINKS": sinks is not None}
    return {"CHUNK": CHUNK, "JOINED": attention.JOINED, **dims, "num_warps": 2, **OPTIONS}


def norm_options(size: int) -> dict[str, int | bool]:
    """What a norm of rows of this size is compiled for; the order of its sum hangs on it."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512)), **OPTIONS}


def stages_that_fit(stages: int, block: tuple[int, int, int], dtype: torch.dtype, shared_bytes: int) -> int:
    """At most so many steps of a product with blocks (outputs, rows, inputs) under way at once, as a card has room for.

    That is a question of speed: steps are added in their order, however many are being loaded.
    """
    num_outputs, num_rows, num_inputs = block
    return max(1, min(stages, shared_bytes // ((num_outputs + num_rows) * num_inputs * dtype.itemsize)))
