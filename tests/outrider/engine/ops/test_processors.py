"""Blocks on other processors than this one, by programs that are compiled for them and emulated where they must be.

ARM needs a cross compiler and an emulator: `apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`.
"""

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.engine_cases import native
from support.models.gguf_blocks import FORMS, Array, random_blocks

from outrider.engine.ops import library
from outrider.engine.ops.blocks import LARGEST, quantise
from outrider.engine.ops.library import processor_levels
from outrider.model_files.gguf.types import KINDS

KERNELS = library.FOLDER / "kernels"
DRIVER = Path(__file__).parents[3] / "support" / "blocks_driver.c"
SOURCES = ("blocks.c", "linear_blocks.c", "linear.c", "pool.c", "quantise.c", "rows.c")
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-pthread", "-Wno-psabi")
OUTPUTS, INPUTS, ROWS = 37, 512, 11


@dataclass(frozen=True)
class Processor:
    """What compiles for it, and what runs its programs here."""

    compiler: str
    flags: tuple[str, ...]
    level: str | None = None
    emulator: tuple[str, ...] = ()


PROCESSORS = {
    "portable C": Processor("gcc", ("-march=x86-64",), level="native-v3"),
    "AVX2": Processor("gcc", ("-march=x86-64-v3", "-DWITHOUT_FAST"), level="native-v3"),
    "AVX2, and AVX-VNNI where it is": Processor("gcc", ("-march=x86-64-v3",), level="native-v3"),
    "AVX-512": Processor("gcc", ("-march=x86-64-v4", "-DWITHOUT_FAST"), level="native-v4"),
    "ARM": Processor("aarch64-linux-gnu-gcc", ("-static", "-DWITHOUT_FAST"), emulator=("qemu-aarch64",)),
    "ARM with dot products": Processor("aarch64-linux-gnu-gcc", ("-static",), emulator=("qemu-aarch64",)),
}


@pytest.fixture(scope="module", params=list(PROCESSORS))
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words that run the driver as one processor computes."""
    processor = PROCESSORS[request.param]
    if processor.level is not None and processor.level not in processor_levels():
        pytest.skip(f"this processor does not run {processor.level}")
    missing = [each for each in (processor.compiler, *processor.emulator) if shutil.which(each) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    program = tmp_path_factory.mktemp("driver") / "driver"
    sources = (str(DRIVER), *(str(KERNELS / name) for name in SOURCES))
    words = (processor.compiler, *FLAGS, *processor.flags, f"-I{KERNELS}", *sources, "-o", str(program), "-lm")
    subprocess.run(words, check=True)
    return [*processor.emulator, str(program)]


@pytest.mark.grid
@pytest.mark.parametrize("kind", FORMS)
def test_every_processor_has_the_same_bits(command: list[str], kind: str, tmp_path: Path) -> None:
    """A file's values, products of rows, and rows in 8 and 4 bits: tiny, nothing beside a single number, or zero."""
    stored: Array = random_blocks(kind, OUTPUTS, INPUTS)
    x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(1))
    x[2] *= torch.logspace(-12, 4, INPUTS)
    x[3] *= 1e-30
    x[4, 7] = 1e20
    x[5] = 0
    ops = native()
    matrix = ops.blocks(kind, OUTPUTS, INPUTS)
    ops.fill(matrix, torch.from_numpy(stored), 0)
    products = [ops.linear(x, replace(matrix, input_bits=bits)).flatten() for bits in LARGEST]
    floats = torch.cat((*products, ops.embed(matrix, torch.arange(OUTPUTS)).flatten()))
    made = [quantise([x[:4]], bits).data.flatten() for bits in (8, 4)]
    expected = torch.cat((floats.view(torch.uint8), *made))
    (tmp_path / "stored").write_bytes(stored.tobytes())
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    sizes = (str(each) for each in (list(KINDS).index(kind), OUTPUTS, INPUTS, ROWS))
    subprocess.run([*command, *sizes, *(str(tmp_path / name) for name in ("stored", "x", "found"))], check=True)
    assert np.array_equal(np.fromfile(tmp_path / "found", np.uint8), expected.numpy())


def test_each_library_has_the_instructions_of_its_level() -> None:
    """The lesser one has none of AVX-512, on whatever processor it was built; the other one lives on them."""
    built = {name: library.FOLDER / f"_native_{name}.so" for name in ("v3", "v4")}
    if shutil.which("objdump") is None or not all(path.exists() for path in built.values()):
        pytest.skip("objdump or the kernels of x86-64 are not here")
    wide = {}
    for name, path in built.items():
        listing = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        wide[name] = "zmm" in listing
    assert wide == {"v3": False, "v4": True}
