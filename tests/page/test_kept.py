"""Conversations that the browser keeps: a list of them, what comes back after the page was loaded again, and files."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from page.browser import ended, fill, say, sent, spoken, visit
from playwright.async_api import Browser, Locator, Page, expect
from support.models.templated import templated
from support.stack import RunningStack, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

WINDOW = {"width": 1280, "height": 900}
MARKS = ("accepted", "correction", "bonus", "plain")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """The embedded pair with a gateway that has a chat template."""
    tokenizer = templated(tmp_path_factory.mktemp("templated"))
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0", "tokenizer": tokenizer}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, stack: RunningStack) -> AsyncIterator[Page]:
    """The page in a browser that has kept nothing yet."""
    async with visit(browser, stack.gateway.rest_address, viewport=WINDOW) as opened:
        await fill(opened, seed=5, max_tokens=24, draft_count=4)
        yield opened


def titles(page: Page) -> Locator:
    """The titles in the list, the newest first."""
    return page.locator("#conversations .title")


async def marks(page: Page) -> list[str]:
    """The legend's counts and the figures of the newest answer."""
    counts = [await page.locator(f"[data-count={origin}]").inner_text() for origin in MARKS]
    return counts + await page.locator("#figures dd").all_inner_texts()


async def exported(page: Page, name: str) -> dict[str, Any]:
    """The file that a button gives."""
    async with page.expect_download() as downloading:
        await page.get_by_role("button", name=name).click()
    path = await (await downloading.value).path()
    return dict(json.loads(await asyncio.to_thread(Path(path).read_text, encoding="utf-8")))


async def give(page: Page, text: str | dict[str, Any]) -> None:
    """Imports a file."""
    content = text if isinstance(text, str) else json.dumps(text)
    file = {"name": "kept.json", "mimeType": "application/json", "buffer": content.encode()}
    await page.locator("#import-file").set_input_files(files=[file])


async def test_a_conversation_is_there_again_when_the_page_is(page: Page) -> None:
    """With its marks, figures and system message: in this tab at once, in another by its title. It goes on."""
    bodies = sent(page)
    await page.locator("#system").fill("Be brief.")
    await say(page, "Who is the fox?")
    await say(page, "And the wolf?")
    await expect(page.locator("#turns .stream")).to_have_class("stream rendered")
    said, before = await spoken(page), await marks(page)
    told = await page.locator("#result").inner_text()
    await expect(titles(page)).to_have_text(["Who is the fox?"])
    await page.reload()
    await expect(page.locator("#turns .message")).to_have_text(["Who is the fox?", "And the wolf?"])
    await expect(page.locator("#result")).to_have_text(told)
    assert (await spoken(page), await marks(page)) == (said, before)
    await expect(page.locator("#system")).to_have_value("Be brief.")
    assert await page.locator("#rounds li").count() > 0
    await page.locator("#lane-main .t.accepted").first.click()
    await expect(page.locator("#facts")).to_contain_text("the target agreed")
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(titles(other)).to_have_text(["Who is the fox?"])
    await expect(other.locator("#turns .message")).to_have_count(0)
    await titles(other).click()
    await expect(titles(other)).to_have_attribute("aria-current", "true")
    assert await spoken(other) == said
    await other.close()
    await fill(page, seed=5, max_tokens=4)
    await say(page, "What then?")
    assert [each["role"] for each in bodies[-1]["messages"]] == [
        "system",
        *("user", "assistant") * 2,
        "user",
    ]
    assert bodies[-1]["messages"][4]["content"] == said
    await expect(titles(page)).to_have_count(1)


async def test_conversations_are_listed_renamed_and_deleted(page: Page) -> None:
    """The newest first; a title changes and one goes after a question, which can be answered with no."""
    await say(page, "One")
    await page.locator("#forget").click()
    await say(page, "Two")
    await expect(titles(page)).to_have_text(["Two", "One"])
    await page.get_by_role("button", name="Rename “One”").click()
    await page.locator("#title").fill("The first")
    await page.keyboard.press("Enter")
    await expect(titles(page)).to_have_text(["Two", "The first"])
    await titles(page).nth(1).click()
    await expect(page.locator("#turns .message")).to_have_text(["One"])
    await say(page, "More")
    await expect(titles(page)).to_have_text(["The first", "Two"])
    await page.get_by_role("button", name="Delete “The first”").click()
    await page.keyboard.press("Escape")
    await expect(titles(page)).to_have_count(2)
    await page.get_by_role("button", name="Delete “The first”").click()
    await page.locator("#delete-dialog .primary").click()
    await expect(titles(page)).to_have_text(["Two"])
    # It was the one that was shown.
    await expect(page.locator("#openers")).to_be_visible()
    await page.reload()
    await expect(titles(page)).to_have_text(["Two"])


