"""Finds the compiled kernels that this processor can run and declares their C functions."""

import ctypes
import platform
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from outrider.model_files.gguf.types import KINDS, Scale

CPU_INFO = Path("/proc/cpuinfo")
FOLDER = Path(__file__).parent
# The features of the psABI's levels, as Linux spells them.
V3_FLAGS = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
V4_FLAGS = V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_POINTER, _INT, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, list[type]] = {
    "outrider_pool_create": [_INT, _INT],
    "outrider_pool_destroy": [_POINTER],
    "outrider_linear": [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, *[_SIZE] * 3, _POINTER],
    "outrider_linear_scratch": [*[_SIZE] * 2],
    "outrider_fill_blocks": [_POINTER, _SIZE, _POINTER, *[_SIZE] * 4, _POINTER],
    "outrider_describe_kind": [_SIZE, _POINTER],
    "outrider_quantise": [*[_POINTER] * 2, *[_SIZE] * 4, _FLOAT, _POINTER],
    "outrider_embed": [_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE],
    "outrider_rms_norm": [*[_POINTER] * 4, _SIZE, _SIZE, _FLOAT],
    "outrider_rotate_and_store": [*[_POINTER] * 12, *[_SIZE] * 6],
    "outrider_attention": [*[_POINTER] * 4, _SIZE, *[_POINTER] * 5, *[_SIZE] * 5, _FLOAT],
    "outrider_gate_multiply": [*[_POINTER] * 3, *[_SIZE] * 3],
    "outrider_experts_floats": [_POINTER, _SIZE],
    "outrider_experts": [*[_POINTER] * 4, _SIZE, _POINTER],
    "outrider_clamped_multiply": [*[_POINTER] * 3, *[_SIZE] * 2, _FLOAT, _FLOAT],
    "outrider_draw": [*[_POINTER] * 5, *[_SIZE] * 3],
    "outrider_choose": [*[_POINTER] * 7, *[_SIZE] * 4],
    "outrider_mask": [*[_POINTER] * 4, *[_SIZE] * 3],
    "outrider_draw_stretch": [],
    "outrider_softmax": [*[_POINTER] * 4, *[_SIZE] * 2],
    "outrider_rank": [*[_POINTER] * 9, *[_SIZE] * 3],
    "outrider_forward_floats": [_POINTER, _SIZE],
    "outrider_forward": [*[_POINTER] * 6, _SIZE, _SIZE, _POINTER, _POINTER],
    "outrider_forward_line": [*[_POINTER] * 4, _SIZE, *[_POINTER] * 8, *[_SIZE] * 2],
    "outrider_head_floats": [_POINTER, _SIZE, _SIZE],
    "outrider_head_forward": [*[_POINTER] * 8],
    "outrider_head_line": [*[_POINTER] * 14, *[_SIZE] * 2],
    "outrider_head_states": [_POINTER, _POINTER, _SIZE, *[_POINTER] * 4, _SIZE, _POINTER],
}
_SIZED = (
    "outrider_draw",
    "outrider_choose",
    "outrider_draw_stretch",
    "outrider_linear_scratch",
    "outrider_fill_blocks",
    "outrider_describe_kind",
    "outrider_quantise",
    "outrider_experts_floats",
    "outrider_forward_floats",
    "outrider_forward_line",
    "outrider_head_floats",
    "outrider_head_line",
)
_RESULTS: dict[str, type] = {
    "outrider_pool_create": _POINTER,
    **dict.fromkeys(_SIZED, _SIZE),
}


class MatrixFields(ctypes.Structure):
    """`matrix` of kernels/kernels.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        *((name, _SIZE) for name in ("num_inputs", "num_outputs", "format")),
    )


class ExpertFields(ctypes.Structure):
    """`experts` of kernels/kernels.h."""

    _fields_ = (
        *((name, MatrixFields) for name in ("router", "gate", "up", "down")),
        *((name, _SIZE) for name in ("num_experts", "num_chosen", "is_normalised")),
        *((name, _FLOAT) for name in ("slope", "limit")),
    )


class LayerFields(ctypes.Structure):
    """`layer` of kernels/forward.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, _POINTER) for name in ("attended_norm", "mlp_norm", "cos", "sin")),
        *((name, MatrixFields) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", _POINTER),
        ("plan", _SIZE),
        ("sinks", _POINTER),
    )


