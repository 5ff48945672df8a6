"""Writes a sized model as an ordinary checkpoint, for engines that cannot make one in memory.

Matrices are stored in --dtype, norms always in float32, because their rescaled weights are no bfloat16 numbers.

    python -m bench.sized_pair PRESET [--draft] [--out DIR] [--seed N] [--dtype bfloat16]
    python -m bench.sized_pair --list
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.common import markdown
from outrider.engine.models.checkpoints import SizedCheckpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.weights import DTYPES, expected_shapes
from outrider.errors import InvalidRequest
from outrider.model_names import PREFIX, PRESETS, parse, unsized
from outrider.process.options import run_app

SHARD_BYTES = 1 << 30
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write(checkpoint: SizedCheckpoint, folder: Path, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config.json last, so that a folder left half written is no model. Raises InvalidRequest unless it is new.

    At most one shard and one tensor are in memory at a time, beside the small model.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidRequest("--out", str(folder), "a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    names = shard_names(checkpoint.config, DTYPES[dtype], shard_bytes)
    for file, tensors in groupby(checkpoint.tensors(torch.device("cpu"), DTYPES[dtype]), lambda each: names[each[0]]):
        shard = dict(tensors)
        save_file(shard, folder / file, metadata={"format": "pt"})
        # The library makes it private, and services in containers run as another user.
        (folder / file).chmod(0o644)
        # Or it would be kept until the next one is full.
        shard.clear()
    if len(set(names.values())) > 1:
        sizes = tensor_bytes(checkpoint.config, DTYPES[dtype])
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": names}
        _write_json(folder / "model.safetensors.index.json", index)
    for name in COPIED:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    small = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", small | config_keys(checkpoint.config, dtype))


def config_keys(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The keys of config.json in which a wide model differs from the small one."""
    return {
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.context_len,
        "tie_word_embeddings": config.tied_embeddings,
    }


def tensor_bytes(config: ModelConfig, dtype: torch.dtype) -> dict[str, int]:
    """Stored bytes of every tensor, in the order in which they are made."""
    shapes = {name: torch.Size(shape) for name, shape in expected_shapes(config).items()}
    return {name: shape.numel() * (dtype.itemsize if len(shape) > 1 else 4) for name, shape in shapes.items()}


def shard_names(config: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> dict[str, str]:
    """The file of every tensor; a file ends before the tensor with which it would exceed shard_bytes."""
    numbers: dict[str, int] = {}
    number, used = 1, 0
    for name, size in tensor_bytes(config, dtype).items():
        if used and used + size > shard_bytes:
            number, used = number + 1, 0
        used += size
        numbers[name] = number
    if number == 1:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{own:05}-of-{number:05}.safetensors" for name, own in numbers.items()}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def list_presets() -> str:
    """A table of the presets and what they amount to."""
    rows = []
    for role, presets in PRESETS.items():
        for preset, shape in presets.items():
            sizes = (shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads)
            every = ", ".join(map(str, (*sizes, shape.num_kv_heads, shape.head_dim)))
            count = shape.parameter_count
            rows.append((f"{PREFIX}{role}-{preset}", every, f"{count:,}", f"{2 * count / 1e6:,.0f}"))
    return markdown(
        ("name", "hidden, MLP, layers, heads, KV heads, head dimension", "parameters", "bfloat16, MB"), rows
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", help="200m for example; see --list")
    parser.add_argument("--list", action="store_true", help="show all presets and write nothing")
    parser.add_argument("--draft", action="store_true", help="the draft of this size, where there is a target too")
    parser.add_argument("--out", type=Path, help="new folder; by default one in build/ with the model's name")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers that have no effect")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the stored matrices")
    options = parser.parse_args()
    if options.list == (options.preset is not None):
        parser.error("name a preset, or give --list")
    return options


def main() -> None:
    """Writes one model, or lists all. Raises ModelRefused and InvalidRequest."""
    options = parse_arguments()
    if options.list:
        print(list_presets())
        return
    suffix = f"@{options.seed}" if options.seed else ""
    sized = parse(f"{PREFIX}{options.preset}{suffix}", "draft" if options.draft else "target")
    assert sized is not None  # the name has the prefix
    folder = options.out or Path("build") / sized.name.replace(":", "-")
    checkpoint = SizedCheckpoint.of(sized.name, Path(unsized(sized.name)), sized.shape, sized.seed)
    write(checkpoint, folder, options.dtype)
    size = sum(tensor_bytes(checkpoint.config, DTYPES[options.dtype]).values())
    print(f"{folder}: {sized.shape.parameter_count:,} parameters, {size / 1e6:,.0f} MB of tensors in {options.dtype}")


if __name__ == "__main__":
    run_app(main)
