"""What the page shows when things go away: the draft in the middle of an answer, the user, the settings' sense."""

import re

import pytest
from page.browser import PATIENCE_MS, ended, fill, spoken, visit
from playwright.async_api import Browser, Page, Request, expect
from support.stack import DRAFT, HaltedTarget, RunningStack, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "Once upon a time"


async def begin(page: Page, max_tokens: int) -> None:
    """Starts a long answer and waits for its first tokens."""
    await fill(page, prompt=PROMPT, seed=2, max_tokens=max_tokens, temperature=0.7)
    await page.locator("#generate").click()
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()


async def test_a_killed_draft_is_a_banner_and_not_an_error(page: Page, stack: RunningStack) -> None:
    """The answer goes on plainly with the same tokens; the banner comes, and goes when the draft is back."""
    await expect(page.locator("#banner")).to_be_hidden()
    halted = HaltedTarget(stack, 8)
    await begin(page, 1500)
    await halted.make()
    await stack.stop_draft()
    halted.let_go()
    await expect(page.locator("#banner")).to_contain_text("Degraded: the draft is away", timeout=PATIENCE_MS)
    await expect(page.locator("[data-service=draft]")).to_have_attribute("data-state", "away")
    assert (await ended(page)).startswith("Done")
    await expect(page.locator("#failure")).to_be_hidden()
    plain = await stack.generate(text=PROMPT, seed=2, max_tokens=1500, temperature=0.7, enabled=False)
    assert await spoken(page) == plain.text
    assert await page.locator("#lane-main .t.plain").count() > await page.locator("#lane-main .t.accepted").count()
    await stack.start_draft()
    await expect(page.locator("#banner")).to_be_hidden(timeout=PATIENCE_MS)


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_a_stopped_answer_frees_everything(page: Page, stack: RunningStack, way: str) -> None:
    """Stop and Esc end the stream; the text stays, and both services come to rest."""
    halted = HaltedTarget(stack, 8)
    await begin(page, 4000)
    await halted.make()
    await (page.locator("#stop").click() if way == "button" else page.keyboard.press("Escape"))
    assert (await ended(page)).startswith("Stopped after")
    await expect(page.locator("#stop")).to_have_attribute("aria-disabled", "true")
    assert await spoken(page) != ""
    await expect(page.locator("#result")).to_have_text(re.compile(r"^Stopped after [\d,]+ tokens\. Seed 2\.$"))
    await stack.quiet()
    halted.let_go()


async def test_a_request_that_cannot_be_is_told_in_one_sentence(browser: Browser, stack: RunningStack) -> None:
    """The gateway's own sentence is shown; nothing else happens."""
    # The browser itself writes every answer of 400 to its console, so this visit is not watched to its end.
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"http://{stack.gateway.rest_address}/")
    await fill(page, prompt=PROMPT, max_tokens=100_000)
    await page.locator("#generate").click()
    await expect(page.locator("#failure")).to_contain_text(
        "max_tokens 100000 do not fit into the context of 4096 tokens"
    )
    assert await ended(page) == "No answer came."
    await expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    await context.close()


async def test_a_gateway_out_of_reach_is_told_in_one_sentence(browser: Browser, stack: RunningStack) -> None:
    """Not in the browser's own two words, which say neither what happened nor what to do."""
    # Not watched: the browser writes every connection that fails to its console.
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"http://{stack.gateway.rest_address}/")
    await page.route("**/page/generate", lambda route: route.abort("connectionrefused"))
    await page.locator("#generate").click()
    await expect(page.locator("#failure")).to_contain_text("The gateway cannot be reached. Start it again")
    await context.close()


