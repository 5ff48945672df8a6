"""Finds the chat templates and special tokens that lie beside a tokenizer. Runs no template.

The same files, in the same order of precedence, as transformers reads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub

from outrider.errors import ModelRefused
from outrider.model_names import unsized

PATTERNS = ("tokenizer_config.json", "special_tokens_map.json", "*.jinja")
DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Sources of templates by name, none at all for many a base model, and special tokens by name."""

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def find_templates(model: str) -> TemplateFiles:
    """Of a local folder, of a model on the hub, or of the model inside a sized one. Raises ModelRefused."""
    source = unsized(model)
    try:
        folder = Path(source) if Path(source).is_dir() else _downloaded(source)
        config = _object(folder / "tokenizer_config.json")
        return TemplateFiles(_files(folder) or _named(config.get("chat_template")), _special_tokens(folder, config))
    except Exception as error:  # the hub's library has errors of several roots
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelRefused(f"the chat template of {model} cannot be read: {reason}", model=model) from error


def _downloaded(name: str) -> Path:
    """The folder of a snapshot; what was downloaded once is used when there is no network."""
    model_id, _, revision = name.partition("@")
    patterns = list(PATTERNS)
    return Path(huggingface_hub.snapshot_download(model_id, revision=revision or None, allow_patterns=patterns))


def _files(folder: Path) -> dict[str, str]:
    """Templates in files of their own, which replace those of the configuration."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths[DEFAULT] = folder / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def _named(entry: object) -> dict[str, str]:
    """The templates of a configuration: one, or a list of named ones."""
    if entry is None or isinstance(entry, str):
        return {} if entry is None else {DEFAULT: entry}
    if isinstance(entry, list):
        entry = {each["name"]: each["template"] for each in entry}
    if not isinstance(entry, dict) or not all(isinstance(source, str) for source in entry.values()):
        raise ValueError("chat_template of tokenizer_config.json is neither a text nor a list of named ones")
    return entry


def _special_tokens(folder: Path, config: dict[str, object]) -> dict[str, str]:
    # Older tokenizers keep them in a file of their own, which newer ones may have left behind.
    legacy = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json")
    found = {name: legacy.get(name, config.get(name)) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found
