"""Checks of both models' files without loading them: whether they can be served, fit together, and into memory."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from outrider.cli.doctor.report import Finding, failed, ok, skipped, warning
from outrider.cli.doctor.weights import AUTO, PLAIN, Weights
from outrider.cli.local_stack import Stack
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.drafter_layouts import refused_drafter
from outrider.model_files.generation_defaults import ModelDefaults
from outrider.model_files.gguf.config import json_config
from outrider.model_files.gguf.files import HubName, cached_gguf, gguf_in, model_stem
from outrider.model_files.gguf.header import BLOCK_DTYPES, GgufFile
from outrider.model_files.memory import available_bytes, fit_cache, gibibytes
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
# torch and gRPC in each service, and the gateway: measured, rounded up.
PROCESS_BYTES, GATEWAY_BYTES = 400 << 20, 150 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts from a model's files. `key_value_width` counts the numbers of one token's keys in all layers."""

    name: str
    folder: Path
    family: str
    weights: Weights
    context_len: int
    key_value_width: int
    vocabulary: Vocabulary
    tokenizer: Tokenizer | None = None
    """None for a draft that only states its vocabulary."""
    simulated: SimulatedModel | None = None


def check_pair(stack: Stack) -> tuple[list[Finding], list[str], int]:
    """Checks the models that a stack names: each for itself, both together, and what they take of the memory.

    Beside the findings come the hub ids that are not on this machine, and the bytes of weights that a token of the
    target reads on the CPU; 0 for another device, a simulated target, or none that could be read.
    """
    dtypes = {"target": stack.dtype, "draft": stack.dtype_of_draft}
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
        device = stack.device if role == "target" else stack.draft_device
        findings.append(check_model(role, model, files, dtypes[role], device))
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
    wanted = {
        "target": Asked(stack.dtype, stack.kv_dtype, stack.kv_tokens, stack.context_len, stack.device),
        "draft": Asked(dtypes["draft"], stack.kv_dtype, stack.kv_tokens, device=stack.draft_device),
    }
    if found:
        findings.append(check_memory(found, wanted, available_bytes()))
    target = found.get("target")
    if target is None or not wanted["target"].is_here(target):
        return findings, absent, 0
    return findings, absent, target.weights.token_bytes(target.weights.served(stack.dtype, "cpu"))


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
        config = json_config(file)
        weights = Weights.of_gguf(file)
    else:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ModelRefused(f"{folder / 'config.json'} cannot be read as JSON") from None
        if not isinstance(config, dict):
            raise ModelRefused(f"{folder / 'config.json'} is no JSON object")
        refused = refused_drafter(config)
        if refused is not None:
            raise ModelRefused(f"{folder} holds {refused}")
        weights = Weights.of_folder(folder, config)
    context_len = _positive(config, "max_position_embeddings", 0)
    heads = _positive(config, "num_attention_heads", 1)
    head_dim = _positive(config, "head_dim", _positive(config, "hidden_size", 0) // heads)
    width = _positive(config, "num_hidden_layers", 0) * _positive(config, "num_key_value_heads", heads) * head_dim
    if sized is not None:
        shape = sized.shape
        weights, context_len = Weights.of_shape(shape), CONTEXT_LEN
        width = shape.num_layers * shape.num_kv_heads * shape.head_dim
    if simulated is not None:
        weights, context_len = replace(weights, counts={PLAIN: simulated.parameter_count}), SIM_CONTEXT_LEN
    known = simulated or sized
    local_name = model_stem(given.name) if given.is_file() else (given.resolve() if given.is_dir() else given).name
    name = known.name if known else local_name
    tokenizer, num_rows = tokenizer_in(folder), _positive(config, "vocab_size", 0)
    vocabulary = Vocabulary.read(folder) if tokenizer is None else Vocabulary.embedded(tokenizer, num_rows, name)
    family = ", ".join(map(str, config.get("architectures") or ["an unnamed architecture"]))
    return ModelFiles(name, folder, family, weights, context_len, width, vocabulary, tokenizer, simulated)


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


def check_model(role: str, model: str | None, files: ModelFiles | None, dtype: str, device: str = "cpu") -> Finding:
    """Finding about one model of the pair, None if there is none; `files` is None where it is not on this machine."""
    check = f"{role} model"
    if model is None:
        return skipped(check, f"There is no {role}: the target decodes plainly.", f"Name one with --{role}.")
    if files is None:
        return skipped(check, f"{model} is no folder, and as a hub id not downloaded.", download_fix([model]))
    if files.simulated is not None:
        sentence = (
            f"{files.name} is simulated: it takes the time of {files.weights.count:,} parameters in bfloat16 on "
            f"{files.simulated.device.name}, {files.simulated.step_s(1, 1, 1) * 1e3:.1f} ms for one row, and its "
            "tokens come from a hash."
        )
        fix = f"Leave --dtype at bfloat16: {dtype} is not simulated."
        return ok(check, sentence) if dtype in (AUTO, PLAIN) else failed(check, sentence, fix)
    weights = files.weights
    served = weights.served(dtype, device)
    types = f"the types of the file ({served})" if served in BLOCK_DTYPES else served
    sentence = (
        f"{files.name}: {files.family}, {weights.shown_count} in {weights.mix}, served in {types}, "
        f"context of {files.context_len:,} tokens, "
        f"{files.vocabulary.size:,} tokens in its vocabulary ({files.folder})."
    )
    if served in BLOCK_DTYPES and not weights.file_bits:
        fix = f"Leave out --dtype {served}, which is for GGUF files and MXFP4, where weights are quantised."
        return failed(check, sentence, fix)
    if weights.stored_dtype == "float16" and served == PLAIN:
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


class Asked(NamedTuple):
    """What a service is asked for: `--dtype`, `--kv-dtype`, `--kv-tokens`, `--context-len`, `--device`."""

    dtype: str = AUTO
    kv_dtype: str = AUTO
    kv_tokens: int | None = None
    context_len: int | None = None
    device: str = "cpu"

    def is_here(self, files: ModelFiles) -> bool:
        """Whether weights and cache of a model are in this machine's own memory, and not a device's or nowhere."""
        return self.device == "cpu" and files.simulated is None


def check_memory(models: Mapping[str, ModelFiles], asked: Mapping[str, Asked], available: int | None) -> Finding:
    """What services of models take of this machine's memory, by role; caches fit themselves to what is free."""
    if available is None:
        return skipped(MEMORY, "This system does not say how much memory is free.")
    weights = {
        role: files.weights.memory_bytes(files.weights.served(asked[role].dtype, "cpu"))
        if asked[role].is_here(files)
        else 0
        for role, files in models.items()
    }
    least = {role: weights[role] + PROCESS_BYTES for role in models}
    free = max(0, available - sum(least.values()) - GATEWAY_BYTES)
    parts, caches = [], 0
    for role, files in models.items():
        part = f"{role}: weights {gibibytes(weights[role])}"
        item_bytes = 2 if asked[role].kv_dtype == PLAIN else 4
        token_bytes = 2 * item_bytes * files.key_value_width if asked[role].is_here(files) else 0
        if token_bytes:
            try:
                cache = fit_cache(token_bytes, files.context_len, free, asked[role].kv_tokens, asked[role].context_len)
            except (InvalidRequest, ModelRefused) as error:
                named = error.rename_fields(lambda field: f"--{field.replace('_', '-')}").message
                fix = "Choose smaller models, a smaller --dtype, or a machine with more memory."
                return failed(MEMORY, f"For the {role} {named[0].lower()}{named[1:]}", fix)
            caches += cache.num_tokens * token_bytes
            part = f"{part}, cache of {cache.reason.partition(';')[0]}, {gibibytes(token_bytes)} a token"
        parts.append(part)
    total = sum(least.values()) + caches + GATEWAY_BYTES
    sentence = f"A stack takes about {gibibytes(total)} ({'; '.join(parts)}); {gibibytes(available)} are free."
    if total <= available:
        return ok(MEMORY, sentence)
    if min(least.values()) + GATEWAY_BYTES > available:
        return failed(MEMORY, sentence, "Choose smaller models, or a machine with more memory.")
    return warning(MEMORY, sentence, "Close other programs, choose smaller models, or lower --kv-tokens of a service.")


def _positive(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else default
