"""Puts a gateway together: links to the services, then the server. Knows no request.

The target must be there before the gateway serves; the draft need not, because a gateway without it only is slower.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gateway.backend import Backend
from gateway.deadline import DraftDeadline
from gateway.links import ModelInfo, ServiceLink
from gateway.policy import SpeculationPolicy
from gateway.servicer import generation_service
from gateway.settings import GatewaySettings
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

    async def stop(self, grace_s: float = rpc.DRAIN_S) -> None:
        """Takes no new requests, gives running ones grace_s to end, and closes the links."""
        await self.server.stop(grace_s)
        await _close(self.backend)


async def start(settings: GatewaySettings) -> RunningGateway:
    """Starts a gateway and returns when it serves.

    Raises NotReady when the target does not answer in time, VocabularyMismatch when tokenizer, target and draft do not
    fit, ModelRefused for a tokenizer that cannot be read, AddressTaken.
    """
    tokenizer = await asyncio.to_thread(Tokenizer, settings.tokenizer)
    backend = _backend(settings, tokenizer)
    try:
        await _await_target(backend.target, settings.target_wait_s)
        if backend.draft is not None:
            await _await_draft(backend.draft, settings.draft_wait_s)
        service = generation_service(backend, settings.max_requests, settings.client_stall_s)
        server = await rpc.serve(settings.listen, service)
    except BaseException:
        await _close(backend)
        raise
    return RunningGateway(server.address, backend, server)


def _backend(settings: GatewaySettings, tokenizer: Tokenizer) -> Backend:
    vocabulary = tokenizer.vocabulary()
    target = ServiceLink("target", settings.target, _fits(vocabulary, settings.tokenizer))
    draft = ServiceLink("draft", settings.draft, _fits(vocabulary, settings.tokenizer)) if settings.draft else None
    return Backend(
        tokenizer=tokenizer,
        target=target,
        draft=draft,
        policy=SpeculationPolicy(),
        deadline=DraftDeadline(settings.draft_deadline_least_s, settings.draft_deadline_most_s),
        answer_timeout_s=settings.answer_timeout_s,
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


async def _await_target(link: ServiceLink, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while not await link.settled(min(PROGRESS_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            raise NotReady(f"{link} did not answer within {patience_s:g} seconds", address=link.address)
        log.warning("waiting for the target", address=link.address, seconds_left=round(until_s - time.monotonic()))
    link.present()


async def _await_draft(link: ServiceLink, patience_s: float) -> None:
    """Gives the draft a moment; raises only what its answer says about it, because later nobody would read it."""
    if not await link.settled(patience_s):
        log.warning("serving without the draft until it answers", address=link.address)
    elif link.misfit is not None:
        raise link.misfit


async def _close(backend: Backend) -> None:
    for link in (backend.target, backend.draft):
        if link is not None:
            await link.close()
