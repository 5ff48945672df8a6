"""Checks the embedded pair: prints sizes and digests, and verifies that both load and share one vocabulary."""

import hashlib
from pathlib import Path

from rich.console import Console

from outrider.engine.runner import ModelRunner
from outrider.model_files.vocabulary import Vocabulary

MODELS = Path(__file__).resolve().parent
LIMIT_BYTES = 30_000_000
ROLES = ("target", "draft")


def main() -> None:
    """Prints what there is, or ends with one sentence."""
    say, total = Console(highlight=False, soft_wrap=True).print, 0
    for role in ROLES:
        folder = MODELS / role
        size = sum(path.stat().st_size for path in folder.iterdir())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        runner = ModelRunner.load(str(folder), device="cpu", dtype="bfloat16", num_threads=1, kv_tokens=1024)
        say(f"{role}: {size:,} bytes, vocabulary of {runner.vocabulary_size:,}, numerics id {runner.numerics_id}")
        say(f"  SHA-256 of the weights {digest}\n  model hash {runner.identity.model_hash}")
        total += size
    difference = Vocabulary.read(MODELS / "draft").difference(Vocabulary.read(MODELS / "target"))
    if difference is not None:
        raise SystemExit(f"The pair does not fit: {difference}")
    if total > LIMIT_BYTES:
        raise SystemExit(f"The pair has {total:,} bytes, more than {LIMIT_BYTES:,}.")
    say(f"Both load and fit, and have {total:,} bytes together.")


if __name__ == "__main__":
    main()
