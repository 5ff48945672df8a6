"""What a file loses when it is served: our types and llama.cpp's logits against the file's own values in float32."""

from collections.abc import Sequence
from pathlib import Path

from bench.gguf.lab import Llama
from bench.gguf.subjects import Subject
from bench.quality import Windows, compare, sources_of
from outrider.cli.bench.common import REPOSITORY
from outrider.model_files.tokenizer_files import load_tokenizer

BASE, LLAMA = "float32", "llama.cpp"
# A batch of llama.cpp's.
WINDOW = 512


def read_text(subject: Subject, text: Path | None, tokens: int) -> list[int]:
    """The first tokens of a text, by default of this project's documents."""
    files = [text] if text is not None else sorted((REPOSITORY / "docs").glob("*.md"))
    whole = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    ids: list[int] = load_tokenizer(str(subject.file)).encode(whole, add_special_tokens=False).ids
    return ids[:tokens]


def measure(
    subject: Subject, llama: Llama, token_ids: Sequence[int], dtypes: Sequence[str], threads: int
) -> dict[str, Windows]:
    """Windows of the text by the file's values, by each of our types, and by llama.cpp. Raises ModelRefused."""
    sources = sources_of(str(subject.file), [*dict.fromkeys((BASE, *dtypes))], WINDOW, threads)
    llama.ask("load", file=str(subject.file), threads=threads)
    return compare(sources | {LLAMA: llama.log_probabilities}, token_ids, WINDOW)
