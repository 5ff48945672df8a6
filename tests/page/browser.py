"""The page in a real browser, watched: whatever it complains about fails the test that opened it.

    async with chromium() as browser, visit(browser, address) as page:
        await page.click("#generate")

The content policy also holds for the tests: they may evaluate expressions once, but not let the page poll for them.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request, async_playwright, expect

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
ENDED = re.compile("Done|Stopped|broke off|No answer|Identical|same this time|Differs|No result")
# A violation is reported to the document; the console then reports it to us, whatever the browser itself would print.
WATCH = """document.addEventListener("securitypolicyviolation", (event) =>
    console.error(`content policy: ${event.violatedDirective} ${event.blockedURI}`))"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser; the test is skipped where there is none."""
    if not await asyncio.to_thread(CHROMIUM.exists):
        pytest.skip(f"THE PAGE IS NOT TESTED: there is no {CHROMIUM}; Debian has it in the package chromium")
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def visit(browser: Browser, address: str, fragment: str = "", **options: Any) -> AsyncIterator[Page]:
    """The page, open, in a context of its own. At the end its console must be empty and no script have failed."""
    context = await browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = await context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        await page.add_init_script(WATCH)
        await page.goto(f"http://{address}/{fragment}")
        # Which view it shows, the page learns from the gateway.
        await expect(page.locator("main")).to_be_visible()
        yield page
        assert complaints == []
    finally:
        await context.close()


def sent(page: Page) -> list[dict[str, Any]]:
    """The bodies of all requests for answers from here on."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/page/generate"):
            bodies.append(json.loads(request.post_data or "{}"))

    page.on("request", note)
    return bodies


async def fill(page: Page, **values: str | int | float) -> None:
    """Fills in the form, by the names of its fields."""
    for name, value in values.items():
        field = page.locator(f"#{name}")
        if await field.evaluate("field => field.tagName") == "SELECT":
            await field.select_option(str(value))
        else:
            await field.fill(str(value))


async def ended(page: Page) -> str:
    """Waits until a run or race is over, and gives what is said of it."""
    await expect(page.locator("#announce")).to_contain_text(ENDED, timeout=PATIENCE_MS)
    return await page.locator("#announce").inner_text()


async def spoken(page: Page, lane: str = "lane-main") -> str:
    """The text of a lane's tokens, joined."""
    return "".join(await page.locator(f"#{lane} .stream .t").all_text_contents())


async def number(page: Page, selector: str) -> int:
    """A whole number that the page shows."""
    return int((await page.locator(selector).inner_text()).replace(",", ""))


async def say(page: Page, message: str) -> None:
    """Sends a message of a conversation by keyboard, and waits for its answer."""
    await page.locator("#message").fill(message)
    await page.keyboard.press("Enter")
    await ended(page)
