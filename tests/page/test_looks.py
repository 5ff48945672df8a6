"""Whether everybody can use the page: axe-core in light and dark, narrow windows, the keyboard alone."""

import pytest
from axe_playwright_python.async_playwright import Axe
from page.browser import ended, fill, visit
from playwright.async_api import Browser, Page, expect
from support.stack import HaltedTarget, RunningStack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]


async def shown(page: Page) -> None:
    """A race with rejected guesses and a chosen token, so that nearly everything that the page has is on it."""
    await fill(page, prompt="Once upon a time", seed=4, max_tokens=48)
    await page.locator("#show-rejected").check()
    await page.locator("#race").click()
    await ended(page)
    await page.locator("#generate").click()
    await ended(page)
    await page.locator("#lane-main .t").first.click()


async def check(page: Page) -> None:
    """Fails about what axe-core calls serious or critical."""
    results = await Axe().run(page)
    found = [each for each in results.response["violations"] if each["impact"] in {"serious", "critical"}]
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_has_no_serious_finding(browser: Browser, stack: RunningStack, scheme: str) -> None:
    """Empty, with an answer, in a race, and with the dialog open."""
    # Without motion, because a colour on its way to another is neither.
    async with visit(browser, stack.gateway.rest_address, color_scheme=scheme, reduced_motion="reduce") as page:
        await check(page)
        await shown(page)
        await check(page)
        await page.locator("#race").click()
        await ended(page)
        await check(page)
        await page.locator("#copy-as").click()
        await check(page)


@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_nothing_scrolls_sideways(browser: Browser, stack: RunningStack, width: int) -> None:
    """Not even with a word that is wider than the window."""
    async with visit(browser, stack.gateway.rest_address, viewport={"width": width, "height": 740}) as page:
        await shown(page)
        await fill(page, prompt="Rumpelstiltskin" * 12, max_tokens=8)
        await page.locator("#race").click()
        await ended(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [360, 800])
async def test_in_one_column_the_answer_comes_into_sight(browser: Browser, stack: RunningStack, width: int) -> None:
    """And the button that stops it is there, whatever is scrolled."""
    async with visit(browser, stack.gateway.rest_address, viewport={"width": width, "height": 740}) as page:
        await fill(page, prompt="Once upon a time", seed=4, max_tokens=2000)
        halted = HaltedTarget(stack, 12)
        await page.locator("#generate").click()
        await expect(page.locator("#lane-main .t").first).to_be_in_viewport()
        await expect(page.locator("#stop")).to_be_in_viewport(ratio=1)
        await page.locator("#stop").click()
        await ended(page)
        halted.let_go()


async def test_every_stop_of_the_tab_key_is_seen(page: Page) -> None:
    """From the skip link through the form to the answer and the rounds, each with an outline, and round again."""
    seen: list[str] = []
    for _ in range(60):
        await page.keyboard.press("Tab")
        name, outline = await page.evaluate(
            "(() => { const a = document.activeElement, s = getComputedStyle(a);"
            " return [a.id || a.className || a.tagName, s.outlineStyle + ' ' + s.outlineWidth]; })()"
        )
        if name == "BODY":
            break
        seen.append(name)
        assert outline == "solid 2px", name
    assert seen[0] == "skip"
    assert {"prompt", "generate", "race", "stop", "draft_count", "rule", "seed", "copy-as", "show-rejected"} <= set(
        seen
    )
    assert {"stream", "rounds"} <= set(seen)


async def test_motion_is_left_out_where_it_is_not_wanted(browser: Browser, stack: RunningStack) -> None:
    """With reduced motion nothing has a transition."""
    async with visit(browser, stack.gateway.rest_address, reduced_motion="reduce") as page:
        assert (
            await page.locator("#generate").evaluate("(button) => getComputedStyle(button).transitionDuration") == "0s"
        )
