"""Where the embedded pair lies, also when a sized model is named that holds one of the two. Reads no file."""

from pathlib import Path

from outrider.errors import ModelRefused
from outrider.sized_presets import parse

REPOSITORY = Path(__file__).resolve().parents[1]


def embedded_model(role: str, way_out: str | None = None) -> str:
    """Folder of the embedded model, in the repository or in the working directory.

    Raises ModelRefused, which ends with the way out: by default the option that names another model.
    """
    folders = [place / "models" / role for place in (REPOSITORY, Path.cwd())]
    for folder in folders:
        if (folder / "config.json").is_file():
            return str(folder)
    way_out = way_out or f"name a model with --{role}"
    raise ModelRefused(f"There is no embedded {role} model in {folders[0]}; {way_out}.")


def unsized(model: str) -> str:
    """The folder of the embedded model inside a sized one, which has its tokenizer; any other model as it is named.

    Raises ModelRefused for an unknown preset, and when the embedded model is missing.
    """
    sized = parse(model)
    return model if sized is None else embedded_model(sized.role, f"{model} is made of it")
