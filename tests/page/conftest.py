"""One stack with the page and one browser for the tests of a module."""

from collections.abc import AsyncIterator

import pytest_asyncio
from page.browser import chromium, visit
from playwright.async_api import Browser, Page
from support.stack import RunningStack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, for all tests of the page."""
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(browser: Browser) -> AsyncIterator[RunningStack]:
    """The real services with the embedded pair, not started where there is no browser."""
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0"}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, stack: RunningStack) -> AsyncIterator[Page]:
    """The page in a window as wide as a desk."""
    async with visit(browser, stack.gateway.rest_address, viewport={"width": 1280, "height": 900}) as opened:
        yield opened
