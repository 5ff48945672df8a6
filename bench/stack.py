"""Real processes to measure, as `outrider generate` starts them. Knows nothing about what is measured."""

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli.stack import Stack, start_stack
from outrider.supervisor import Supervisor


@asynccontextmanager
async def served(options: argparse.Namespace) -> AsyncIterator[str]:
    """Serves the pair that the options name, and yields the gateway's address."""
    stack = Stack(options.target, options.draft, dtype=options.dtype, threads=options.threads)
    async with Supervisor(_report, _log) as supervisor:
        yield (await start_stack(supervisor, stack)).gateway


def _report(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _log(name: str, line: str) -> None:
    print(f"{name}: {line}", file=sys.stderr)
