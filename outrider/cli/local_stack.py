"""The processes of a stack on this machine: which there are, and how each is started."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import grpc

from outrider.client.calls import unreadable
from outrider.errors import InvalidRequest, VocabularyMismatch
from outrider.model_files.digests import VocabularyDigests
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.model_files.model_names import SIM_DRAFT, embedded_model, parse, parse_simulated
from outrider.model_service.settings import SHARED_MEMORY_SHARE, check_model
from outrider.process.children import HOST, Launch, ServiceFailed, Supervisor, family_of
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.v1.model_service_pb2 import GetModelInfoRequest
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

INFO_TIMEOUT_S = 10.0

# Read by the hub's library.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# All three would read them: the services would wait for TLS, and the gateway would call them without.
TLS_VARIABLES = ("OUTRIDER_TLS_", "OUTRIDER_SERVICE_TLS_")
# Of a draft with a device of its own, which can work while the target does.
OWN_DEVICE_BRANCHES = 16

# Options of a service by their flags: True for a switch that is on. What is None or False is left to the service.
Flags: TypeAlias = dict[str, object]


def port_error(port: int, host: str = HOST) -> OSError | None:
    """Reason why no process can listen on a port of this machine; None where one can."""
    with socket.socket(family_of(host)) as probe:
        # Without this, connections that ended a moment ago would look like a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error
    return None


@dataclass(frozen=True, slots=True)
class Stack:
    """Settings that the three processes are started with; a port of 0 takes a free one.

    Without a draft there is no draft service, and where nothing guesses in the target's process, decoding is plain
    then. draft_dtype None means that of the target, and rest_port None no REST. What only one of the services knows is
    among its flags.
    """

    target: str
    draft: str | None
    target_flags: Flags = field(default_factory=dict)
    draft_flags: Flags = field(default_factory=dict)
    gateway_flags: Flags = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "cpu"
    draft_device: str = "cpu"
    threads: int = 1
    draft_threads: int = 1
    gateway_port: int = 0
    rest_port: int | None = None
    draft_port: int = 0
    target_port: int = 0
    draft_dtype: str | None = None
    host: str = HOST
    """Where the gateway listens, an IPv6 address in brackets; the services are for it alone."""
    kv_tokens: int | None = None
    kv_dtype: str = "auto"
    """Tokens that the cache of each service holds; None leaves that to the service."""
    context_len: int | None = None
    """Most tokens of a session; None takes what the target reads."""
    branches: int | None = None
    """Branches that a draft makes; None takes 16 where it has a device of its own, else the gateway's own default."""
    workers: int | None = None
    """Processes of the gateway; None takes the gateway's own default."""
    api_keys: str | None = None
    """File of the keys that the gateway asks for, if it does."""
    prefix_cache: bool = True
    offline: bool = False
    """Downloads nothing: a hub id that is not on this machine is refused."""

    @property
    def has_two_devices(self) -> bool:
        """Whether the draft has a device of its own."""
        return self.draft is not None and self.device != self.draft_device

    @property
    def dtype_of_draft(self) -> str:
        """The target's, unless the draft has one of its own; beside a file's own bits it need not be such a file."""
        return self.draft_dtype or ("auto" if self.dtype in BLOCK_DTYPES else self.dtype)

    @property
    def shares_device(self) -> bool:
        """Whether the memory of one accelerator is for both models."""
        return self.draft is not None and self.device == self.draft_device != "cpu"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the processes of a running stack."""

    gateway: str
    target: str
    draft: str | None
    rest: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    """HOST:PORT of /metrics by process; that of the gateway is its REST."""


def choose_models(target: str | None, draft: str | None, *, no_draft: bool) -> tuple[str, str | None]:
    """The pair to serve; sized and simulated models by their explicit names. Other targets need a draft of their own.

    The embedded draft fits the embedded target and the sized ones, which have its vocabulary, and a simulated target
    has a simulated draft. Raises ModelRefused when an embedded model is wanted and missing, and about a path that is no
    folder.
    """
    is_own = target is None or parse(target) is not None
    is_simulated = target is not None and parse_simulated(target) is not None
    target = embedded_model("target") if target is None else check_model("--target", target)
    if draft is not None:
        draft = check_model("--draft", draft, "draft")
    if no_draft:
        return target, None
    if draft is None and is_simulated:
        draft = SIM_DRAFT
    return target, draft or (embedded_model("draft") if is_own else None)


def model_launch(role: str, stack: Stack) -> Launch:
    """Launch of the draft or of the target service."""
    is_target = role == "target"
    flags: Flags = {
        "--model": stack.target if is_target else stack.draft or "",
        "--device": stack.device if is_target else stack.draft_device,
        "--dtype": stack.dtype if is_target else stack.dtype_of_draft,
        "--threads": stack.threads if is_target else stack.draft_threads,
        "--no-prefix-cache": not stack.prefix_cache,
        "--kv-tokens": stack.kv_tokens,
        "--kv-dtype": stack.kv_dtype,
        "--kv-memory-share": SHARED_MEMORY_SHARE if stack.shares_device and stack.kv_tokens is None else None,
        "--context-len": stack.context_len if is_target else None,
        # For what it loads; other lines below warnings are not shown.
        "--log-level": "info",
        **(stack.target_flags if is_target else stack.draft_flags),
    }
    # Named, because a variable of the environment would name one port for all three.
    further = {"metrics": f"{HOST}:0"}
    port = stack.target_port if is_target else stack.draft_port
    launch = _launch(role, f"{role}_service", flags, f"{HOST}:{port}", further, stack)
    return replace(launch, hides_info=True)


def gateway_launch(stack: Stack, target_address: str, draft_address: str | None) -> Launch:
    """The gateway in front of services that serve already."""
    flags: Flags = {
        "--target": target_address,
        "--draft": draft_address or "",
        "--tokenizer": stack.target,
        # A user who starts a stack by hand wants to look at it with grpcurl.
        "--reflection": True,
        "--branches": OWN_DEVICE_BRANCHES if stack.branches is None and stack.has_two_devices else stack.branches,
        "--workers": stack.workers,
        "--api-keys": stack.api_keys,
        "--log-level": "warning",
        **stack.gateway_flags,
    }
    shares_port = (stack.workers or 1) > 1
    # REST has the metrics as well, but for a key that the stack's user need not have; and workers that share a port are
    # asked for them to see whether it hangs.
    metrics = f"{HOST}:0" if shares_port or stack.api_keys is not None else ""
    further = {"rest": "" if stack.rest_port is None else f"{stack.host}:{stack.rest_port}", "metrics": metrics}
    launch = _launch("gateway", "gateway", flags, f"{stack.host}:{stack.gateway_port}", further, stack)
    return replace(launch, shares_port=shares_port)


def _launch(name: str, module: str, flags: Flags, listen: str, further: Mapping[str, str], stack: Stack) -> Launch:
    words: list[str] = []
    for flag, value in flags.items():
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    command = (sys.executable, "-P", "-m", module, *words)
    return Launch(name, command, listen, further=further, environment=OFFLINE if stack.offline else {})


def metrics_address(addresses: Mapping[str, str]) -> str | None:
    """Address of a process's /metrics, among all its addresses; None where it has none."""
    return addresses.get("metrics") or addresses.get("rest")


