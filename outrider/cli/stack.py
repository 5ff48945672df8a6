"""Which processes make a stack and with which flags. Starts them through a supervisor; knows nothing about requests."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.model_names import embedded_model, parse
from outrider.model_service_flags import check_model
from outrider.service_process import Launch
from outrider.supervisor import Supervisor

HOST = "127.0.0.1"
# Read by the hub's library.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that the three processes are told; a port of 0 takes a free one, no draft means plain decoding.

    draft_dtype None means that of the target, top_n None the draft service's own default, and rest_port None no REST.
    """

    target: str
    draft: str | None
    dtype: str = "bfloat16"
    device: str = "cpu"
    draft_device: str = "cpu"
    threads: int = 1
    draft_threads: int = 1
    gateway_port: int = 0
    rest_port: int | None = None
    draft_port: int = 0
    target_port: int = 0
    draft_dtype: str | None = None
    top_n: int | None = None
    prefix_cache: bool = True
    offline: bool = False
    """Downloads nothing: a hub id that is not on this machine is refused."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that all processes get."""
        return OFFLINE if self.offline else {}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the processes of a running stack answer."""

    gateway: str
    target: str
    draft: str | None
    rest: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    """HOST:PORT of /metrics by process; that of the gateway is its REST."""


def choose_models(target: str | None, draft: str | None, *, no_draft: bool) -> tuple[str, str | None]:
    """The pair to serve; sized models by their explicit names. Another target than these needs a draft of its own.

    The embedded draft fits the embedded target and the sized ones, which have its vocabulary. Raises ModelRefused when
    an embedded model is wanted and missing, and about a path that is no folder.
    """
    is_own = target is None or parse(target) is not None
    target = embedded_model("target") if target is None else check_model("--target", target)
    if draft is not None:
        draft = check_model("--draft", draft, "draft")
    if no_draft:
        return target, None
    return target, draft or (embedded_model("draft") if is_own else None)


def model_launch(role: str, stack: Stack) -> Launch:
    """The draft or the target service."""
    is_target = role == "target"
    flags = {
        "--model": stack.target if is_target else stack.draft or "",
        "--device": stack.device if is_target else stack.draft_device,
        "--dtype": stack.dtype if is_target else stack.draft_dtype or stack.dtype,
        "--threads": str(stack.threads if is_target else stack.draft_threads),
        "--log-level": "warning",
    }
    if stack.top_n is not None and not is_target:
        flags["--top-n"] = str(stack.top_n)
    port = stack.target_port if is_target else stack.draft_port
    switches = () if stack.prefix_cache else ("--no-prefix-cache",)
    command = (*_command(f"{role}_service", flags), *switches)
    # Named, because a variable of the environment would name one port for all three.
    further = {"metrics": f"{HOST}:0"}
    return Launch(role, command, f"{HOST}:{port}", further=further, environment=stack.environment)


def gateway_launch(stack: Stack, target_address: str, draft_address: str | None) -> Launch:
    """The gateway in front of services that serve already."""
    flags = {
        "--target": target_address,
        "--draft": draft_address or "",
        "--tokenizer": stack.target,
        "--log-level": "warning",
    }
    # REST has the metrics as well.
    further = {"rest": "" if stack.rest_port is None else f"{HOST}:{stack.rest_port}", "metrics": ""}
    # Whoever starts a stack by hand wants to look at it with grpcurl.
    command = (*_command("gateway", flags), "--reflection")
    listen = f"{HOST}:{stack.gateway_port}"
    return Launch("gateway", command, listen, further=further, environment=stack.environment)


def _command(module: str, flags: dict[str, str]) -> tuple[str, ...]:
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *(word for flag in flags.items() for word in flag))


async def start_stack(supervisor: Supervisor, stack: Stack) -> Addresses:
    """Starts the services side by side, then the gateway. Raises ServiceFailed."""
    roles = ["target", "draft"] if stack.draft else ["target"]
    target, *drafts = await supervisor.start(*(model_launch(role, stack) for role in roles))
    draft = drafts[0] if drafts else None
    [gateway] = await supervisor.start(gateway_launch(stack, target, draft))
    places = {role: metrics_address(supervisor.addresses(role)) for role in ("gateway", *roles)}
    metrics = {role: place for role, place in places.items() if place}
    return Addresses(gateway, target, draft, supervisor.addresses("gateway").get("rest"), metrics)


def metrics_address(addresses: Mapping[str, str]) -> str | None:
    """Where a process serves /metrics, among all that it said about where it serves; None where it has none."""
    return addresses.get("metrics") or addresses.get("rest")
