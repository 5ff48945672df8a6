"""The tokenizer of a model by its name: from the files of a folder, or from a GGUF file."""

from pathlib import Path

import huggingface_hub
import tokenizers

from outrider.errors import ModelRefused
from outrider.model_files.folder_tokenizer import TOKENIZER_FILES, folder_tokenizer
from outrider.model_files.gguf.files import HubName, cached_gguf, fetch_file, fetch_gguf, gguf_in
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import doubt, read_tokenizer
from outrider.model_files.model_names import tokenizer_source


def load_tokenizer(model: str) -> tokenizers.Tokenizer:
    """Tokenizer of a folder, a GGUF file, a model on the hub, or the one inside a sized model. Raises ModelRefused."""
    source = tokenizer_source(model)
    try:
        gguf = find_gguf(source)
        if gguf is not None:
            return read_tokenizer(GgufFile.read(gguf))
        folder = Path(source).expanduser()
        if not folder.is_dir():
            hub, patterns = HubName.parse(source), list(TOKENIZER_FILES)
            # What was downloaded once is used when there is no network.
            snapshot = huggingface_hub.snapshot_download(hub.model_id, revision=hub.revision, allow_patterns=patterns)
            folder = Path(snapshot)
        return folder_tokenizer(folder)
    except ModelRefused:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelRefused(f"{model} has no tokenizer.json that can be read: {error}", model=model) from error


def find_doubt(model: str) -> str | None:
    """Reason why texts may have other tokens than in a model's training, in one sentence; None for most.

    Raises ModelRefused.
    """
    gguf = find_gguf(tokenizer_source(model))
    return None if gguf is None else doubt(GgufFile.read(gguf))


def find_gguf(source: str) -> Path | None:
    """The GGUF file that holds a model's tokenizer, downloaded where it must be; None where tokenizer.json does.

    The services choose in the same way: a repository's safetensors go first. Raises ModelRefused.
    """
    path = Path(source).expanduser()
    if path.exists():
        return gguf_in(path)
    hub, snapshot = HubName.parse(source), huggingface_hub.snapshot_download
    try:
        found = cached_gguf(source, snapshot)
    except (OSError, ValueError):  # what the library raises for an id that is not in its cache
        found = None if hub.file is not None else fetch_gguf(source, snapshot)
    return fetch_file(hub, snapshot) if found is None and hub.file is not None else found
