"""Checks of both models' files without loading them: whether they can be served, fit together, and into memory."""

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.cli.doctor.report import Finding, failed, gibibytes, ok, skipped, warning
from outrider.cli.local_stack import Stack
from outrider.errors import ModelRefused
from outrider.model_files.generation_defaults import ModelDefaults
from outrider.model_files.gguf.config import json_config
from outrider.model_files.gguf.files import HubName, cached_gguf, gguf_in, model_stem
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.model_names import (
    CONTEXT_LEN,
    SIM_CONTEXT_LEN,
    SimulatedModel,
    parse,
    parse_simulated,
    tokenizer_source,
)
from outrider.model_files.vocabulary import Vocabulary, misfit, tokenizer_doubt, tokenizer_in

VOCABULARY, MEMORY = "vocabulary", "memory"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# A header is at most this long in the format's own reader.
MAX_HEADER_BYTES = 100_000_000
MEMORY_INFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# What an engine takes for keys and values by default, and at most for the sake of one context.
DEFAULT_KV_BYTES, MAX_KV_BYTES = 512 << 20, 4 << 30
# torch and gRPC in each service, and the gateway: measured, rounded up.
PROCESS_BYTES, GATEWAY_BYTES = 400 << 20, 150 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts from a model's files. `key_value_width` counts the numbers of one token's keys in all layers."""

    name: str
    folder: Path
    parameter_count: int
    stored_dtype: str
    context_len: int
    key_value_width: int
    vocabulary: Vocabulary
    tokenizer: Tokenizer | None = None
    """None for a draft that only states its vocabulary."""
    simulated: SimulatedModel | None = None


def check_pair(stack: Stack) -> tuple[list[Finding], list[str]]:
    """Checks the models that a stack names: each for itself, both together, and what they take of the memory.

    Beside the findings come the hub ids that are not on this machine.
    """
    dtypes = {"target": stack.dtype, "draft": stack.draft_dtype or stack.dtype}
    models = {"target": stack.target, "draft": stack.draft}
    findings: list[Finding] = []
    absent: list[str] = []
    found: dict[str, ModelFiles] = {}
    for role, model in models.items():
        try:
            files = read_model(role, model) if model else None
        except ModelRefused as error:
            findings.append(failed(f"{role} model", error.message, f"Name another model with --{role}."))
            continue
        findings.append(check_model(role, model, files, dtypes[role]))
        if files and (reason := tokenizer_doubt(files.folder)):
            findings.append(warning(f"{role} model", f"{reason}.", "Convert the model again with a later converter."))
        findings += check_defaults(files) if role == "target" and files else []
        if files:
            found[role] = files
        elif model:
            absent.append(model)
    if len(found) == 2:
        findings += check_fit(found["target"], found["draft"])
    elif stack.draft:
        missing = [model for role, model in models.items() if model and role not in found]
        sentence = f"There is nothing to compare without the files of {' and '.join(missing)}."
        findings.append(skipped(VOCABULARY, sentence))
    if found:
        needs = {
            role: needed_bytes(files, dtypes[role], stack.kv_tokens, stack.context_len if role == "target" else None)
            for role, files in found.items()
        }
        findings.append(check_memory(needs, available_bytes()))
    return findings, absent


def read_model(role: str, model: str) -> ModelFiles | None:
    """Reads a folder, a GGUF file, a hub id that was downloaded, or the embedded part of a sized or simulated model.

    None for a hub id that is not on this machine. Raises ModelRefused.
    """
    sized, simulated = parse(model, role), parse_simulated(model)
    folder = place_of(model)
    if folder is None:
        return None
    given = Path(tokenizer_source(model)).expanduser()
    gguf = gguf_in(folder)
    if gguf is not None:
        folder, file = gguf, GgufFile.read(gguf)
        config, (stored_dtype, count) = json_config(file), stored_numbers(file)
    else:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ModelRefused(f"{folder / 'config.json'} cannot be read as JSON") from None
        if not isinstance(config, dict):
            raise ModelRefused(f"{folder / 'config.json'} is no JSON object")
        stored_dtype, count = stored_weights(folder)
    context_len = _positive(config, "max_position_embeddings", 0)
    heads = _positive(config, "num_attention_heads", 1)
    head_dim = _positive(config, "head_dim", _positive(config, "hidden_size", 0) // heads)
    width = _positive(config, "num_hidden_layers", 0) * _positive(config, "num_key_value_heads", heads) * head_dim
    if sized is not None:
        shape = sized.shape
        count, context_len = shape.parameter_count, CONTEXT_LEN
        width = shape.num_layers * shape.num_kv_heads * shape.head_dim
    if simulated is not None:
        count, context_len, stored_dtype = simulated.parameter_count, SIM_CONTEXT_LEN, "bfloat16"
    known = simulated or sized
    local_name = model_stem(given.name) if given.is_file() else (given.resolve() if given.is_dir() else given).name
    name = known.name if known else local_name
    tokenizer, num_rows = tokenizer_in(folder), _positive(config, "vocab_size", 0)
    vocabulary = Vocabulary.read(folder) if tokenizer is None else Vocabulary.embedded(tokenizer, num_rows, name)
    return ModelFiles(name, folder, count, stored_dtype, context_len, width, vocabulary, tokenizer, simulated)


def place_of(model: str) -> Path | None:
    """The folder or GGUF file of a model, None for a hub id that is not on this machine. Raises ModelRefused."""
    given = Path(tokenizer_source(model)).expanduser()
    return given if os.path.exists(given) else downloaded(model)


def downloaded(name: str) -> Path | None:
    """The folder or GGUF file of a model `org/name` or `org/name@revision` of the hub, None when it is not here.

    The hub's library is imported by name, here and nowhere else: it takes a third of a second, which no other command
    should pay.
    """
    hub, find = HubName.parse(name), import_module("huggingface_hub").snapshot_download
    try:
        gguf = cached_gguf(name, find)
        if gguf is not None or hub.file is not None:
            return gguf
        folder = Path(find(hub.model_id, revision=hub.revision, local_files_only=True))
    # What it raises for an id that is not here, and for what cannot be one.
    except (OSError, ValueError):
        return None
    # A download that broke off leaves a folder too.
    return folder if any(folder.glob("*.safetensors")) else None


def check_model(role: str, model: str | None, files: ModelFiles | None, dtype: str) -> Finding:
    """Finding about one model of the pair, None if there is none; `files` is None where it is not on this machine."""
    check = f"{role} model"
    if model is None:
        return skipped(check, f"There is no {role}: the target decodes plainly.", f"Name one with --{role}.")
    if files is None:
        return skipped(check, f"{model} is no folder, and as a hub id not downloaded.", download_fix([model]))
    if files.simulated is not None:
        sentence = (
            f"{files.name} is simulated: it takes the time of {files.parameter_count:,} parameters in bfloat16 on "
            f"{files.simulated.device.name}, {files.simulated.step_s(1, 1, 1) * 1e3:.1f} ms for one row, and its "
            "tokens come from a hash."
        )
        if dtype in ("auto", files.stored_dtype):
            return ok(check, sentence)
        return failed(check, sentence, f"Leave --dtype at bfloat16: {dtype} is not simulated.")
    sentence = (
        f"{files.name}: {files.parameter_count:,} parameters in {files.stored_dtype}, served in {dtype}, "
        f"context of {files.context_len:,} tokens ({files.folder})."
    )
    if files.stored_dtype == "float16" and dtype == "bfloat16":
        fix = "Use --dtype float32 to keep every bit of the file."
        return warning(check, f"{sentence} bfloat16 keeps 3 bits less of each number.", fix)
    return ok(check, sentence)


def check_defaults(files: ModelFiles) -> list[Finding]:
    """Findings about defaults of a target's files that no request could have."""
    fix = "Correct the file, or say what counts with --generation-defaults."
    return [warning("generation defaults", f"{fault}.", fix) for fault in ModelDefaults.read(files.folder).faults]


