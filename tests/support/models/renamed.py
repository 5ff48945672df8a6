"""The embedded pair with some of its tokens under other names: what it says often becomes a token that may end it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.stack import DRAFT, TARGET


def write_renamed(
    folder: Path, names: Mapping[str, str], *, special: bool = True, source: str = TARGET, **files: Mapping[str, Any]
) -> str:
    """Writes a model of the pair whose tokens have new names by their old ones, each an added token, special or not.

    Other files replace those of that name, as `generation_config={...}`. Returns the folder.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in names]
    for old, new in names.items():
        vocabulary[new] = vocabulary.pop(old)
        tokenizer["added_tokens"].append({"id": vocabulary[new], "content": new, **shape})
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [each for each in merges if {*each, "".join(each)} <= vocabulary.keys()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return str(folder)


def write_renamed_pair(folder: Path, names: Mapping[str, str], **changes: Any) -> tuple[str, str]:
    """Target and draft of equal tokens; `changes` are those of `write_renamed`."""
    target = write_renamed(folder / "target", names, **changes)
    return target, write_renamed(folder / "draft", names, source=DRAFT, special=changes.get("special", True))
