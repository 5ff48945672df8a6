"""Builds the CPU kernels: plain shared libraries for ctypes, one for each level of the processor. Not Python modules.

Everything else about the distribution stands in pyproject.toml. The libraries are optional: without a C compiler the
installation succeeds, and the engine computes with torch instead, slower.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

PACKAGE = "outrider.engine.ops"
SOURCES = Path("outrider/engine/ops/kernels")
# Both levels have fused multiply-add, which the equality of their results rests on.
X86_LEVELS = {"_native_v4": ["-march=x86-64-v4"], "_native_v3": ["-march=x86-64-v3"]}
OTHER_PROCESSORS: dict[str, list[str]] = {"_native": []}
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=default", "-pthread", "-Wno-psabi"]


def kernel_libraries() -> list[Extension]:
    """One library for each level of this kind of processor; which of them runs is decided when it is loaded."""
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return [
        Extension(
            f"{PACKAGE}.{name}",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
        for name, flags in (X86_LEVELS if is_x86 else OTHER_PROCESSORS).items()
    ]


setup(ext_modules=kernel_libraries())