async def start_stack(supervisor: Supervisor, stack: Stack) -> Addresses:
    """Starts the services side by side, then the gateway.

    Raises ServiceFailed, also about a pair that does not fit: the gateway would serve it without the draft, which is
    not what a user who names a pair wants. Raises InvalidRequest about variables.
    """
    for name in os.environ:
        if name.startswith(TLS_VARIABLES):
            limit = "left out of the environment: the processes of a stack on one machine speak plaintext"
            raise InvalidRequest(name, os.environ[name], limit)
    roles = ["target", "draft"] if stack.draft else ["target"]
    launches = [model_launch(role, stack) for role in roles]
    # Each takes a share of what is free, so on one device the second waits until the first has taken its own.
    groups = [[launch] for launch in launches] if stack.shares_device else [launches]
    target, *drafts = [address for group in groups for address in await supervisor.start(*group)]
    draft = drafts[0] if drafts else None
    if draft is not None:
        (_, others), (name, own) = await vocabulary_of(target), await vocabulary_of(draft)
        difference = others.difference(own)
        if difference:
            sentence = f"The draft model {name} does not fit {stack.target}: {difference[0].lower()}{difference[1:]}"
            raise ServiceFailed(sentence, VocabularyMismatch.exit_code)
    [gateway] = await supervisor.start(gateway_launch(stack, target, draft))
    places = {role: metrics_address(supervisor.addresses(role)) for role in ("gateway", *roles)}
    metrics = {role: place for role, place in places.items() if place}
    return Addresses(gateway, target, draft, supervisor.addresses("gateway").get("rest"), metrics)


async def vocabulary_of(address: str) -> tuple[str, VocabularyDigests]:
    """The name of a service's model, and its vocabulary; raises PeerLost when it is gone or not understood."""
    async with open_channel(address) as channel:
        try:
            info = await ModelServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
    if info is None:
        raise unreadable(address)
    return info.model_name, VocabularyDigests(info.vocabulary_size, tuple(info.vocabulary_digests))