def download_fix(names: Sequence[str]) -> str:
    """Command that downloads models of the hub; `outrider up` does it as well."""
    commands = (f"`{HubName.parse(name).command}`" for name in names)
    return f"Run {' and '.join(commands)}, or let `outrider up` download."


def check_fit(target: ModelFiles, draft: ModelFiles) -> list[Finding]:
    """Whether ids mean the same tokens to both, and how far the draft can read."""
    if target.tokenizer is None:
        difference = target.vocabulary.difference(draft.vocabulary)
    else:
        whole = Vocabulary.of(target.tokenizer.get_vocab(with_added_tokens=True).items())
        difference = misfit(target.tokenizer, whole, draft.vocabulary)
    if difference is not None:
        fix = "Name a draft with the target's tokenizer with --draft, or leave it out with --no-draft."
        return [failed(VOCABULARY, difference, fix)]
    findings = [ok(VOCABULARY, f"Both models have the same {target.vocabulary.size:,} tokens under the same ids.")]
    if 0 < draft.context_len < target.context_len:
        sentence = (
            f"The draft's context of {draft.context_len:,} tokens ends before the target's {target.context_len:,}; "
            "decoding is plain from there."
        )
        findings.append(warning("context", sentence, "Name a draft with a longer context if requests get that long."))
    return findings


