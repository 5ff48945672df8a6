"""What the page shows of one answer: tokens by origin, facts, rounds, charts and figures."""

import json
import re

import pytest
from page.browser import ended, fill, number, spoken
from playwright.async_api import Page, Route, expect
from support.stack import HaltedTarget, RunningStack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "The fox said to the wolf,"
GOLD = "one thousand pieces of gold, and half of the kingdom as long as the old king lives"
SCHEMA = {
    "type": "object",
    "properties": {"daughter": {"enum": ["princess"]}, "gold": {"enum": [GOLD]}},
    "required": ["daughter", "gold"],
    "additionalProperties": False,
}
ORIGINS = ("accepted", "correction", "bonus", "plain")


async def ask(page: Page, **values: str | int | float) -> None:
    """Types a prompt and generates by keyboard."""
    await fill(page, **{"prompt": PROMPT, "seed": 5, "max_tokens": 64, "draft_count": 4, **values})
    await page.locator("#prompt").press("Control+Enter")


async def test_tokens_arrive_and_are_those_of_the_gateway(page: Page, stack: RunningStack) -> None:
    """Tokens come while the answer is under way, and the text is what gRPC gives for the same request."""
    await ask(page, max_tokens=600, temperature=0.8)
    await expect(page.locator("#lane-main .t").nth(3)).to_be_visible()
    await expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    assert (await ended(page)).startswith("Done")
    answer = await stack.generate(text=PROMPT, seed=5, max_tokens=600, temperature=0.8, draft_count=4)
    assert await spoken(page) == answer.text
    assert await number(page, "[data-figure=tokens]") == len(answer.token_ids)


async def test_legend_and_figures_add_up(page: Page, stack: RunningStack) -> None:
    """The legend counts every token once, each is marked as its origin, and the figures are the gateway's."""
    await ask(page, temperature=0)
    await ended(page)
    for origin in ORIGINS:
        assert await page.locator(f"#lane-main .t.{origin}").count() == await number(page, f"[data-count={origin}]")
    assert sum([await number(page, f"[data-count={origin}]") for origin in ORIGINS]) == 64
    answer = await stack.generate(text=PROMPT, seed=5, max_tokens=64, temperature=0.0, draft_count=4)
    told = answer.completion.speculation
    assert await number(page, "[data-figure=passes]") == told.rounds
    assert await number(page, "[data-count=accepted]") == told.accepted_tokens
    assert await page.locator("[data-figure=length]").inner_text() == f"{1 + told.accepted_tokens / told.rounds:.2f}"
    rate = f"{told.acceptance_rate:.0%}".replace("%", " %")
    assert await page.locator("[data-figure=alpha]").inner_text() == rate


async def test_origins_differ_in_shape(page: Page) -> None:
    """Without any colour the four origins would still look different."""
    await page.goto(page.url)
    shapes = [
        await page.locator(f"#legend .t.{origin}").evaluate(
            "(mark) => { const s = getComputedStyle(mark);"
            " return [s.textDecorationLine, s.textDecorationStyle, s.textDecorationThickness].join(' '); }"
        )
        for origin in ORIGINS
    ]
    assert len(set(shapes)) == len(ORIGINS), shapes


async def test_a_forced_token_names_the_grammar(page: Page, stack: RunningStack) -> None:
    """In its round and among its facts. The page asks for no shape itself, so its request is given one on the way."""

    async def shape(route: Route) -> None:
        body = {**route.request.post_data_json, "structured_outputs": {"json": SCHEMA}}
        await route.continue_(post_data=json.dumps(body))

    await page.route("**/page/generate", shape)
    # The target would go on by itself before it is asked to wait for guesses: it makes a forward when the page shows
    # what came of the one before.
    halted, shown = HaltedTarget(stack, 1), page.locator("#lane-main .t")
    await ask(page, temperature=0, drafter="lookup", draft_count=8)
    num_shown = 0
    for _ in range(3):
        await expect(shown.nth(num_shown)).to_be_visible()
        num_shown = await shown.count()
        await halted.make(1)
    halted.let_go()
    await ended(page)
    await page.unroute("**/page/generate")
    forced = page.locator("#rounds .t.accepted[title='guessed by the grammar, which allows nothing else there']")
    texts = [re.sub("[^a-z]", "", text) for text in await forced.all_text_contents()]
    assert len(texts) >= 4
    assert all(text in re.sub("[^a-z]", "", json.dumps(SCHEMA)) for text in texts), texts
    told = page.locator("#facts dt:text-is('Guessed by') + dd")
    first = page.locator("#lane-main .t.accepted").first
    await first.click()
    await expect(told).to_have_text("the grammar, which allows nothing else there")


