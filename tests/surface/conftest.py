"""A stack that a file's tests share, and OpenAI's client of it. A test's loop has to be the module's, as theirs is."""

from collections.abc import AsyncIterator

import pytest_asyncio
from openai import AsyncOpenAI
from support.rest.rest_stack import RestStack, rest_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rest() -> AsyncIterator[RestStack]:
    """One stack for all of a file that need nothing special."""
    async with rest_stack() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(rest: RestStack) -> AsyncIterator[AsyncOpenAI]:
    """A client that does not ask twice."""
    async with AsyncOpenAI(base_url=rest.base_url, api_key="none", max_retries=0) as connected:
        yield connected
