"""Writes docs/images/page-{light,dark,360}.png again, from a real stack, and with the folder of a model that has a chat
template docs/images/chat-{light,dark,360}.png.

The draft is the embedded one, the target says what the embedded one says, at the cost of 200 million parameters. A
conversation is with SmolLM2-135M-Instruct, whose head and draft are the shipped ones.

.venv/bin/python tests/page/screenshots.py [FOLDER]
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from page.browser import chromium, ended, fill, visit
from playwright.async_api import Page
from support.stack import MODELS, running_stack
from support.stack import TARGET as TOKENIZER

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


QUESTION = "Write a Python function that tells whether a word is a palindrome."
REPETITION = "Now write the same function again, with a docstring, and two examples of its use as a list."


async def conversation(page: Page) -> None:
    """Two answers, the second of which repeats much of the first."""
    await fill(page, temperature=0, draft_count="auto", max_tokens=220)
    for message in (QUESTION, REPETITION):
        await page.locator("#message").fill(message)
        await page.keyboard.press("Enter")
        await ended(page)


async def conversation_race(page: Page) -> None:
    """Shows a conversation, and its last turn with and without speculation."""
    await conversation(page)
    await page.locator("#race-turn").click()
    await ended(page)


Act = Callable[[Page], Awaitable[None]]


async def take(names: str, acts: tuple[Act, Act, Act], *, whole: bool, **options: Any) -> None:
    """Takes the three pictures of a stack: light, dark and narrow, of the whole page or of a window."""
    async with running_stack(**options) as stack, chromium() as browser:
        for name, width, act in zip(("light", "dark", "360"), (1280, 1280, 360), acts, strict=True):
            scheme = "dark" if name == "dark" else "light"
            window = {"width": width, "height": 900}
            async with visit(browser, stack.gateway.rest_address, color_scheme=scheme, viewport=window) as page:
                await fill(page, seed=SEED, max_tokens=120)
                await act(page)
                if whole:
                    # A window as high as the page, so that nothing is left out because it is out of sight.
                    height = int(await page.evaluate("document.documentElement.scrollHeight"))
                    await page.set_viewport_size({"width": width, "height": height})
                    await page.locator("#rounds").scroll_into_view_if_needed()
                await page.screenshot(path=IMAGES / f"{names}-{name}.png")


async def main() -> None:
    """Takes all pictures, or with a folder those of conversations."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    rest = {"rest_listen": "127.0.0.1:0"}
    if len(sys.argv) > 1:
        folder = sys.argv[1]
        acts = (conversation, conversation_race, conversation)
        drafts = MODELS / "smollm2"
        options = {"draft": str(drafts / "draft"), "target_options": {"head": str(drafts / "head")}}
        await take("chat", acts, whole=False, target=folder, threads=2, gateway=rest, **options)
    else:
        gateway = {**rest, "tokenizer": TOKENIZER}
        await take("page", (answer, race, answer), whole=True, target=TARGET, gateway=gateway)


if __name__ == "__main__":
    asyncio.run(main())
