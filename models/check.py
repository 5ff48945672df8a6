"""Checks the embedded pair: prints sizes and digests, and verifies that both load and share one vocabulary."""

import hashlib
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from outrider.engine.runner import ModelRunner
from outrider.vocabulary import Vocabulary

MODELS = Path(__file__).resolve().parent
LIMIT_BYTES = 30_000_000
ROLES = ("target", "draft")

ROWS = ("bytes", "SHA-256 of the weights", "model hash", "vocabulary", "numerics id")


def describe(folder: Path) -> tuple[int, list[str]]:
    """Loads one model; returns its folder's bytes, and its column of the table in the order of ROWS."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    runner = ModelRunner.load(str(folder), device="cpu", dtype="bfloat16", num_threads=1, kv_tokens=1024)
    return size, [f"{size:,}", digest, runner.identity.model_hash, f"{runner.vocabulary_size:,}", runner.numerics_id]


def main() -> None:
    """Prints the table, or ends with one sentence."""
    sizes, columns = zip(*(describe(MODELS / role) for role in ROLES), strict=True)
    table = Table("", *(Column(role, overflow="fold") for role in ROLES))
    for row in zip(ROWS, *columns, strict=True):
        table.add_row(*row)
    Console().print(table)
    difference = Vocabulary.read(MODELS / "draft").difference(Vocabulary.read(MODELS / "target"))
    if difference is not None:
        raise SystemExit(f"The pair does not fit: {difference}")
    if sum(sizes) > LIMIT_BYTES:
        raise SystemExit(f"The pair has {sum(sizes):,} bytes, more than {LIMIT_BYTES:,}.")
    Console().print(f"Both load and fit, and have {sum(sizes):,} bytes together.", highlight=False)


if __name__ == "__main__":
    main()
