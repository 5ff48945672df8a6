"""The wheels that the benchmark needs beside an image with PyTorch, for a GPU machine without a network.

    python -m bench.gpu.wheels DIR

downloads them for CPython 3.12 on x86-64, in the versions of constraints.txt, with pip.
"""

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# What an image with PyTorch and transformers has already. The large ones are its own on purpose: torch fits its driver.
PRESENT = (
    "torch triton numpy scipy sympy mpmath networkx transformers tokenizers safetensors huggingface-hub regex tqdm "
    "jinja2 markupsafe pyyaml packaging filelock fsspec requests urllib3 certifi idna charset-normalizer anyio h11 "
    "httpcore httpx attrs rich pygments shellingham markdown-it-py mdurl annotated-doc prometheus-client "
    "psutil setuptools pytest pytest-timeout pytest-xdist execnet pluggy iniconfig hypothesis sortedcontainers"
)
# grpcio and protobuf although images have them: generated code refuses versions below those that made it. And typer:
# an image had 0.27, which names an option by its metavar where the two differ in case alone.
CARRIED = (
    "annotated-types", "blake3", "cffi", "click", "cryptography", "fastapi", "gguf", "googleapis-common-protos",
    "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "llguidance", "opentelemetry-api",
    "orjson", "protobuf", "pycparser", "pydantic", "pydantic-core", "pytest-asyncio", "starlette", "structlog",
    "trustme", "typer", "typing-extensions", "typing-inspection", "uvicorn",
)  # fmt: skip
# pip takes a platform's number exactly as it stands in a wheel's name.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def pinned(root: Path = ROOT) -> list[str]:
    """NAME==VERSION of every wheel, as constraints.txt has it. Raises KeyError for one that it does not name."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = (Requirement(line) for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(each.name): str(each) for each in requirements}
    return [versions[canonicalize_name(name)] for name in CARRIED]


def download(folder: Path) -> None:
    """Downloads the wheels with pip; raises CalledProcessError when one cannot be had."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    python = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
    only_wheels = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "download", *only_wheels, *python, *platforms, *pinned()], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.gpu.wheels DIR")
    download(Path(sys.argv[1]))
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB, in {sys.argv[1]}")
