"""What commands need beside the client: extras that must be installed, and processes of their own.

No command here imports torch, which what it does may need.
"""

import asyncio
import platform
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import typer

import outrider
from outrider.cli.running import Interrupts, run
from outrider.errors import OutriderError


class Extra(StrEnum):
    """Extras of the package, by which parts of it are installed."""

    GATEWAY = "gateway"
    ENGINE = "engine"


# What is there where an extra is installed, and nowhere else.
SIGNS = {Extra.GATEWAY: "uvicorn", Extra.ENGINE: "torch"}


class NotInstalled(OutriderError):
    """The operator must install a part of Outrider; the sentence has the command."""

    status = "FAILED_PRECONDITION"
    reason = "NOT_INSTALLED"
    exit_code = 78


def check_installed(*extras: Extra) -> None:
    """Raises NotInstalled where one of these extras is missing."""
    missing = [extra for extra in extras if find_spec(SIGNS[extra]) is None]
    if missing:
        names = "all" if len(missing) == len(Extra) else ",".join(missing)
        parts = " and the ".join(missing)
        raise NotInstalled(f"Not installed here, of Outrider: the {parts}. Run pip install 'outrider[{names}]'.")


def installed_versions() -> dict[str, str | None]:
    """Versions of Outrider, of Python, and of what computes and carries; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("torch", "grpcio", "protobuf", "tokenizers", "fastapi", "uvicorn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"outrider": outrider.__version__, "python": platform.python_version(), **found}


def command(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a module, with the arguments that were given."""
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *arguments)


def run_module(module: str, arguments: Sequence[str], *extras: Extra) -> None:
    """Runs a module and ends with its exit code; a signal is passed on, and it ends what it started.

    Raises NotInstalled where an extra that it needs is missing.
    """
    check_installed(*extras)
    codes: list[int] = []

    async def work(interrupts: Interrupts) -> None:
        # A session of its own, so that Ctrl-C reaches the child once, from here.
        child = await asyncio.create_subprocess_exec(*command(module, arguments), start_new_session=True)
        interrupts.urgent = child.terminate
        try:
            codes.append(await child.wait())
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise

    run(work)
    raise typer.Exit(codes[0] if codes[0] >= 0 else 128 - codes[0])
