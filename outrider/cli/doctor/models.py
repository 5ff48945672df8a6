"""A model's files as far as they can be read without loading it, and whether a pair fits. Reads headers, no weights."""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.doctor.downloads import downloaded
from outrider.cli.doctor.findings import CONFIG, Finding, failed, ok, skipped, told, warning
from outrider.errors import ModelRefused
from outrider.model_names import CONTEXT_LEN, parse, unsized
from outrider.vocabulary import Vocabulary

VOCABULARY = "vocabulary"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# A header is at most this long in the format's own reader.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files say. The widths are for the size of the cache: numbers of one token's keys in all layers."""

    role: str
    name: str
    folder: Path
    parameter_count: int
    stored_dtype: str
    context_len: int
    key_value_width: int
    vocabulary: Vocabulary


def read_model(role: str, model: str) -> ModelFiles | None:
    """Reads a folder, a hub id that was downloaded, or the embedded part of a sized model. Raises ModelRefused.

    None for a hub id that is not here.
    """
    sized = parse(model, role)
    given = Path(unsized(model)).expanduser()
    folder = given if given.is_dir() else downloaded(model)
    if folder is None:
        return None
    config = _json_of(folder / "config.json")
    stored, count = _weights(folder)
    width, context_len = _key_value_width(config), _integer(config, "max_position_embeddings", 0)
    if sized is not None:
        shape = sized.shape
        count, context_len = shape.parameter_count, CONTEXT_LEN
        width = shape.num_layers * shape.num_kv_heads * shape.head_dim
    name = sized.name if sized else (given.resolve() if given.is_dir() else given).name
    return ModelFiles(role, name, folder, count, stored, context_len, width, Vocabulary.read(folder))


def judge_model(role: str, model: str | None, files: ModelFiles | ModelRefused | None, dtype: str) -> Finding:
    """One model of the pair."""
    check = f"{role} model"
    if model is None:
        return skipped(check, f"There is no {role}: the target decodes plainly.", f"Name one with --{role}.")
    if isinstance(files, ModelRefused):
        return failed(check, _sentence(files.message), f"Name another model with --{role}.", CONFIG)
    if files is None:
        return skipped(check, f"{model} is no folder, and as a hub id not downloaded.", download_fix([model]))
    sentence = (
        f"{files.name}: {told(files.parameter_count, 'parameter')} in {files.stored_dtype}, served in {dtype}, "
        f"context of {files.context_len:,} tokens ({files.folder})."
    )
    if files.stored_dtype == "float16":
        fix = "Use --dtype float32 to keep every bit of the file."
        return warning(check, f"{sentence} bfloat16 keeps 3 bits less of each number.", fix)
    return ok(check, sentence)


def download_fix(names: Sequence[str]) -> str:
    """How models of the hub come here; `outrider up` does it as well."""
    commands = (f"`hf download {name.replace('@', ' --revision ')}`" for name in names)
    return f"Run {' and '.join(commands)}, or let `outrider up` download."


def judge_absent(names: Sequence[str]) -> Finding:
    """Instead of judge_pair, where these models of the pair could not be read."""
    return skipped(VOCABULARY, f"There is nothing to compare without the files of {' and '.join(names)}.")


def judge_pair(target: ModelFiles, draft: ModelFiles) -> list[Finding]:
    """Whether ids mean the same tokens to both, and how far the draft can see."""
    difference = target.vocabulary.difference(draft.vocabulary)
    if difference is not None:
        fix = "Name a draft with the target's tokenizer with --draft, or leave it out with --no-draft."
        return [failed(VOCABULARY, difference, fix, CONFIG)]
    findings = [ok(VOCABULARY, f"Both models have the same {target.vocabulary.size:,} tokens under the same ids.")]
    if 0 < draft.context_len < target.context_len:
        sentence = (
            f"The draft's context of {draft.context_len:,} tokens ends before the target's {target.context_len:,}; "
            "decoding is plain from there."
        )
        findings.append(warning("context", sentence, "Name a draft with a longer context if requests get that long."))
    return findings


def _weights(folder: Path) -> tuple[str, int]:
    """Type of most numbers and their count, of the headers of all safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        raise ModelRefused(f"{folder} has no safetensors weights")
    counts: dict[str, int] = {}
    for path in files:
        for name, tensor in _header(path).items():
            if name != "__metadata__":
                dtype = DTYPES.get(tensor["dtype"], tensor["dtype"])
                counts[dtype] = counts.get(dtype, 0) + math.prod(tensor["shape"])
    return max(counts, key=lambda each: counts[each], default="nothing"), sum(counts.values())


def _header(path: Path) -> dict[str, Any]:
    """The JSON before the numbers: 8 bytes say how long it is (safetensors format)."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
    except (OSError, ValueError, struct.error):
        header = None
    if not isinstance(header, dict):
        raise ModelRefused(f"{path} is not a safetensors file")
    return header


def _key_value_width(config: dict[str, Any]) -> int:
    heads = _integer(config, "num_attention_heads", 1)
    head_dim = _integer(config, "head_dim", _integer(config, "hidden_size", 0) // heads)
    return _integer(config, "num_hidden_layers", 0) * _integer(config, "num_key_value_heads", heads) * head_dim


def _integer(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else default


def _json_of(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelRefused(f"{path} cannot be read as JSON") from None
    if not isinstance(values, dict):
        raise ModelRefused(f"{path} is no JSON object")
    return values


def _sentence(message: str) -> str:
    return message if message.endswith(".") else f"{message}."
