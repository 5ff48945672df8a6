"""Real processes to measure, as `outrider generate` starts them. Knows nothing about what is measured."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli.running import Interrupts, note, service_log
from outrider.cli.stack import Addresses, Stack, start_stack
from outrider.supervisor import Supervisor


@asynccontextmanager
async def served(stack: Stack, interrupts: Interrupts) -> AsyncIterator[Addresses]:
    """Serves a pair and yields where its processes answer; a second signal ends them at once."""
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        yield await start_stack(supervisor, stack)