class DecoderFields(ctypes.Structure):
    """`decoder` of kernels/forward.c."""

    _fields_ = (
        *((name, MatrixFields) for name in ("embedding", "head")),
        *((name, _POINTER) for name in ("norm", "layers")),
        *((name, _SIZE) for name in ("num_layers", "num_heads", "num_groups", "head_dim", "num_turning", "is_gelu")),
        ("cache_format", _SIZE),
        *((name, _FLOAT) for name in ("epsilon", "scale", "embedding_scale")),
    )


class TapFields(ctypes.Structure):
    """`taps` of kernels/forward.c."""

    _fields_ = (*((name, _POINTER) for name in ("boundaries", "features")), ("num_taps", _SIZE))


class HeadFields(ctypes.Structure):
    """`feature_head` of kernels/forward.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("model", "embedding_norm", "state_norm")),
        ("fuse", MatrixFields),
        ("target_ids", _POINTER),
        *((name, _SIZE) for name in ("vocab_size", "is_reversed", "has_normed_residual", "feeds_normed")),
    )


class PlanFields(ctypes.Structure):
    """`row_plan` of kernels/forward.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "key_slots", "key_starts", "key_counts")),
        ("wanted", _POINTER),
        *((name, _SIZE) for name in ("num_rows", "max_key_count", "num_wanted")),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """One loaded library; its name stands in the numerics id."""

    name: str
    functions: ctypes.CDLL


def processor_levels() -> tuple[str, ...]:
    """Names of the kernel builds that this processor can run, fastest first; empty where that is not known."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return ("native",)
    if not CPU_INFO.exists():
        return ()
    lines = CPU_INFO.read_text().splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    levels = {"native-v4": V4_FLAGS, "native-v3": V3_FLAGS}
    return tuple(name for name, needed in levels.items() if needed <= flags)


def load_kernels(*names: str, folder: Path = FOLDER) -> Kernels | None:
    """The fastest kernels that are built and run here, or the first of `names`; None where there are none.

    A build for every Python goes before one that an earlier version made for a single one. Another folder is one of
    another version whose functions have the same arguments.
    """
    for name in names or processor_levels():
        stem = "_" + name.replace("-", "_")
        paths = (folder / (stem + suffix) for suffix in reversed(EXTENSION_SUFFIXES))
        path = next((path for path in paths if path.exists()), None)
        if path is not None and name in processor_levels():
            functions = ctypes.CDLL(str(path))
            for function_name, arguments in _ARGUMENTS.items():
                function = getattr(functions, function_name)
                function.argtypes, function.restype = arguments, _RESULTS.get(function_name)
            _check_kinds(path, functions)
            return Kernels(name, functions)
    return None


def _check_kinds(path: Path, functions: ctypes.CDLL) -> None:
    """Raises RuntimeError for kernels that take a type's blocks for something else than the engine does."""
    scales = list(Scale)
    for number, (name, kind) in enumerate(KINDS.items()):
        described = (ctypes.c_int64 * 22)()
        count = functions.outrider_describe_kind(number, described)
        sizes, made = (kind.block_len, kind.block_bytes), (kind.bits, scales.index(kind.scale))
        known = *sizes, *made, int(kind.has_minimum), kind.offset, *(kind.table or (0,) * 16)
        if (count, tuple(described)) != (len(KINDS), known):
            raise RuntimeError(
                f"{path} has {count} types and describes {name} as {list(described)}, but the engine has "
                f"{len(KINDS)} and {list(known)}: build this version's kernels (`python setup.py build_ext --inplace`)"
            )
