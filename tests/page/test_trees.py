"""What the page shows of guesses that branch, and the drafters that it offers, over services that propose trees."""

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from page.browser import ended, fill, number, spoken, visit
from page.test_looks import check
from playwright.async_api import Browser, Page, expect
from support.services.markov_services import MarkovStack, markov_stack, write_tokenizer

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]
DEPTH = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def markov(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MarkovStack]:
    """A gateway in front of the tiny services."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("words"))
    async with markov_stack(tokenizer, rest_listen="127.0.0.1:0") as running:
        running.target.numbered = True
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, markov: MarkovStack) -> AsyncIterator[Page]:
    """The page of a gateway whose draft proposes trees."""
    markov.draft.branching = True
    async with visit(browser, markov.gateway.rest_address, viewport={"width": 1280, "height": 900}) as opened:
        yield opened


async def ask(page: Page, **values: str | int | float) -> None:
    """An answer of 24 words."""
    await fill(page, **{"prompt": "fox sea", "seed": 9, "max_tokens": 24, "draft_count": 2 * DEPTH, **values})
    await page.locator("#generate").click()
    assert (await ended(page)).startswith("Done")


async def test_a_round_opens_as_a_tree_by_keyboard(page: Page) -> None:
    """Every guess of the round is in it once, with who guessed it and its value; what was kept is one path down."""
    await ask(page, drafter="model")
    row = page.locator("#rounds li:has(> details)").nth(1)
    await expect(row.locator(".tree")).to_have_count(0)
    await row.locator("summary").focus()
    await page.keyboard.press("Enter")
    await expect(row.locator(".tree")).to_be_visible()
    await expect(row.locator("summary")).to_have_text(f"Tree of {2 * DEPTH} guesses, {DEPTH} deep")
    guesses = row.locator(".tree .guess:has(> .pips)")
    assert await guesses.count() == 2 * DEPTH
    for label in await guesses.locator("small").all_text_contents():
        name, value = label.split(" ")
        assert name == "model"
        assert 0 < float(value) < 1
    assert "guessed by model, which gave it a chance of 0." in (await guesses.first.get_attribute("title") or "")
    kept = await row.locator(".tree .t.accepted").all_text_contents()
    assert kept == await row.locator(".said .t.accepted").all_text_contents() != []
    path = row.locator(".tree > ul > li" + " > ul > li.accepted" * len(kept))
    await expect(path).to_have_count(1)
    await expect(path.locator("> ul > li > .guess > .t:not(.accepted)")).to_have_count(1)


async def test_signs_in_the_row_are_those_of_the_tree(page: Page) -> None:
    """Kept, not kept and not looked at, in the order of rows; together they are all guesses of the answer."""
    await ask(page)
    await page.locator("#show-trees").check()
    await expect(page.locator("#rounds .tree")).to_have_count(await page.locator("#rounds details").count())
    everywhere = ""
    for row in await page.locator("#rounds li:has(> details)").all():
        signs = await row.locator("> .pips").text_content() or ""
        assert sorted(signs) == sorted(await row.locator(".tree .guess > .pips").all_text_contents())
        everywhere += signs
    assert set(everywhere) == {"●", "\N{MULTIPLICATION SIGN}", "○"}
    assert everywhere.count("●") == await number(page, "[data-count=accepted]")
    assert len(everywhere) - everywhere.count("●") == await number(page, "[data-count=rejected]")
    await page.locator("#show-trees").uncheck()
    await expect(page.locator("#rounds details[open]")).to_have_count(0)


async def test_positions_are_depths(page: Page) -> None:
    """Guesses side by side count as one, so that the shares are those of the rounds that got so far."""
    await ask(page)
    shares = [share.split(" of ") for share in await page.locator("#positions .number").all_inner_texts()]
    assert len(shares) == DEPTH
    assert int(shares[0][1]) == await page.locator("#rounds details").count()
    assert sum(int(kept) for kept, _ in shares) == await number(page, "[data-count=accepted]")


async def test_the_answer_strikes_through_what_stood_in_the_same_place(page: Page) -> None:
    """Of a tree two guesses before each correction, and none of the other branches."""
    await ask(page)
    corrections = await number(page, "[data-count=correction]")
    assert corrections > 0
    assert await page.locator("#lane-main .stream s.rejected").count() == 2 * corrections


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_has_no_serious_finding_in_trees(browser: Browser, markov: MarkovStack, scheme: str) -> None:
    """Open, in a narrow window, where a tree scrolls within itself and the page does not."""
    markov.draft.branching = True
    window = {"width": 360, "height": 740}
    options = {"color_scheme": scheme, "reduced_motion": "reduce", "viewport": window}
    async with visit(browser, markov.gateway.rest_address, **options) as page:
        await ask(page)
        await page.locator("#show-trees").check()
        tree = page.locator("#rounds .tree").nth(1)
        await tree.focus()
        await page.keyboard.press("ArrowRight")
        await expect(tree).to_be_focused()
        assert await tree.evaluate("(box) => box.scrollWidth > box.clientWidth")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        await check(page)


async def test_a_race_tells_no_trees_and_ends_with_the_tick(page: Page) -> None:
    """Its runs do not learn which guesses were rejected; places in a round are depths all the same."""
    await fill(page, prompt="fox sea", seed=9, max_tokens=24, draft_count=2 * DEPTH)
    await page.locator("#race").click()
    assert "Identical token for token: 24 tokens" in await ended(page)
    await expect(page.locator("#rounds details")).to_have_count(0)
    assert await page.locator("#positions li").count() == DEPTH


async def test_chains_have_no_trees(page: Page, markov: MarkovStack) -> None:
    """Nothing to open, and no choice to open it."""
    markov.draft.branching = False
    await ask(page)
    await expect(page.locator("#rounds details")).to_have_count(0)
    await expect(page.locator("#trees")).to_be_hidden()
    assert await page.locator("#lane-main .stream s.rejected").count() == await number(page, "[data-count=rejected]")


async def test_the_gateways_drafters_are_offered(page: Page, markov: MarkovStack) -> None:
    """After `auto`, which names none; the chosen one reaches the draft and is in the link."""
    await expect(page.locator("#drafter option[value=model]")).to_have_count(1)
    assert (await page.locator("#drafter option").all_inner_texts())[0] == "auto"
    await ask(page, drafter="model")
    await ask(page, drafter="")
    assert markov.draft.drafters_wanted[-2:] == ["model", ""]
    await fill(page, drafter="model")
    await page.locator("#copy-link").click()
    await expect(page).to_have_url(re.compile("drafter=model"))


async def test_a_drafter_of_a_link_that_is_not_there_is_refused_by_name(browser: Browser, markov: MarkovStack) -> None:
    """The page keeps what the link says, whatever the gateway offers, and shows what the gateway says of it."""
    # The browser itself writes every answer of 400 to its console, so this visit is not watched to its end.
    page = await browser.new_page()
    await page.goto(f"http://{markov.gateway.rest_address}/#prompt=fox&drafter=oracle")
    await expect(page.locator("#drafter option[value=model]")).to_have_count(1)
    await expect(page.locator("#drafter")).to_have_value("oracle")
    await page.locator("#generate").click()
    await expect(page.locator("#failure")).to_contain_text("speculation.drafter is 'oracle'")
    assert await spoken(page) == ""
    await page.close()