async def test_a_gateway_lost_in_mid_answer_is_told_in_one_sentence(browser: Browser) -> None:
    """What was said stays, and the seed that gives it again stands below."""
    context = await browser.new_context()
    async with running_stack(draft=None, gateway={"rest_listen": "127.0.0.1:0"}) as stack:
        page = await context.new_page()
        await page.goto(f"http://{stack.gateway.rest_address}/")
        HaltedTarget(stack, 8)
        await begin(page, 4000)
        await context.set_offline(True)
        await stack.gateway.stop(0)
        assert await ended(page) == "The answer broke off."
        await expect(page.locator("#failure")).to_contain_text("The gateway was lost in mid-answer")
        await expect(page.locator("#result")).to_contain_text("Seed 2.")
    await context.close()


async def test_a_link_means_the_same_wherever_it_is_opened(page: Page) -> None:
    """What it does not name is as on a fresh page, and a fragment that is no link changes nothing."""
    await fill(page, prompt="Mine", seed=7, rule="ratio", stop_strings="the")
    await page.evaluate("location.hash = '#answer'")
    await expect(page.locator("#prompt")).to_have_value("Mine")
    await page.evaluate("location.hash = '#prompt=Yours'")
    await expect(page.locator("#prompt")).to_have_value("Yours")
    await expect(page.locator("#seed")).to_have_value("")
    await expect(page.locator("#rule")).to_have_value("match")
    await expect(page.locator("#stop_strings")).to_have_value("")


async def test_a_lost_target_breaks_the_answer_off_in_one_sentence(browser: Browser) -> None:
    """What was said stays, the gateway's sentence stands below it, and the banner says who is away."""
    patience = {"rest_listen": "127.0.0.1:0", "rebuild_budget_seconds": 0.3}
    async with running_stack(draft=None, gateway=patience) as stack, visit(browser, stack.gateway.rest_address) as page:
        await expect(page.locator("#banner")).to_contain_text("No draft is configured")
        HaltedTarget(stack, 8)
        await begin(page, 4000)
        await stack.target.stop(0)
        stack.target = None
        assert await ended(page) == "The answer broke off."
        await expect(page.locator("#failure")).to_contain_text("cannot be reached")
        assert await spoken(page) != ""
        await expect(page.locator("#banner")).to_contain_text("The target is away")


async def test_a_draft_in_the_target_is_a_draft(browser: Browser) -> None:
    """Without a draft service the page says where the guesses come from, and marks them as any others."""
    async with (
        running_stack(
            draft=None, gateway={"rest_listen": "127.0.0.1:0"}, target_options={"draft_model": DRAFT}
        ) as stack,
        visit(browser, stack.gateway.rest_address) as page,
    ):
        await expect(page.locator('[data-service="draft"] b')).to_have_text("in the target")
        await expect(page.locator("#banner")).to_be_hidden()
        await fill(page, draft_count="4")
        await begin(page, 48)
        assert (await ended(page)).startswith("Done: 48 tokens")
        assert await page.locator("#lane-main .t.accepted").count() > 8
        await page.locator("#lane-main .t.accepted").first.click()
        await expect(page.locator("#facts")).to_contain_text("the draft in the target's process")


async def test_a_link_fills_the_form_and_runs_nothing(browser: Browser, stack: RunningStack) -> None:
    """The settings travel in the fragment; only a person generates."""
    async with visit(browser, stack.gateway.rest_address, permissions=["clipboard-read", "clipboard-write"]) as page:
        await fill(page, prompt="The fox & the wolf #1", seed=9_007_199_254_740_993, draft_count="auto", rule="block")
        await page.locator("#copy-link").click()
        await expect(page.locator("#copy-link")).to_have_text("Copied")
        link = str(await page.evaluate("navigator.clipboard.readText()"))
        other = await page.context.new_page()
        asked: list[str] = []

        def note(request: Request) -> None:
            asked.append(request.url)

        other.on("request", note)
        await other.goto(link)
        await expect(other.locator("[data-service=gateway]")).to_have_attribute("data-state", "up")
        assert await other.locator("#prompt").input_value() == "The fox & the wolf #1"
        assert await other.locator("#seed").input_value() == "9007199254740993"
        assert await other.locator("#draft_count").input_value() == "auto"
        assert await other.locator("#rule").input_value() == "block"
        assert not [url for url in asked if "generate" in url]
