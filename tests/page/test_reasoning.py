"""The page shows what a model thought, folded up above its answer."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from page.browser import ended, fill, spoken, visit
from playwright.async_api import Browser, Page, expect
from support.services.reciting import RecitingStack, reciting_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

ANSWER = "<think>\nRome, then.\n</think>\n\nAll roads lead there."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reciter(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """A target that thinks first."""
    async with reciting_stack(tmp_path_factory.mktemp("reciter"), lambda _: ANSWER, [ANSWER]) as running:
        running.target.numbered = True
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, reciter: RecitingStack) -> AsyncIterator[Page]:
    """The page in a window as wide as a desk."""
    window = {"width": 1280, "height": 900}
    async with visit(browser, reciter.gateway.rest_address, viewport=window) as opened:
        await fill(opened, seed=5, max_tokens=64, draft_count=4, temperature=0.7)
        yield opened


async def test_reasoning_is_folded_up_above_the_answer(page: Page) -> None:
    """Both while it is the newest answer and when another one follows; tokens are those of the answer."""
    for number in (1, 2):
        await page.locator("#message").fill("Where do roads lead?")
        await page.keyboard.press("Enter")
        await ended(page)
        thoughts = page.locator(".thought")
        await expect(thoughts).to_have_count(number)
        await expect(thoughts.last.locator("p")).to_be_hidden()
        await thoughts.last.locator("summary").click()
        await expect(thoughts.last.locator("p")).to_have_text("Rome, then.")
        await page.locator("#show-rendered").uncheck()
        assert await spoken(page) == "All roads lead there."
        await page.locator("#show-rendered").check()
