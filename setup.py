"""Builds the CPU kernels, and puts the models of the repository into the wheel; all else stands in pyproject.toml.

The kernels are plain shared libraries for ctypes, one for each level of the processor, and no Python modules: so one
wheel is for every Python on a platform. They are optional: without a C compiler the installation succeeds, and the
engine computes with torch instead, slower.
"""

import platform
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PACKAGE = "outrider.engine.ops"
SOURCES = Path("outrider/engine/ops/kernels")
# Both levels have fused multiply-add, which the equality of their results rests on.
X86_LEVELS = {"_native_v4": ["-march=x86-64-v4"], "_native_v3": ["-march=x86-64-v3"]}
OTHER_PROCESSORS: dict[str, list[str]] = {"_native": []}
MODELS = ("target", "draft", "smollm2")
FLAGS = ["-std=gnu11", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=default", "-pthread", "-Wno-psabi"]


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


class KernelBuild(build_ext):
    """Libraries whose names say nothing of a Python, built side by side."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext: Extension) -> None:
        # Of the same sources, whose objects would have the same names.
        own = copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(KernelBuild, own).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class PackageBuild(build_py):
    """The packages, and in outrider/models what `embedded_model` finds: the tales, and the drafts for the assistant."""

    def models(self) -> dict[Path, Path]:
        """Where each file of a model goes, by its place in the repository."""
        files = (path for role in MODELS for path in sorted(Path("models", role).rglob("*")) if path.is_file())
        return {path: Path(self.build_lib, "outrider", path) for path in files}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, built in self.models().items():
                self.mkpath(str(built.parent))
                self.copy_file(str(source), str(built))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, self.models())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self.models().values())]


class PlatformWheel(bdist_wheel):
    """A wheel for every Python, on one platform because of the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=kernel_libraries(),
    cmdclass={"build_ext": KernelBuild, "build_py": PackageBuild, "bdist_wheel": PlatformWheel},
)