async def test_another_conversation_stops_the_answer_and_keeps_what_came(page: Page, stack: RunningStack) -> None:
    """Nothing of it is lost, and none of it comes into the other one."""
    await say(page, "One")
    await page.locator("#forget").click()
    await fill(page, max_tokens=3000)
    await page.locator("#message").fill("Tell me all.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await titles(page).nth(1).click()
    await expect(page.locator("#turns .message")).to_have_text(["One"])
    await stack.quiet()
    await titles(page).first.click()
    await expect(page.locator("#turns .message")).to_have_text(["Tell me all."])
    await expect(page.locator("#result")).to_contain_text("Stopped after")
    assert await spoken(page) != ""


async def test_a_tab_that_is_closed_in_mid_answer_loses_no_message(page: Page) -> None:
    """What had come is there, said to be broken off, and the button asks again from the same seed."""
    bodies = sent(page)
    await fill(page, max_tokens=3000, seed=11)
    await page.locator("#message").fill("Tell me all.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await expect(titles(page)).to_have_count(1)
    await page.reload()
    await expect(page.locator("#turns .message")).to_have_text(["Tell me all."])
    await expect(page.locator("#failure")).to_contain_text("was closed before this answer had ended")
    await fill(page, max_tokens=8)
    await page.locator("#retry").click()
    assert (await ended(page)).startswith("Done: 8 tokens")
    assert bodies[-1]["seed"] == "11"
    await expect(page.locator("#failure")).to_be_hidden()


async def test_conversations_travel_in_a_file(page: Page, browser: Browser, stack: RunningStack) -> None:
    """One or all; in another browser they are as they were, and twice the same file adds nothing."""
    await say(page, "One")
    said, before = await spoken(page), await marks(page)
    await page.locator("#forget").click()
    await say(page, "Two <b>")
    one = await exported(page, "Export “One”")
    everything = await exported(page, "Export all")
    assert len(one["conversations"]) == 1
    assert len(everything["conversations"]) == 2
    await give(page, everything)
    await expect(page.locator("#library-said")).to_have_text("0 conversations imported, 2 already here.")
    async with visit(browser, stack.gateway.rest_address, viewport=WINDOW) as other:
        await give(other, everything)
        await expect(titles(other)).to_have_text(["Two <b>", "One"])
        await titles(other).nth(1).click()
        await expect(other.locator("#turns .message")).to_have_text(["One"])
        assert (await spoken(other), await marks(other)) == (said, before)
        await give(other, one)
        await expect(other.locator("#library-said")).to_have_text("0 conversations imported, 1 already here.")
        # One that has gone on since comes beside it.
        await give(
            other, {**one, "conversations": [{**one["conversations"][0], "changed": "2020-02-02T02:02:02.000Z"}]}
        )
        await expect(titles(other)).to_have_text(["Two <b>", "One", "One"])
        await expect(other.locator("#conversations time").last).to_have_text("Feb 2, 2020")


def record(**changes: Any) -> dict[str, Any]:
    """A conversation without an answer, as a file has it."""
    turn = {"message": "Who?", "results": [], "answer": None}
    kept = {"version": 1, "id": "a", "title": "Who?", "changed": "2026-11-26T12:00:00Z", "system": "", "turns": [turn]}
    return {**kept, **changes}


def a_file(*records: Any, **changes: Any) -> dict[str, Any]:
    """A file with records."""
    return {"format": "outrider-conversations", "version": 1, "conversations": list(records), **changes}


ANSWER = {"rounds": [], "rest": "", "thought": "", "calls": [], "seed": None, "times": None, "told": "", "error": ""}
ROUND = [[0] * 9, [["a", 0, 1]], 0]


async def test_bad_files_are_told_what_is_wrong_with_them(page: Page) -> None:
    """Where it is and what is wanted there; nothing of such a file is kept, and no script fails."""

    def answered(**changes: Any) -> dict[str, Any]:
        return record(turns=[{"message": "", "results": [], "answer": {**ANSWER, **changes}}])

    cases = (
        ("{", "The file is no JSON"),
        ("[]", 'its format is not "outrider-conversations"'),
        ({"format": "outrider-trace-1"}, 'its format is not "outrider-conversations"'),
        (a_file(version=2), "The version of the file is not 1, but 2: it may come from a newer page."),
        (a_file(conversations={}), "conversations is not a list."),
        (a_file(record(), 7), "conversations[1] is not an object."),
        (a_file(record(version=2)), "conversations[0].version is not 1."),
        (a_file(record(title="")), "conversations[0].title is not a text of 1 to 200 characters."),
        (a_file(record(changed="yesterday")), "conversations[0].changed is not a time."),
        (a_file(record(turns=[{"message": 1}])), "conversations[0].turns[0].message is not a text."),
        (a_file(record(turns=[{"message": "", "results": [{}]}])), "turns[0].results[0] is not a result with id, name"),
        (a_file(answered(seed="seven")), "turns[0].answer.seed is not a seed or null."),
        (a_file(answered(times=[1])), "turns[0].answer.times is not two numbers of microseconds or null."),
        (a_file(answered(rounds=[ROUND, [[0] * 8, [], 0]])), "answer.rounds[1] is not a round"),
        (a_file(answered(rounds=[[[0] * 9, [["a", 4, 1]], 0]])), "answer.rounds[0] is not a round"),
        (
            a_file(answered(calls=[{"id": "1", "name": "a"}])),
            "answer.calls[0] is not a call with id, name and arguments.",
        ),
    )
    for text, sentence in cases:
        await give(page, text)
        await expect(page.locator("#library-failure")).to_contain_text(sentence)
    await expect(titles(page)).to_have_count(0)
    # The least that is right, with names that would be markup and selectors.
    await give(page, a_file(record(id='"] *', title="<img src=x onerror=alert(1)>"), answered(rounds=[ROUND])))
    await expect(page.locator("#library-failure")).to_be_hidden()
    await expect(titles(page)).to_have_count(2)
    await titles(page).filter(has_text="<img").click()
    await expect(page.locator("#turns .message")).to_have_text(["Who?"])


async def test_a_full_store_is_said_and_drops_nothing(page: Page) -> None:
    """By number and by size; the conversation goes on, and is kept when there is room again."""
    await give(page, a_file(*(record(id=f"c{number}", title=f"Number {number}") for number in range(200))))
    await expect(titles(page)).to_have_count(200)
    await say(page, "One more")
    await expect(page.locator("#library-failure")).to_contain_text("this page keeps 200. Delete some, or export them")
    await expect(titles(page)).to_have_count(200)
    await page.locator("[data-act='delete c7']").click()
    await page.locator("#delete-dialog .primary").click()
    await say(page, "And again")
    await expect(titles(page).first).to_have_text("One more")
    await expect(page.locator("#library-failure")).to_be_hidden()
    await page.locator("[data-act='delete c8']").click()
    await page.locator("#delete-dialog .primary").click()
    await expect(titles(page)).to_have_count(199)
    # Made there: on its way through the debugger's socket it would take half a minute.
    await page.locator("#import-file").evaluate(
        """(field, start) => {
            const files = new DataTransfer();
            files.items.add(new File([start.replace("TEXT", "x".repeat(33e6))], "large.json"));
            field.files = files.files;
            field.dispatchEvent(new Event("change"));
        }""",
        json.dumps(a_file(record(id="large", system="TEXT"))),
    )
    await expect(page.locator("#library-failure")).to_contain_text("million characters would be too much")
    await expect(titles(page)).to_have_count(199)


async def test_a_browser_that_keeps_nothing_still_talks(browser: Browser, stack: RunningStack) -> None:
    """And says so, where the list would be."""
    async with visit(browser, stack.gateway.rest_address, viewport=WINDOW) as page:
        denied = (
            "Object.defineProperty(IDBFactory.prototype, 'open', {value() { throw new Error('access is denied'); }})"
        )
        await page.add_init_script(denied)
        await page.reload()
        await expect(page.locator("#library")).to_contain_text("This browser keeps no conversations: access is denied.")
        await fill(page, max_tokens=4)
        await say(page, "Who?")
        assert await spoken(page) != ""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
async def test_everybody_can_use_the_list(browser: Browser, stack: RunningStack, scheme: str, width: int) -> None:
    """Axe has no serious finding, nothing scrolls sideways, and the keyboard opens, renames and deletes."""
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 740}, "reduced_motion": "reduce"}
    async with visit(browser, stack.gateway.rest_address, **options) as page:
        await give(page, a_file(record(title="Rumpelstiltskin" * 12), record(id="b", title="B")))
        await page.locator("#library").evaluate("(fold) => { fold.open = true; }")
        await page.get_by_role("button", name="Rename “B”").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#title")).to_be_focused()
        await page.keyboard.type("Bee")
        results = [await Axe().run(page)]
        await page.keyboard.press("Enter")
        await expect(titles(page).filter(has_text="Bee")).to_have_count(1)
        await page.get_by_role("button", name="Delete “Bee”").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        await expect(titles(page)).to_have_count(1)
        await titles(page).focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#turns .message")).to_have_text(["Who?"])
        results.append(await Axe().run(page))
        for found in results:
            serious = [each for each in found.response["violations"] if each["impact"] in {"serious", "critical"}]
            assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious] == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
