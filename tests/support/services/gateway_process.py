"""A gateway in a process of its own, in front of the tiny model's services, which are in this one."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.observability import peak_bytes
from support.services.markov import MarkovModel
from support.services.markov_services import TargetServicer, serving

from outrider.model_files.vocabulary import Vocabulary
from outrider.process.children import HOST, Launch, ServiceProcess
from outrider.v1 import model_service_pb2 as model_pb


@dataclass
class GatewayProcess:
    """A running gateway, and what it has logged."""

    process: ServiceProcess
    lines: list[str] = field(default_factory=list)

    @property
    def rest(self) -> str:
        """HOST:PORT of REST."""
        return self.process.launch.further["rest"]

    @property
    def address(self) -> str:
        """HOST:PORT of gRPC."""
        return self.process.address

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had in use."""
        return peak_bytes(self.process.pid)


@asynccontextmanager
async def gateway_process(
    tokenizer: str, *flags: str, environment: Mapping[str, str] | None = None, before: tuple[str, ...] = ()
) -> AsyncIterator[GatewayProcess]:
    """A gateway with these options, on free ports; `before` is a program that starts it."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(tokenizer).digests)
    async with (
        serving(target) as address,
        gateway_before(address, tokenizer, *flags, environment=environment, before=before) as running,
    ):
        yield running


@asynccontextmanager
async def gateway_before(
    target: str, tokenizer: str, *flags: str, environment: Mapping[str, str] | None, before: tuple[str, ...] = ()
) -> AsyncIterator[GatewayProcess]:
    """The same in front of a target at this address."""
    words = ("-P", "-m", "gateway", "--target", target, "--tokenizer", tokenizer, *flags)
    command = (*before, sys.executable, *words)
    launch = Launch("gateway", command, further={"rest": f"{HOST}:0"}, environment=environment or {})
    running = GatewayProcess(None)  # type: ignore[arg-type]
    running.process = await ServiceProcess.start(launch, running.lines.append)
    try:
        yield running
    finally:
        await running.process.stop(0.0)
