"""Writes docs/options.md from the settings of the three processes: `make options`."""

from dataclasses import MISSING
from enum import StrEnum
from pathlib import Path
from textwrap import wrap

from draft_service.server import DraftSettings
from gateway.settings import GatewaySettings
from outrider.process.options import Group, settings_of
from target_service.server import TargetSettings

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options of the three processes

Each has a flag and a variable; the flag wins. An empty variable counts as not set. A value outside its range is refused
with one sentence and the exit code 64. `make options` writes this page from the declarations; `--help` says the same.
The options of `outrider` are in [cli.md](cli.md). Each entry: flag, variable, default, range, and what it does.
"""
WIDTH = 120


def lined(text: str, indent: str) -> list[str]:
    """The lines of one part of a list item; words, and so flags, stay whole."""
    return wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def entries(settings: type[Group]) -> str:
    """The options of one process, one list item each."""
    lines: list[str] = []
    for option in settings_of(settings):
        setting, default = option.setting, option.default
        if default is MISSING:
            shown = "required"
        elif isinstance(default, bool):
            shown = "default on" if default else "default off"
        else:
            shown = f"default {setting.default or (f'`{default}`' if default != '' else 'empty')}"
        limit = setting.limit.words if setting.limit else ""
        if isinstance(option.kind, type) and issubclass(option.kind, StrEnum):
            limit = f"one of {', '.join(option.kind)}"
        flags = ", ".join(f"`{flag}`" for flag in option.flags.split("/"))
        facts = "; ".join(fact for fact in (f"`{option.variable}`", shown, limit) if fact)
        lines += lined(f"{flags} ({facts}):", "- ") + lined(setting.sentence, "  ")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as the declarations have it."""
    parts = (
        ("python -m gateway", GatewaySettings),
        ("python -m target_service", TargetSettings),
        ("python -m draft_service", DraftSettings),
    )
    return "\n".join([HEAD, *(f"## `{command}`\n\n{entries(settings)}" for command, settings in parts)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