def needed_bytes(model: ModelFiles, dtype: str, kv_tokens: int | None = None, context_len: int | None = None) -> int:
    """Weights, cache and process of a service with this model on the CPU, where keys and values are float32.

    The cache is of so many tokens, by default as the service takes it for a context, the model's own or a shorter one.
    A simulated model has neither weights nor keys.
    """
    if model.simulated is not None:
        return PROCESS_BYTES
    # Integers are made of bfloat16, which is all in memory before.
    item_bytes = 4 if dtype == "float32" else 2
    token_bytes = 2 * 4 * model.key_value_width
    cache = max(DEFAULT_KV_BYTES, min((context_len or model.context_len) * token_bytes, MAX_KV_BYTES))
    cache = cache if kv_tokens is None else kv_tokens * token_bytes
    return model.parameter_count * item_bytes + cache + PROCESS_BYTES


def available_bytes() -> int | None:
    """Free memory, by the system and by the control group; None where neither says so."""
    system = parse_available(MEMORY_INFO.read_text()) if MEMORY_INFO.is_file() else None
    files = (CGROUP / "memory.max", CGROUP / "memory.current")
    limit, used = (path.read_text().strip() if path.is_file() else "" for path in files)
    left = max(0, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else None
    return min((each for each in (system, left) if each is not None), default=None)


def parse_available(text: str) -> int | None:
    """MemAvailable of /proc/meminfo in bytes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def check_memory(needs: Mapping[str, int], available: int | None) -> Finding:
    """Needs by role against what is free."""
    if available is None:
        return skipped(MEMORY, "This system does not say how much memory is free.")
    total = sum(needs.values()) + GATEWAY_BYTES
    parts = ", ".join(f"{gibibytes(count)} for the {role}" for role, count in needs.items())
    sentence = f"A stack takes about {gibibytes(total)} ({parts}); {gibibytes(available)} are free."
    if total <= available:
        return ok(MEMORY, sentence)
    if min(needs.values(), default=0) + GATEWAY_BYTES > available:
        return failed(MEMORY, sentence, "Choose smaller models, or a machine with more memory.")
    return warning(MEMORY, sentence, "Close other programs, choose smaller models, or lower --kv-tokens of a service.")


def stored_weights(folder: Path) -> tuple[str, int]:
    """Type of most numbers and their count, from the headers of all safetensors files. Raises ModelRefused."""
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelRefused(f"{folder} has no safetensors weights")
    counts: Counter[str] = Counter()
    for path in files:
        # The JSON before the numbers: 8 bytes say how long it is (safetensors format).
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
        except (OSError, ValueError, struct.error):
            header = None
        if not isinstance(header, dict):
            raise ModelRefused(f"{path} is not a safetensors file")
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[DTYPES.get(tensor["dtype"], tensor["dtype"])] += math.prod(tensor["shape"])
    return max(counts, key=lambda each: counts[each], default="nothing"), counts.total()


def stored_numbers(file: GgufFile) -> tuple[str, int]:
    """Type of most numbers in a GGUF file, and the count of all."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[DTYPES.get(tensor.type.name, tensor.type.name)] += math.prod(tensor.shape)
    return max(counts, key=lambda each: counts[each], default="nothing"), counts.total()


def _positive(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else default
