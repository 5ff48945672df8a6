"""The embedded pair's tokenizer with a chat template, which it does not come with."""

import shutil
from pathlib import Path

from support.models.chat_templates import CHATML
from support.stack import TARGET


def templated(folder: Path, template: str = CHATML) -> str:
    """Writes the tokenizer and the template into a folder, and returns that as a model's name."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
