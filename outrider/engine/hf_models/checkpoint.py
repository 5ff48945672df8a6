"""A model by transformers' code: finds it in a folder, loads it, and makes sure that its rows are independent."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.hf_models.config import (
    PACKAGE,
    Unfit,
    context_len,
    first_line,
    model_class,
    read_configuration,
    survey,
)
from outrider.engine.hf_models.decoder import HfDecoder
from outrider.engine.models.config import DecoderFacts, read_eos_token_ids, read_masks
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.models.progress import Progress
from outrider.engine.models.weights import (
    BESIDE_BLOCKS,
    Shapes,
    check_numbers,
    check_tensors,
    model_hash,
    stored_tensors,
    weight_files,
)
from outrider.engine.ops import Ops
from outrider.errors import ModelRefused, NotReady
from outrider.model_files.safetensors_header import StoredTensor
from outrider.model_files.stamp import Stamp

# Neither a multiple of a vector nor of a tile.
PROBE_ROWS = 37

# What transformers has to say goes to stderr, where a service has one line of JSON for each event.
logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names and shapes of what a model's files must and may hold, in the form in which files hold it."""

    expected: Shapes
    tied: Shapes
    """Names of tensors that are another one, and may be left out."""
    prefix: str
    """Prefix of the names of a base model, with or without which files have them."""
    ignored: tuple[str, ...]
    """Patterns of what older files hold besides."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Names and shapes for a model without numbers; raises Unfit when files cannot hold it."""
        try:
            # Mixtures of experts are stored one by one, and computed as one tensor.
            stored = revert_weight_conversion(model, dict(model.state_dict()))
        except Exception as error:  # what goes wrong with no expert at all has no common type
            raise Unfit(f"cannot be stored: {first_line(error)}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        tied = set(model.all_tied_weights_keys)
        return cls(
            {name: shape for name, shape in shapes.items() if name not in tied},
            {name: shape for name, shape in shapes.items() if name in tied},
            f"{model.base_model_prefix}.",
            tuple(model._keys_to_ignore_on_load_unexpected or ()),
        )

    def check(self, folder: Path, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
        """The stored tensors by the model's names; raises ModelRefused."""
        known = {}
        for tensor in stored:
            names = (tensor.name, self.prefix + tensor.name, tensor.name.removeprefix(self.prefix))
            name = next((each for each in names if each in self.expected or each in self.tied), tensor.name)
            if name in self.expected or not any(re.search(pattern, tensor.name) for pattern in self.ignored):
                known[name] = tensor
        check_tensors(folder, known, self.expected, self.tied)
        return known


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """Files on this machine; see outrider.engine.models.checkpoints.Checkpoint."""

    name: str
    folder: Path
    config: DecoderFacts
    kind: type[PreTrainedModel]
    configuration: PretrainedConfig
    tensors: TensorNames
    modelling: str = f"{PACKAGE}-torch-{torch.__version__.split('+')[0]}"
    """Both compute parts of a forward, and another version may do so with other low bits."""
    block_dtype: str = ""

    def build(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[HfDecoder, str]:
        """Reads the files; raises ModelRefused before it does where their headers do not fit."""
        with unchanged(self.folder):
            stored = self.tensors.check(self.folder, stored_tensors(weight_files(self.folder)))
            # In one call, which does not say how far it is.
            with Progress("reading weights", ", ".join(file.name for file in weight_files(self.folder))):
                model = load(self.kind, self.configuration, self.folder, stored, (device, dtype or BESIDE_BLOCKS, ops))
            decoder = HfDecoder(self.config, model, ops)
            if device.type == "cpu" and not rows_are_independent(decoder):
                message = f"{self.folder}: {self.kind.__name__} computes other bits for a row in other company"
                raise ModelRefused(message)
            return decoder, self.digest()

    def digest(self) -> str:
        return model_hash(self.folder)


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Raises NotReady when files of a model changed in its block, which loads and then hashes them.

    transformers opens them by name, and maps them, so the hash could be of other bytes than those in memory.
    """
    before = _stamps(folder)
    yield
    after = _stamps(folder)
    changed = sorted(str(file) for file in before.keys() | after.keys() if before.get(file) != after.get(file))
    if changed:
        raise NotReady(f"{changed[0]} was changed while the model was loaded from it", file=changed[0])


def _stamps(folder: Path) -> dict[Path, Stamp]:
    found = {}
    for file in (each for kind in ("*.json", "*.safetensors") for each in folder.glob(kind)):
        # One that has gone meanwhile, or is a link to nothing, is not there.
        with suppress(OSError):
            found[file] = Stamp.of(file)
    return found


def find(name: str, folder: Path) -> HfCheckpoint:
    """The model in a folder, with its shape read and nothing loaded. Raises ModelRefused."""
    if (folder / "adapter_config.json").exists():
        raise ModelRefused(f"{folder} is an adapter of another model; only whole models are served", folder=folder)
    configuration = read_configuration(folder)
    kind = model_class(folder)
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    limits = context_len(folder, configuration), read_eos_token_ids(folder, keys)
    try:
        model = without_numbers(kind, configuration)
        tensors = TensorNames.of(model)
        straighten(model)
        config = survey(model, *limits)
        config = replace(config, masks=read_masks(keys, config.vocab_size))
    except Unfit as error:
        raise ModelRefused(f"{folder}: {kind.__name__} {error}", folder=folder) from error
    return HfCheckpoint(name, folder, config, kind, configuration, tensors)


def without_numbers(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device, which has shapes and takes no memory; raises Unfit when it cannot be made."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind(config)
    except Exception as error:  # what a class says about its configuration has no common type
        raise Unfit(f"cannot be made: {first_line(error)}") from error
    return model.eval()


def straighten(model: nn.Module) -> None:
    """Replaces GPT-2's transposed layers by ordinary ones, whose products are the same."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                num_inputs, num_outputs = child.weight.shape
                with torch.device("meta"):
                    linear = nn.Linear(num_inputs, num_outputs)
                linear.weight = nn.Parameter(child.weight.detach().t().contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
                setattr(module, name, linear)


def load(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    placement: tuple[torch.device, torch.dtype, Ops],
) -> PreTrainedModel:
    """The model with its numbers: matrices in the placement's type, vectors in float32. stored has been checked."""
    device, dtype, ops = placement
    files = weight_files(folder)
    # Parts without an index are found here, and transformers does not look for them.
    is_found = len(files) == 1 or (folder / "model.safetensors.index.json").is_file()
    state = None if is_found else {name: tensor for file in files for name, tensor in load_file(file).items()}
    try:
        model, report = kind.from_pretrained(
            folder if is_found else None,
            config=config,
            state_dict=state,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:  # it reads generation_config.json too
        raise ModelRefused(f"{folder} is refused by {PACKAGE}: {first_line(error)}", folder=folder) from error
    # The headers were right, so this is about a layout that is not read as it was written.
    invented = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    if invented:
        raise ModelRefused(f"{folder}: transformers has no numbers for {invented[0]}", tensor=invented[0])
    straighten(model)
    # Norms and biases as the files have them; transformers has rounded them to the type of the matrices.
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, found in stored.items():
        if len(found.shape) == 1 and found.dtype != "BF16" and name in tensors:
            with safe_open(found.file, framework="pt") as file:
                tensors[name].data = file.get_tensor(found.name).float()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kept = torch.float32 if tensor.ndim == 1 and tensor.is_floating_point() else tensor.dtype
        # Always a copy: the file's memory is mapped, unaligned, and changes if someone overwrites it.
        copied = tensor.detach().to(device=device, dtype=kept, copy=True)
        check_numbers(folder, name, copied)
        tensor.data = ops.stack([copied]) if copied.ndim > 1 else copied
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(requires_grad=False)
    return loaded


def rows_are_independent(decoder: HfDecoder) -> bool:
    """Whether first and last of 37 one-token sequences have the logits that they have alone."""
    config, device = decoder.config, decoder.embedding.device
    cache = KVCache(config.num_layers, PROBE_ROWS, config.num_kv_heads, config.head_dim, torch.float32, device)
    token_ids = torch.arange(PROBE_ROWS, device=device) % config.vocab_size
    positions = torch.arange(PROBE_ROWS, device=device) % config.context_len
    everyone = torch.arange(PROBE_ROWS, device=device)

    def logits(rows: Tensor) -> Tensor:
        wanted = torch.arange(rows.shape[0], device=device)
        # Every row sees itself alone.
        counts = torch.ones_like(rows).int()
        plan = RowPlan(token_ids[rows], positions[rows], rows, rows.int(), wanted, counts, 1)
        return decoder.forward(plan, cache, wanted)

    together = logits(everyone)
    return all(torch.equal(logits(everyone[row : row + 1])[0], together[row]) for row in (0, PROBE_ROWS - 1))
