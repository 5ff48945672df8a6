"""From the name of a model to a folder on this machine: the folder itself, or the snapshot of a hub id.

What was downloaded once is used without network. Whatever goes wrong is one sentence that says what to do; the
library's own errors have several roots, and their texts several lines.
"""

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider.engine.weights import weight_files
from outrider.errors import ModelRefused

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Mistral's own format repeats the weights under other names.
IGNORED = ["consolidated*", "*/*"]


def resolve(name_or_path: str) -> Path:
    """The local folder of a model: the folder itself, or the snapshot of a hub id, downloaded when it is not cached.

    A hub id is `org/name` or `org/name@revision`. Raises ModelRefused when there is none of these, or when it has no
    safetensors weights.
    """
    folder = Path(name_or_path).expanduser()
    # Path's own questions raise where a name is too long for the file system.
    if not os.path.isdir(folder):
        if folder.is_absolute() or name_or_path.startswith((".", "~")) or os.path.exists(folder):
            raise ModelRefused(f"{name_or_path} is not a folder", model=name_or_path)
        folder = _cached(name_or_path) or _downloaded(name_or_path)
    weight_files(folder)
    return folder


def _cached(name: str) -> Path | None:
    try:
        folder = _snapshot(name, local_files_only=True)
        # A download that broke off leaves a folder too.
        weight_files(folder)
    except (LocalEntryNotFoundError, ModelRefused):
        return None
    except HFValidationError:
        raise ModelRefused(f"{name} is neither a folder nor the id of a model on the hub", model=name) from None
    return folder


def _downloaded(name: str) -> Path:
    try:
        return _snapshot(name, local_files_only=False)
    except GatedRepoError as error:
        advice = "accept its conditions on its page and set HF_TOKEN to a token of that account"
        raise ModelRefused(f"{name} is a gated model of the hub: {advice}", model=name) from error
    except RepositoryNotFoundError as error:
        advice = "check the id, or set HF_TOKEN if the model is private"
        raise ModelRefused(f"{name} is neither a folder here nor a model of the hub: {advice}", model=name) from error
    except RevisionNotFoundError as error:
        raise ModelRefused(f"{name} names a revision that the hub does not have", model=name) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(name, isinstance(error.__cause__, OfflineModeIsEnabled)) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        message = f"{name} is not a folder here, and downloading it as a hub id failed: {reason}"
        raise ModelRefused(message, model=name) from error


def _unreachable(name: str, is_offline: bool) -> ModelRefused:
    reason = "HF_HUB_OFFLINE forbids to download it" if is_offline else "the hub cannot be reached"
    model_id, revision = _parts(name)
    command = f"hf download {model_id}" + (f" --revision {revision}" if revision else "")
    advice = f"run `{command}` on a machine with network and copy its cache here, or set HF_HOME to where the cache is"
    message = f"{name} is neither a folder here nor downloaded, and {reason}: {advice}"
    return ModelRefused(message, model=name)


def _snapshot(name: str, local_files_only: bool) -> Path:
    model_id, revision = _parts(name)
    return Path(
        snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=PATTERNS,
            ignore_patterns=IGNORED,
            local_files_only=local_files_only,
        )
    )


def _parts(name: str) -> tuple[str, str | None]:
    model_id, _, revision = name.partition("@")
    return model_id, revision or None
