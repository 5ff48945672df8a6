"""Which processes make a stack and with which flags. Starts them through a supervisor; knows nothing about requests."""

import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelRefused
from outrider.model_service_flags import check_model
from outrider.service_process import Launch
from outrider.supervisor import Supervisor

HOST = "127.0.0.1"
GATEWAY_PORT, DRAFT_PORT, TARGET_PORT = 50050, 50051, 50052
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that the three processes are told; a port of 0 takes a free one, no draft means plain decoding."""

    target: str
    draft: str | None
    dtype: str = "bfloat16"
    device: str = "cpu"
    draft_device: str = "cpu"
    threads: int = 1
    draft_threads: int = 1
    gateway_port: int = 0
    draft_port: int = 0
    target_port: int = 0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the processes of a running stack answer."""

    gateway: str
    target: str
    draft: str | None


def embedded_model(role: str) -> str:
    """Folder of the embedded model, in the repository or in the working directory. Raises ModelRefused."""
    folders = [place / "models" / role for place in (REPOSITORY, Path.cwd())]
    for folder in folders:
        if (folder / "config.json").is_file():
            return str(folder)
    raise ModelRefused(f"There is no embedded {role} model in {folders[0]}; name a model with --{role}.")


def choose_models(target: str | None, draft: str | None, *, no_draft: bool) -> tuple[str, str | None]:
    """The pair to serve. The embedded draft fits the embedded target alone, so another target needs a draft of its own.

    Raises ModelRefused when an embedded model is wanted and missing, and about a path that is no folder.
    """
    if target is not None:
        check_model("--target", target)
    if draft is not None:
        check_model("--draft", draft)
    if no_draft:
        return target or embedded_model("target"), None
    if target is None:
        return embedded_model("target"), draft or embedded_model("draft")
    return target, draft


def model_launch(role: str, stack: Stack) -> Launch:
    """The draft or the target service."""
    is_target = role == "target"
    flags = {
        "--model": stack.target if is_target else stack.draft or "",
        "--device": stack.device if is_target else stack.draft_device,
        "--dtype": stack.dtype,
        "--threads": str(stack.threads if is_target else stack.draft_threads),
        "--log-level": "warning",
    }
    port = stack.target_port if is_target else stack.draft_port
    return Launch(role, _command(f"{role}_service", flags), f"{HOST}:{port}")


def gateway_launch(stack: Stack, target_address: str, draft_address: str | None) -> Launch:
    """The gateway in front of services that serve already."""
    flags = {
        "--target": target_address,
        "--draft": draft_address or "",
        "--tokenizer": stack.target,
        "--log-level": "warning",
    }
    return Launch("gateway", _command("gateway", flags), f"{HOST}:{stack.gateway_port}")


def _command(module: str, flags: dict[str, str]) -> tuple[str, ...]:
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *(word for flag in flags.items() for word in flag))


async def start_stack(supervisor: Supervisor, stack: Stack) -> Addresses:
    """Starts the services side by side, then the gateway. Raises ServiceFailed."""
    roles = ["target", "draft"] if stack.draft else ["target"]
    target, *drafts = await supervisor.start(*(model_launch(role, stack) for role in roles))
    draft = drafts[0] if drafts else None
    [gateway] = await supervisor.start(gateway_launch(stack, target, draft))
    return Addresses(gateway, target, draft)
