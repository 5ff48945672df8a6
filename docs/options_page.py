"""Writes docs/options.md from the settings of the three processes: `make options`."""

from pathlib import Path

from draft_service.server import DraftSettings
from gateway.settings import GatewaySettings
from outrider.process.options import options_table
from target_service.server import TargetSettings

PAGE = Path(__file__).with_name("options.md")
HEAD = """# Options of the three processes

Each has a flag and a variable; the flag wins. An empty variable counts as not set. A value outside its range is refused
with one sentence and the exit code 64. `make options` writes this page from the declarations; `--help` says the same.
The options of `outrider` are in [cli.md](cli.md).
"""


def page() -> str:
    """The page as the declarations have it."""
    parts = (
        ("python -m gateway", GatewaySettings),
        ("python -m target_service", TargetSettings),
        ("python -m draft_service", DraftSettings),
    )
    return "\n".join([HEAD, *(f"## `{command}`\n\n{options_table(settings)}" for command, settings in parts)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
