"""Puts a gateway together: links to the services, then the server. Knows no request.

The target must be there before the gateway serves; the draft need not, because a gateway without it only is slower.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry

from gateway.audit import ShadowAudit
from gateway.backend import Backend
from gateway.deadline import DraftDeadline
from gateway.generation import decode
from gateway.links import ModelInfo, ServiceLink
from gateway.metrics import RunningMetrics, serve_metrics
from gateway.patience import NEVER, Patience
from gateway.policy import SpeculationPolicy
from gateway.readiness import report_readiness
from gateway.replicas import Replicas
from gateway.servicer import generation_service
from gateway.settings import GatewaySettings, addresses
from gateway.tokenizer import Tokenizer
from outrider import rpc
from outrider.errors import NotReady, VocabularyMismatch
from outrider.vocabulary import Vocabulary

PROGRESS_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves on `address`."""

    address: str
    backend: Backend
    server: rpc.RunningServer
    tasks: tuple[asyncio.Task[None], ...]
    metrics: RunningMetrics | None

    async def stop(self, grace_s: float = rpc.DRAIN_S) -> None:
        """Takes no new requests, gives running ones grace_s to end, and closes the links."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await self.server.stop(grace_s)
        await _close(self.backend)
        if self.metrics is not None:
            await self.metrics.stop()


async def start(settings: GatewaySettings) -> RunningGateway:
    """Starts a gateway and returns when it serves.

    Raises NotReady when the target does not answer in time, VocabularyMismatch when tokenizer, target and draft do not
    fit, ModelRefused for a tokenizer that cannot be read, AddressTaken.
    """
    tokenizer = await asyncio.to_thread(Tokenizer, settings.tokenizer)
    registry = CollectorRegistry()
    backend = _backend(settings, tokenizer, registry)
    metrics = None
    try:
        if settings.metrics_listen:
            metrics = serve_metrics(settings.metrics_listen, registry)
            # With port 0 nothing else tells where.
            log.info("serving metrics", address=metrics.address)
        await _await_target(backend.target, settings.target_wait_s)
        if backend.draft is not None:
            await _await_draft(backend.draft, settings.draft_wait_s)
        service = generation_service(backend, settings.max_requests, settings.client_stall_s)
        server = await rpc.serve(settings.listen, service)
    except BaseException:
        await _close(backend)
        if metrics is not None:
            await metrics.stop()
        raise
    reporting = report_readiness(backend.target, server.health, ("", *service))
    auditing = backend.audit.run(lambda plan, target: decode(plan, backend, target, NEVER))
    tasks = asyncio.create_task(reporting, name="readiness"), asyncio.create_task(auditing, name="audit")
    return RunningGateway(server.address, backend, server, tasks, metrics)


def _backend(settings: GatewaySettings, tokenizer: Tokenizer, registry: CollectorRegistry) -> Backend:
    vocabulary = tokenizer.vocabulary()
    fits = _fits(vocabulary, settings.tokenizer)
    target = Replicas([ServiceLink("target", address, fits) for address in addresses(settings.target)])
    drafts = [ServiceLink("draft", address, fits) for address in addresses(settings.draft)]
    return Backend(
        tokenizer=tokenizer,
        target=target,
        draft=Replicas(drafts) if drafts else None,
        policy=SpeculationPolicy(),
        deadline=DraftDeadline(settings.draft_deadline_least_s, settings.draft_deadline_most_s),
        patience=Patience(stall_s=settings.stall_s, rebuild_budget_s=settings.rebuild_budget_s),
        audit=ShadowAudit(settings.audit_fraction, registry),
    )


def _fits(vocabulary: Vocabulary, tokenizer: str) -> Callable[[ModelInfo], None]:
    """A check that a model's ids mean the same tokens as the gateway's tokenizer, which is the target's."""

    def check(info: ModelInfo) -> None:
        difference = vocabulary.difference(Vocabulary(info.vocabulary_size, info.vocabulary_digests))
        if difference is not None:
            raise VocabularyMismatch(
                f"The {info.role} model {info.model_name} does not fit the tokenizer of {tokenizer}: "
                f"{difference[0].lower()}{difference[1:]}"
            )

    return check


async def _await_target(target: Replicas, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while not await target.settled(min(PROGRESS_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            raise NotReady(f"{target} did not answer within {patience_s:g} seconds", address=target.links[0].address)
        log.warning("waiting", service=str(target), seconds_left=round(until_s - time.monotonic()))
    target.present()


async def _await_draft(draft: Replicas, patience_s: float) -> None:
    """Gives the draft a moment; raises only what its answer says about it, because later nobody would read it."""
    if not await draft.settled(patience_s):
        log.warning("serving without the draft until it answers", service=str(draft))
    elif draft.info is None and draft.misfit is not None:
        raise draft.misfit


async def _close(backend: Backend) -> None:
    for replicas in (backend.target, backend.draft):
        if replicas is not None:
            await replicas.close()
