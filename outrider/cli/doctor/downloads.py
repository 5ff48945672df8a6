"""What the hub's library has downloaded to this machine. Never reaches the network."""

from importlib import import_module
from pathlib import Path


def downloaded(name: str) -> Path | None:
    """The folder of a model `org/name` or `org/name@revision` of the hub, None when its weights are not here.

    Imported by name, here and nowhere else: the library takes a third of a second, which no other command should pay.
    """
    model_id, _, revision = name.partition("@")
    find = import_module("huggingface_hub").snapshot_download
    try:
        folder = Path(find(model_id, revision=revision or None, local_files_only=True))
    # What it raises for an id that is not here, and for what cannot be one.
    except (OSError, ValueError):
        return None
    # A download that broke off leaves a folder too.
    return folder if any(folder.glob("*.safetensors")) else None
