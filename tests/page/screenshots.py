"""Writes docs/images/page-{light,dark,360}.png again, from a real stack.

The draft is the embedded one; the target says what the embedded one says, at the cost of 200 million parameters.

.venv/bin/python tests/page/screenshots.py
"""

import asyncio
from pathlib import Path

from page.browser import chromium, ended, fill, visit
from playwright.async_api import Page
from support.stack import TARGET as TOKENIZER
from support.stack import running_stack

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TARGET = "sized:200m"
SEED = 7


async def answer(page: Page) -> None:
    """An answer with its rejected guesses, and the facts of one token."""
    await page.locator("#show-rejected").check()
    await page.locator("#generate").click()
    await ended(page)
    token = page.locator("#lane-main .t.accepted").nth(5)
    await token.click()
    await token.hover()


async def race(page: Page) -> None:
    """A race that is over."""
    await page.locator("#race").click()
    await ended(page)


async def main() -> None:
    """Takes the three pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    pictures = (("light", 1280, answer), ("dark", 1280, race), ("360", 360, answer))
    gateway = {"rest_listen": "127.0.0.1:0", "tokenizer": TOKENIZER}
    async with running_stack(TARGET, gateway=gateway) as stack, chromium() as browser:
        for name, width, act in pictures:
            scheme = "dark" if name == "dark" else "light"
            window = {"width": width, "height": 900}
            async with visit(browser, stack.gateway.rest_address, color_scheme=scheme, viewport=window) as page:
                await fill(page, seed=SEED, max_tokens=120)
                await act(page)
                # A window as high as the page, so that nothing is left out because it is out of sight.
                height = int(await page.evaluate("document.documentElement.scrollHeight"))
                await page.set_viewport_size({"width": width, "height": height})
                await page.locator("#rounds").scroll_into_view_if_needed()
                await page.screenshot(path=IMAGES / f"page-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
