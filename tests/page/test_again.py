"""Before an answer and after a bad one: what it waits for, another answer, and the same request once more."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from page.browser import ended, fill, say, sent, spoken, visit
from playwright.async_api import Browser, Page, expect
from support.models.templated import templated
from support.stack import HaltedTarget, RunningStack, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

# Everything that is said of an answer that has no token yet, in order.
WATCH = """addEventListener("DOMContentLoaded", () => {
    window.life = [];
    const line = document.querySelector("#lane-main .life");
    new MutationObserver(() => window.life.push(line.textContent)).observe(line, {childList: true});
})"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """The embedded pair with a chat template, one place, and little patience with a target that is away."""
    tokenizer = templated(tmp_path_factory.mktemp("templated"))
    gateway = {"rest_listen": "127.0.0.1:0", "tokenizer": tokenizer, "max_requests": 1, "rebuild_budget_seconds": 0.3}
    async with running_stack(gateway=gateway) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, stack: RunningStack) -> AsyncIterator[Page]:
    """The page in a window as wide as a desk."""
    async with visit(browser, stack.gateway.rest_address, viewport={"width": 1280, "height": 900}) as opened:
        await fill(opened, max_tokens=24, draft_count=4, temperature=0.9)
        yield opened


async def restarted(stack: RunningStack) -> None:
    """A new target, when the gateway knows it."""
    await stack.restart_target()
    assert stack.gateway
    assert await stack.gateway.backend.target.settled(30)


async def test_who_waits_sees_for_what(page: Page, stack: RunningStack) -> None:
    """The place in the queue as the gateway counts it, then the prompt that is read."""
    await page.add_init_script(WATCH)
    await page.reload()
    await fill(page, max_tokens=4)
    life = page.locator("#lane-main .life")
    halted = HaltedTarget(stack)
    assert stack.gateway
    async with stack.gateway.frontend.admission.entry():
        await page.locator("#message").fill("fox " * 1500)
        await page.keyboard.press("Enter")
        await expect(life).to_contain_text("Number 1 in the queue: the only place is taken")
        await expect(page.locator("#announce")).to_have_text("Number 1 in the queue: the only place is taken")
    await expect(life).to_contain_text("Reading the prompt of ")
    for read in ("512", "1,024"):
        await halted.make(1)
        await expect(life).to_contain_text(f"{read} of ")
    halted.let_go()
    assert (await ended(page)).startswith("Done: 4 tokens")
    await expect(life).to_be_hidden()
    told = [line.split(" · ")[0] for line in await page.evaluate("window.life")]
    order = [line for number, line in enumerate(told) if line and told[number - 1 : number] != [line]]
    prompt = (await page.locator("#result").inner_text()).split(" prompt tokens")[0].split(" · ")[-1]
    queued = order.index("Number 1 in the queue: the only place is taken")
    assert order[queued + 1] == f"Reading the prompt of {prompt} tokens"
    behind = f" of {prompt} tokens of the prompt read"
    read_so_far = [int(line.removesuffix(behind).replace(",", "")) for line in order[queued + 2 :]]
    assert read_so_far[:2] == [512, 1024]
    assert read_so_far == sorted({*read_so_far})


async def test_another_answer_comes_from_a_new_seed(page: Page) -> None:
    """Also where the form fixes one; it takes the old one's place, and the next message follows it."""
    bodies = sent(page)
    await fill(page, seed=5)
    await say(page, "Who is the fox?")
    first = await spoken(page)
    await page.locator("#regenerate").click()
    assert (await ended(page)).startswith("Done")
    second = await spoken(page)
    assert second != first
    assert [each.get("seed") for each in bodies] == ["5", None]
    assert bodies[1]["messages"] == bodies[0]["messages"]
    await page.locator("#show-rendered").uncheck()
    whole = await spoken(page)
    await say(page, "And the wolf?")
    assert [each["content"] for each in bodies[2]["messages"]] == ["Who is the fox?", whole, "And the wolf?"]


async def test_an_answer_that_broke_off_comes_whole_from_the_same_seed(page: Page, stack: RunningStack) -> None:
    """What there was begins it. One that breaks off in another's place leaves that where it was."""
    bodies = sent(page)
    await fill(page, max_tokens=3000, seed=7)
    HaltedTarget(stack, 8)
    await page.locator("#message").fill("Tell me all.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await stack.target.stop(0)
    assert await ended(page) == "The answer broke off."
    await page.locator("#show-rendered").uncheck()
    begun = await spoken(page)
    await expect(page.locator("#failure")).to_contain_text("cannot be reached")
    await restarted(stack)
    await fill(page, max_tokens=len(begun), seed="")
    await page.get_by_role("button", name="Try again").click()
    assert (await ended(page)).startswith("Done")
    assert bodies[1]["seed"] == "7"
    whole = await spoken(page)
    assert whole.startswith(begun)
    await expect(page.locator("#failure")).to_be_hidden()
    await fill(page, max_tokens=3000)
    HaltedTarget(stack, 8)
    await page.locator("#regenerate").click()
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await stack.target.stop(0)
    assert await ended(page) == "The answer broke off."
    assert "".join(await page.locator("#turns .stream .t").all_text_contents()) == whole
    await restarted(stack)


async def test_what_was_refused_is_asked_again_as_it_is_written_now(browser: Browser, stack: RunningStack) -> None:
    """In a conversation and in a completion; the field that the gateway found wrong says why until it is changed."""
    # Not watched: the browser writes every answer of 400 to its console.
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"http://{stack.gateway.rest_address}/")
    for view, field in (("Chat", "message"), ("Completion", "prompt")):
        await page.get_by_role("radio", name=view).check()
        await fill(page, max_tokens=8, top_p=0.5)
        await page.locator("#more-sampling").evaluate("(fold) => { fold.open = false; }")
        await fill(page, **{field: "Who?"})
        await page.evaluate("document.querySelector('#stop_token_ids').value = '2000000000'")
        await page.locator("#send" if view == "Chat" else "#generate").click()
        await expect(page.locator("#failure")).to_contain_text("stop_token_ids")
        await expect(page.locator("#wrong-stop_token_ids")).to_contain_text("2000000000")
        await expect(page.locator("#stop_token_ids")).to_have_attribute("aria-describedby", "wrong-stop_token_ids")
        await expect(page.locator("#stop_token_ids")).to_be_visible()
        await fill(page, stop_token_ids="")
        await expect(page.locator("#wrong-stop_token_ids")).to_have_count(0)
        await page.locator("#retry").click()
        assert (await ended(page)).startswith("Done: 8 tokens")
        await expect(page.locator("#failure")).to_be_hidden()
    await context.close()
