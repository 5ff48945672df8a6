"""A gateway that asks for keys: the page asks its user once, keeps the key for the session, and shows it nowhere."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from page.browser import ended, fill, say
from playwright.async_api import Browser, Page, expect
from support.keys import key_of, write_keys
from support.stack import RunningStack, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """A stack that lets one name in."""
    assert browser
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", alice={})
    async with running_stack(draft=None, gateway={"rest_listen": "127.0.0.1:0", "api_keys": path}) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, keyed: RunningStack) -> AsyncIterator[Page]:
    """The page in a session of its own; not watched, because the browser writes every 401 to its console."""
    context = await browser.new_context()
    opened = await context.new_page()
    await opened.goto(f"http://{keyed.gateway.rest_address}/")
    yield opened
    await context.close()


async def enter(page: Page, key: str) -> None:
    """Types a key into the dialog."""
    await page.locator("#key").fill(key)
    await page.locator("#key-dialog .primary").click()


async def test_the_key_is_asked_for_once_and_kept_for_the_session(page: Page) -> None:
    """A wrong one is said to be wrong; with the right one all calls go, also after the page was loaded again."""
    dialog = page.locator("#key-dialog")
    await expect(dialog).to_be_visible()
    await expect(page.locator("#key-wrong")).to_be_hidden()
    await enter(page, "sk-wrong")
    await expect(page.locator("#key-wrong")).to_be_visible()
    await enter(page, key_of("alice"))
    await expect(page.locator("[data-service=gateway]")).to_have_attribute("data-state", "up")
    await expect(dialog).to_be_hidden()
    await page.reload()
    await expect(page.locator("[data-service=gateway]")).to_have_attribute("data-state", "up")
    await fill(page, prompt="Once upon a time", max_tokens=8, seed=1)
    await page.locator("#generate").click()
    assert (await ended(page)).startswith("Done: 8 tokens")
    await expect(dialog).to_be_hidden()


async def test_the_key_is_in_no_code_and_no_link(page: Page) -> None:
    """Code takes it from the environment; nothing that outlives the session has it."""
    await enter(page, key_of("alice"))
    await expect(page.locator("[data-service=gateway]")).to_have_attribute("data-state", "up")
    await page.locator("#copy-as").click()
    for language in ("curl", "openai", "outrider", "grpcurl"):
        await page.locator("#language").select_option(language)
        await expect(page.locator("#snippet")).to_contain_text("OUTRIDER_API_KEY")
    await page.locator("#snippet-close").click()
    await page.locator("#copy-link").click()
    shown = await page.content() + page.url + str(await page.evaluate("JSON.stringify(localStorage) + document.cookie"))
    await page.get_by_role("radio", name="Chat").check()
    await fill(page, max_tokens=4)
    await say(page, "Who?")
    async with page.expect_download() as downloading:
        await page.get_by_role("button", name="Export all").click()
    shown += await asyncio.to_thread((await (await downloading.value).path()).read_text)
    assert "Who?" in shown
    assert key_of("alice") not in shown


async def test_who_has_no_key_is_left_alone_until_they_ask(page: Page) -> None:
    """The page says what is missing, and asks again when its user wants an answer."""
    dialog = page.locator("#key-dialog")
    await expect(dialog).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("#banner")).to_contain_text("answers nobody without a key")
    # The next look at the status, two seconds later, asks for nothing.
    async with page.expect_response("**/page/status") as refused:
        pass
    assert (await refused.value).status == 401
    await expect(dialog).to_be_hidden()
    await fill(page, prompt="Once upon a time", max_tokens=8, seed=1)
    await page.locator("#generate").click()
    await expect(dialog).to_be_visible()
    await enter(page, key_of("alice"))
    assert (await ended(page)).startswith("Done: 8 tokens")


async def test_who_still_has_no_key_reads_why_there_is_no_answer(page: Page) -> None:
    """The gateway's own sentence."""
    await page.get_by_role("button", name="Not now").click()
    await expect(page.locator("#banner")).to_be_visible()
    await page.locator("#generate").click()
    await page.get_by_role("button", name="Not now").click()
    await expect(page.locator("#failure")).to_contain_text("No API key came")
