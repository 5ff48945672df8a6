"""Settings of a service with a model, the same for draft and target."""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.gguf.files import SUFFIX, is_gguf
from outrider.model_files.model_names import parse, parse_simulated
from outrider.process.options import Setting, above, addresses, listed, within
from outrider.process.run import ProcessSettings

# As many as the compiled kernels' thread pool takes.
MAX_THREADS = 256
# Of what a device has free for each of two models, so that one leaves the other about as much as it takes itself.
SHARED_MEMORY_SHARE = 0.45
# Names repetitions in the text where a model could be named.
LOOKUP = "lookup"


def available_cpus() -> int:
    """CPUs that this process may use, at least 1, and not more than threads can be used."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def check_model(option: str, model: str, role: str = "target") -> str:
    """Returns a model that may be a folder, a GGUF file or a hub id, and a sized or simulated one by its explicit name.

    Raises ModelRefused about a path that is neither and an unknown preset. The engine says so too, but knows the
    model only, and not by which option it was named.
    """
    known = parse(model, role) or parse_simulated(model)
    if known is not None:
        return known.name
    # Unlike Path.expanduser, this leaves the home of a user that does not exist as it is.
    path = Path(os.path.expanduser(model))
    # And os.path finds nothing under a name that is too long, where Path raises.
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or os.path.exists(path)
    is_place = os.path.isdir(path) or (is_gguf(path.name) and os.path.isfile(path))
    if not model or (looks_like_path and not is_place):
        limit = f"a folder, a {SUFFIX} file or the id of a model on the hub"
        raise ModelRefused(f"{option} is {model!r}, but must be {limit}", model=model)
    return model


def split_cascade(cascade: str) -> tuple[str, bool]:
    """The model that --cascade names, empty for none, and whether repetitions in the text are looked up as well."""
    model = "" if cascade == LOOKUP else cascade.removesuffix("+" + LOOKUP)
    return model, model != cascade


def check_cascade(cascade: str, depth: int) -> str:
    """Returns what --cascade may name: nothing, `lookup`, a model, MODEL+lookup; a model as check_model does.

    Raises ModelRefused, and InvalidRequest about a --cascade-depth without a cascade.
    """
    if depth and not cascade:
        raise InvalidRequest("--cascade-depth", depth, "left out without --cascade")
    if cascade in {"", LOOKUP}:
        return cascade
    model, has_lookup = split_cascade(cascade)
    return check_model("--cascade", model, "draft") + ("+" + LOOKUP) * has_lookup


class KernelChoice(StrEnum):
    """What computes on an accelerator; see outrider.engine.ops.KERNELS."""

    AUTO = "auto"
    EAGER = "eager"
    TRITON = "triton"
    GRAPHS = "graphs"


class Dtype(StrEnum):
    """Types of the weights in memory."""

    AUTO = "auto"
    FILE = "file"
    FILE_A15 = "file-a15"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"


class KvDtype(StrEnum):
    """Types of keys and values on the CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Listen = Annotated[str, Setting("Where to serve gRPC; port 0 takes a free one.", addresses(min_port=0))]


@dataclass(frozen=True, slots=True)
class ModelServiceSettings(ProcessSettings):
    """Options of a model service. A sized or simulated model goes by its explicit name afterwards.

    Raises InvalidRequest about a value outside its limit, and ModelRefused.
    """

    role: ClassVar[str] = "target"

    model: Annotated[str, Setting("Folder, GGUF file or hub id of the model, sized:PRESET, or sim:PRESET.")]
    listen: Listen = "127.0.0.1:0"
    device: Annotated[str, Setting("cpu or cuda:N.")] = "cpu"
    dtype: Annotated[
        Dtype,
        Setting(
            "Type of the weights in memory. `file` and `file-a15` keep quantised weights, of GGUF or MXFP4, as they "
            "are, on the CPU, and multiply them with activations of 8 or 15 bits; `auto` is `file-a15` for GGUF files "
            "of up to 500 million parameters, `file` for others with such weights, and bfloat16 elsewhere."
        ),
    ] = Dtype.AUTO
    kernels: Annotated[
        KernelChoice,
        Setting(
            "What computes on a CUDA device: torch (eager), our kernels one by one (triton) or recorded as graphs "
            "(graphs); auto takes the fastest that it can have, and the CPU knows no other."
        ),
    ] = KernelChoice.AUTO
    threads: Annotated[int, Setting("Compute threads.", within(1, MAX_THREADS), default="one for each CPU")] = field(
        default_factory=available_cpus
    )
    kv_tokens: Annotated[
        int | None,
        Setting(
            "Tokens that the cache holds.",
            within(1),
            default="512 MiB or one context, as far as it fits; on CUDA --kv-memory-share; of sim its device's memory",
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype,
        Setting(
            "Type of keys and values on the CPU: float32, or bfloat16, which takes half as much memory and changes the "
            "numerics; auto is float32."
        ),
    ] = KvDtype.AUTO
    kv_memory_share: Annotated[
        float | None,
        Setting(
            "Share of what a CUDA device has free beside the weights that the cache takes; each process on a device "
            "needs one.",
            within(0.01, 1),
            default="0.9, or 0.45 beside another model in the process",
        ),
    ] = None
    context_len: Annotated[
        int | None,
        Setting(
            "Most tokens of a prompt and its answer together.",
            within(1),
            default="what the model reads, and the cache has room for",
        ),
    ] = None
    lease_seconds: Annotated[float, Setting("How long a session outlives a broken link.", within(0))] = 60.0
    # A forward of 512 rows of a large model on a CPU may take a minute.
    stall_seconds: Annotated[
        float,
        Setting(
            "A device that has work and finishes none of it for this long is given up, and the process exits with 70.",
            above(0),
        ),
    ] = 120.0
    prefix_cache: Annotated[
        bool, Setting("Keep what is cached of ended sessions for those that begin with the same tokens.")
    ] = True
    metrics_listen: Annotated[
        str,
        Setting(
            "Where to serve metrics for Prometheus; port 0 takes a free one. Empty: nowhere.",
            addresses(min_port=0, needed=False),
        ),
    ] = ""
    tls_clients: Annotated[
        str,
        Setting("Names of the clients that --tls-client-ca lets in, with commas: the first DNS name in a certificate."),
    ] = "gateway"

    def __post_init__(self) -> None:
        ProcessSettings.__post_init__(self)
        if self.tls_client_ca and not self.clients:
            raise InvalidRequest("--tls-clients", self.tls_clients, "at least one name with --tls-client-ca")
        object.__setattr__(self, "model", check_model("--model", self.model, self.role))

    @property
    def has_guest(self) -> bool:
        """Whether another model is loaded beside this one, in the same process."""
        return False

    @property
    def memory_share(self) -> float | None:
        """Share of a device's memory for the cache of each model of the process; None leaves it to the engine."""
        is_open = self.kv_memory_share is None and self.kv_tokens is None and self.device != "cpu"
        return SHARED_MEMORY_SHARE if is_open and self.has_guest else self.kv_memory_share

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that may ask; none where every client that reaches the service may."""
        return listed(self.tls_clients) if self.tls_client_ca else ()
