"""One gateway with REST over the tiny services for the tests of a module, and a client of it."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from support.services.markov_services import MarkovStack, markov_stack, write_tokenizer

ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of twelve words."""
    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def markov(words: str) -> AsyncIterator[MarkovStack]:
    """Four samples run and one request waits at a time."""
    options = {"rest_listen": "127.0.0.1:0", "max_requests": 4, "max_queue": 1, "cors_origins": ORIGIN}
    async with markov_stack(words, **options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(markov: MarkovStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows nothing of the protocol."""
    async with httpx.AsyncClient(base_url=f"http://{markov.gateway.rest_address}", timeout=60) as client:
        yield client
