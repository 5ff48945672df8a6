"""Writes docs/options.md from the settings of the three processes: `make options`."""

from dataclasses import MISSING
from enum import StrEnum
from pathlib import Path

from draft_service.server import DraftSettings
from gateway.settings import GatewaySettings
from outrider.process.options import Group, settings_of
from target_service.server import TargetSettings

PAGE = Path(__file__).with_name("options.md")
HEAD = """# Options of the three processes

Each has a flag and a variable; the flag wins. An empty variable counts as not set. A value outside its range is refused
with one sentence and the exit code 64. `make options` writes this page from the declarations; `--help` says the same.
The options of `outrider` are in [cli.md](cli.md).
"""


def table(settings: type[Group]) -> str:
    """The options of one process."""
    rows = ["| flag | variable | default | range | |", "|---|---|---|---|---|"]
    for option in settings_of(settings):
        setting, default = option.setting, option.default
        if default is MISSING:
            shown = "required"
        elif isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = setting.default or (f"`{default}`" if default != "" else "empty")
        limit = setting.limit.words if setting.limit else ""
        if isinstance(option.kind, type) and issubclass(option.kind, StrEnum):
            limit = ", ".join(option.kind)
        flags = ", ".join(f"`{flag}`" for flag in option.flags.split("/"))
        rows.append(f"| {flags} | `{option.variable}` | {shown} | {limit} | {setting.sentence} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page as the declarations have it."""
    parts = (
        ("python -m gateway", GatewaySettings),
        ("python -m target_service", TargetSettings),
        ("python -m draft_service", DraftSettings),
    )
    return "\n".join([HEAD, *(f"## `{command}`\n\n{table(settings)}" for command, settings in parts)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
