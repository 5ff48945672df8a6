"""Why a round had so many guesses: what the page says of one that is asked about."""

import re

import pytest
from page.browser import ended, fill, visit
from page.test_looks import check
from playwright.async_api import Browser, Page, expect
from support.stack import after_the_draft, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]


async def ask(page: Page, draft_count: str) -> None:
    """An answer with so many guesses a round."""
    await fill(page, prompt="Once upon a time", seed=4, max_tokens=64, draft_count=draft_count)
    await page.locator("#generate").click()
    assert (await ended(page)).startswith("Done")


async def test_a_round_says_why_and_what_was_compared(page: Page) -> None:
    """By keyboard: the reason, and a row for plain decoding and for each number of guesses; a second time closes it."""
    for _ in range(3):
        # The first answers are those that find out what guesses cost.
        await ask(page, "auto")
    await expect(page.locator("#rounds li").first.locator("button")).to_have_count(0)
    row = page.locator("#rounds li").nth(1)
    await row.locator("button.number").focus()
    await page.keyboard.press("Enter")
    reason = await row.locator("button").get_attribute("title") or "none"
    await expect(row.locator(".because p")).to_contain_text(reason)
    # Of the embedded draft: plain decoding and eight numbers of guesses.
    heads = await row.locator("th").all_text_contents()
    assert heads == ["drafter", "guesses", "tokens a round", "round takes", "tokens/s"]
    assert await row.locator("tbody tr").count() >= 9
    await expect(row.locator("button")).to_have_attribute("aria-expanded", "true")
    await check(page)
    await page.keyboard.press("Enter")
    await expect(row.locator(".because")).to_have_count(0)


async def test_a_number_that_the_request_gives_needs_no_table(page: Page) -> None:
    """Its reason is all that there is to say; the facts of a token say it, too."""
    await ask(page, "4")
    row = page.locator("#rounds li").nth(1)
    await row.locator("button.number").click()
    await expect(row.locator(".because")).to_contain_text("The request itself names the number of guesses.")
    await expect(row.locator("table")).to_have_count(0)
    await page.locator("#lane-main .t").last.click()
    await expect(page.locator("#facts dt:text-is('Why so many') + dd")).to_contain_text("The request itself")


async def test_the_policy_says_why_it_would_choose_so(page: Page) -> None:
    """The word in the head of the page has the reason as its title."""
    await expect(page.locator('[data-service="policy"]')).to_have_attribute("title", re.compile(r"^[A-Z].*\.$"))


async def test_a_round_says_what_came_of_branches(browser: Browser) -> None:
    """In its row, and among the facts of its tokens, where a gateway's draft runs ahead."""
    async with running_stack(gateway={"branches": 16, "lookup": False, "rest_listen": "127.0.0.1:0"}) as stack:
        assert stack.gateway is not None
        after_the_draft(stack)
        async with visit(browser, stack.gateway.rest_address) as page:
            await ask(page, "4")
            said = await page.locator("#rounds .said .why").all_text_contents()
            assert " begun ahead" in said
            assert set(said) <= {" begun ahead", " no branch fitted", " branches came late"}
            # Of which round a token is depends on the machine; each says what is true of its own.
            facts, found = page.locator("#facts dt:text-is('Run-ahead') + dd"), set[str]()
            for token in await page.locator("#lane-main .t").all():
                await token.click()
                found |= set(await facts.all_text_contents())
            assert found == {each.strip() for each in said if each}
            await check(page)