async def test_facts_by_keyboard_and_by_pointer(page: Page) -> None:
    """Arrow keys walk through the tokens; a box and the panel show where a token comes from and how probable it was."""
    await ask(page, temperature=0)
    await ended(page)
    await page.locator("#lane-main .stream").focus()
    await page.keyboard.press("End")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#tip")).to_be_visible()
    await expect(page.locator("#facts")).to_contain_text("Position")
    await expect(page.locator("#lane-main .t.here")).to_have_count(1)
    await page.keyboard.press("Escape")
    await expect(page.locator("#tip")).to_be_hidden()
    await page.locator("#lane-main .t.accepted").first.click()
    await expect(page.locator("#facts")).to_contain_text("the target agreed")
    assert "not" not in await page.locator("#facts dt:text-is('Draft probability') + dd").inner_text()
    assert "not" not in await page.locator("#facts dt:text-is('Target probability') + dd").inner_text()


async def test_rejected_guesses_on_demand(page: Page) -> None:
    """Guesses that were not kept are struck through, and only shown when they are asked for."""
    await ask(page)
    await ended(page)
    struck = page.locator("#lane-main .stream s.rejected")
    assert await struck.count() == await number(page, "[data-count=rejected]") > 0
    await expect(struck.first).to_be_hidden()
    await page.locator("#show-rejected").check()
    await expect(struck.first).to_be_visible()


async def test_rounds_and_charts(page: Page) -> None:
    """One row a pass of the target, one bar a guessed place, and shares of time that add up to the whole."""
    await ask(page)
    await ended(page)
    assert await page.locator("#rounds li").count() == 1 + await number(page, "[data-figure=passes]")
    assert await page.locator("#rounds .pips[role=img]").count() > 0
    assert await page.locator("#positions li").count() == 4
    shares = await page.locator("#positions .number").all_inner_texts()
    assert sum(int(share.split(" of ")[0]) for share in shares) == await number(page, "[data-count=accepted]")
    times = await page.locator("#times dd").all_inner_texts()
    assert sum(int(each.split(", ")[1].removesuffix(" %")) for each in times) in {99, 100, 101}
    await expect(page.locator("#counts-range")).to_contain_text("over the last")
    assert (await page.locator("#counts .asked").get_attribute("d") or "").startswith("M0 ")


async def test_a_prompt_turns_no_writing_but_its_own(page: Page) -> None:
    """A mark that turns the direction of writing ends with the prompt: the answer is read from left to right."""
    await ask(page, prompt="The fox \u202esaid to the wolf,", temperature=0, max_tokens=8)
    await ended(page)
    boxes = [await page.locator("#lane-main .t").nth(place).bounding_box() for place in (0, 1)]
    assert boxes[0]
    assert boxes[1]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]


async def test_markup_of_a_model_stays_text(page: Page) -> None:
    """What looks like markup in a prompt is shown letter by letter."""
    await ask(page, prompt="<img src=x onerror=alert(1)><b>fox</b> and", max_tokens=8)
    await ended(page)
    await expect(page.locator("#lane-main .asked")).to_have_text("<img src=x onerror=alert(1)><b>fox</b> and")
    assert await page.locator("#lane-main img, #lane-main b").count() == 0
