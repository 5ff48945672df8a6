"""The wheel: built from a copy, installed aside, and run from a folder that knows nothing of the repository."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from deploy.locks import ROOT
from support.models.tiny_gguf import write_gguf

SOURCES = ("outrider", "gateway", "draft_service", "target_service", "models")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--target-port", "0", "--draft-port", "0")
WITHIN_S = 120.0


@dataclass(frozen=True)
class Installed:
    """A wheel, and an environment with it."""

    wheel: Path
    python: Path
    folder: Path
    """Where commands run."""

    def outrider(self, *words: str) -> tuple[str | Path, ...]:
        """The command line of `outrider`, by the script that pip made."""
        return (self.python.with_name("outrider"), *words)

    def ask(self, *command: str | Path) -> str:
        """What a command prints; it must end well."""
        ended = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment whose other packages are those of this one."""
    place = tmp_path_factory.mktemp("wheel")
    copy, made, environment = place / "copy", place / "made", place / "environment"
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # Those of this checkout, younger than their sources now, so that nothing is compiled once more.
    kernels = Path("outrider/engine/ops")
    (made / kernels).mkdir(parents=True)
    for library in (ROOT / kernels).glob("_native*.so"):
        shutil.copyfile(library, made / kernels / f"{library.name.partition('.')[0]}.so")
    (place / "setup.cfg").write_text(f"[build]\nbuild_lib = {made}\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = (*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place, copy)
    subprocess.run(build, check=True, env={**os.environ, "DIST_EXTRA_CONFIG": str(place / "setup.cfg")})
    [wheel] = place.glob("*.whl")

    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    # A path behind its own: what makes the checkout importable there is a .pth, which is read in no such folder.
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = (*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel)
    subprocess.run(install, check=True)
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel, python, elsewhere)


@pytest.mark.slow
def test_the_wheel_is_for_every_python_and_has_no_other_names(installed: Installed) -> None:
    """Kernels and models lie in the package, measurements of the repository are not there, and the version is one."""
    assert installed.wheel.name.partition("-py3-none-")[2].endswith(f"{sysconfig.get_platform().split('-')[-1]}.whl")
    names = zipfile.ZipFile(installed.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*SOURCES} - {"models"}
    built = {path.name.partition(".")[0] for path in (ROOT / "outrider/engine/ops").glob("_native*.so")}
    assert {Path(name).stem for name in names if name.endswith(".so")} == built
    program = "import outrider; from importlib.metadata import version; print(outrider.__file__, outrider.__version__, "
    file, own, stated = installed.ask(installed.python, "-c", f"{program}version('outrider'))").split()
    assert Path(file).is_relative_to(installed.python.parents[1])
    assert own == stated
    assert installed.ask(*installed.outrider("--version")) == f"outrider {own}\n"
    for command in ("speed", "load", "rounds"):
        assert "--target" in installed.ask(*installed.outrider("bench", command, "--help"))


@pytest.mark.slow
async def test_a_stack_of_the_wheel_serves_a_file_from_another_folder(installed: Installed) -> None:
    """Without a word about the pair inside; and the tales that came with the wheel guess for it."""
    write_gguf(ROOT / "models" / "target", installed.folder / "tales-Q8_0.gguf")
    draft = installed.ask(
        installed.python, "-c", "from outrider.model_files.model_names import embedded_model as e; print(e('draft'))"
    ).strip()
    assert Path(draft).is_relative_to(installed.python.parents[1])
    words = installed.outrider("up", "--target", "tales-Q8_0.gguf", "--draft", draft, "--json", *FREE_PORTS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, cwd=installed.folder, stdout=pipe, stderr=pipe)
    try:
        event = {"event": ""}
        while event["event"] != "serving":
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
            assert line, (await process.communicate())[1].decode()
            event = json.loads(line)
        assert event["models"] == {"target": "tales", "draft": "draft"}
        options = ("--max-tokens", "32", "--seed", "1", "--draft-count", "4", "--json", "--address", event["gateway"])
        asked = await asyncio.to_thread(
            installed.ask, *installed.outrider("generate", "The fox said to the wolf,", *options)
        )
        [answer] = json.loads(asked)["samples"]
        assert answer["usage"]["completion_tokens"] == 32
        assert answer["speculation"]["accepted_tokens"] > 0
        process.terminate()
        await asyncio.wait_for(process.communicate(), WITHIN_S)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
