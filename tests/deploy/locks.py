"""What the images' locks pin."""

import re
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
# How the names begin of what torch brings for GPUs alone.
FOR_GPUS = ("nvidia-", "cuda-", "triton")


def pins(path: Path) -> dict[str, str]:
    """The version of each package that a file pins."""
    return {canonicalize_name(name): version for name, version in PIN.findall(path.read_text(encoding="utf-8"))}
