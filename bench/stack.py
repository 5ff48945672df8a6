"""The pair to measure, and real processes of it as `outrider generate` starts them. Measures nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli.running import Interrupts, note, service_log
from outrider.cli.stack import Addresses, Stack, choose_models, start_stack
from outrider.errors import ModelRefused
from outrider.supervisor import Supervisor


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """As outrider.cli.stack.choose_models; raises ModelRefused also when there is no draft for the target."""
    target_model, draft_model = choose_models(target, draft, no_draft=False)
    if draft_model is None:
        raise ModelRefused(f"There is no draft for {target_model}; name one with --draft.", model=target_model)
    return target_model, draft_model


@asynccontextmanager
async def served(stack: Stack, interrupts: Interrupts) -> AsyncIterator[Addresses]:
    """Serves a pair and yields where its processes answer; a second signal ends them at once."""
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        yield await start_stack(supervisor, stack)
