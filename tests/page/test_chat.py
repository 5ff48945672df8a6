"""The page's conversation: turns, edits, stops, races, and the view that a model with a chat template begins with."""

import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from page.browser import ended, fill, sent, spoken, visit
from playwright.async_api import Browser, Page, expect
from support.models.templated import templated
from support.models.tiny_models import write_recommending
from support.stack import HaltedTarget, RunningStack, running_stack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

WINDOW = {"width": 1280, "height": 900}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """The embedded pair with a gateway that has a chat template."""
    tokenizer = templated(tmp_path_factory.mktemp("templated"))
    async with running_stack(gateway={"rest_listen": "127.0.0.1:0", "tokenizer": tokenizer}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, stack: RunningStack) -> AsyncIterator[Page]:
    """The page in a window as wide as a desk, with settings that give the same answers every time."""
    async with visit(browser, stack.gateway.rest_address, viewport=WINDOW) as opened:
        await fill(opened, seed=5, max_tokens=24, draft_count=4, temperature=0.7)
        yield opened


async def send(page: Page, message: str) -> str:
    """Sends a message by keyboard and gives the answer."""
    await page.locator("#message").fill(message)
    await page.keyboard.press("Enter")
    await ended(page)
    return await answer(page)


async def answer(page: Page) -> str:
    """The newest answer, token by token."""
    await page.locator("#show-rendered").uncheck()
    text = await spoken(page)
    await page.locator("#show-rendered").check()
    return text


async def messages(page: Page) -> list[str]:
    """All messages of the user that are shown."""
    return await page.locator("#turns .message").all_inner_texts()


async def test_a_model_with_a_template_begins_with_the_conversation(page: Page) -> None:
    """With openers that fill in a message and send nothing; the completion view is a choice away."""
    await expect(page.get_by_role("radio", name="Chat")).to_be_checked()
    await expect(page.locator("#no-template")).to_be_hidden()
    await expect(page.locator("#prompt")).to_be_hidden()
    await page.locator("#openers button").first.click()
    await expect(page.locator("#message")).to_be_focused()
    assert await page.locator("#message").input_value() != ""
    assert await messages(page) == []
    await page.keyboard.press("Shift+Enter")
    assert (await page.locator("#message").input_value()).endswith("\n")


async def test_a_model_without_a_template_begins_with_completion(browser: Browser) -> None:
    """One sentence says why, and a conversation is possible all the same."""
    async with (
        running_stack(draft=None, gateway={"rest_listen": "127.0.0.1:0"}) as stack,
        visit(browser, stack.gateway.rest_address) as page,
    ):
        await expect(page.get_by_role("radio", name="Completion")).to_be_checked()
        await expect(page.locator("#no-template")).to_be_hidden()
        await page.get_by_role("radio", name="Chat").check()
        await expect(page.locator("#no-template")).to_contain_text("This model has no chat template")
        await fill(page, max_tokens=4)
        assert await send(page, "Who are you?") != ""


async def test_three_turns_are_what_the_gateway_says_to_the_whole_conversation(page: Page, stack: RunningStack) -> None:
    """Every request has all turns; the answers stay in sight with their marks and facts."""
    bodies = sent(page)
    await page.locator("#system").fill("Be brief.")
    said: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for message in ("Who is the fox?", "And the wolf?", "What did they say?"):
        said.append({"role": "user", "content": message})
        text = await send(page, message)
        assert bodies[-1]["messages"] == said
        reply = await httpx.AsyncClient(timeout=60).post(
            f"http://{stack.gateway.rest_address}/v1/chat/completions",
            json={"messages": said, "seed": 5, "max_tokens": 24, "temperature": 0.7},
        )
        assert text == reply.json()["choices"][0]["message"]["content"] != ""
        said.append({"role": "assistant", "content": text})
    assert await messages(page) == ["Who is the fox?", "And the wolf?", "What did they say?"]
    assert await page.locator("#turns .stream").count() == 2
    assert await page.locator("#turns .t.accepted").count() > 0
    await page.locator("#turns .stream .t").first.click()
    await expect(page.locator("#facts")).to_contain_text("Position")
    assert await page.locator("#rounds li").count() > 0


async def test_an_edited_message_drops_what_came_after_it(page: Page) -> None:
    """Until it is sent nothing is lost, and Esc keeps the conversation as it was."""
    bodies = sent(page)
    first = await send(page, "One")
    await send(page, "Two")
    await send(page, "Three")
    await page.get_by_role("button", name="Edit message 2").click()
    await expect(page.locator("#editing")).to_contain_text("Message 2 is edited")
    assert await page.locator("#turns .going").count() == 2
    await page.keyboard.press("Escape")
    await expect(page.locator("#editing")).to_be_hidden()
    assert await messages(page) == ["One", "Two", "Three"]
    await page.get_by_role("button", name="Edit message 2").click()
    await page.keyboard.type("!")
    await page.keyboard.press("Enter")
    await ended(page)
    assert await messages(page) == ["One", "Two!"]
    assert [each["content"] for each in bodies[-1]["messages"]] == ["One", first, "Two!"]


async def test_a_stopped_answer_is_kept_as_far_as_it_came(page: Page, stack: RunningStack) -> None:
    """Esc stops it, the services come to rest, and the next message follows what there is."""
    bodies = sent(page)
    await fill(page, max_tokens=3000)
    halted = HaltedTarget(stack, 12)
    await page.locator("#message").fill("Tell me all.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await page.keyboard.press("Escape")
    assert (await ended(page)).startswith("Stopped after")
    await stack.quiet()
    halted.let_go()
    partial = await answer(page)
    await fill(page, max_tokens=8)
    await send(page, "Go on.")
    assert [each["content"] for each in bodies[-1]["messages"]] == ["Tell me all.", partial, "Go on."]


async def test_a_refused_message_comes_back(browser: Browser, stack: RunningStack) -> None:
    """The gateway's sentence is shown, and the message can be sent again as it is."""
    # Not watched: the browser writes every answer of 400 to its console.
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"http://{stack.gateway.rest_address}/")
    await fill(page, max_tokens=100_000)
    await page.locator("#message").fill("Too much?")
    await page.locator("#send").click()
    await expect(page.locator("#failure")).to_contain_text("do not fit into the context of 4096 tokens")
    await expect(page.locator("#message")).to_have_value("Too much?")
    assert await messages(page) == []
    await fill(page, max_tokens=4)
    assert await send(page, "Too much?") != ""
    await context.close()


async def test_a_race_answers_the_last_message_with_and_without_speculation(page: Page) -> None:
    """The tokens are the same, also where every answer draws its own seed, and the conversation goes on."""
    await fill(page, seed="", temperature=0.9)
    text = await send(page, "Who goes there?")
    await page.locator("#race-turn").click()
    assert "✓ Identical token for token" in await ended(page)
    await expect(page.locator("#verdict")).to_contain_text(re.compile("times as fast|the machine was busy"))
    assert await answer(page) == text
    assert await page.locator("#lane-plain .t:not(.plain)").count() == 0
    assert await page.locator("#lane-main .t.accepted").count() > 0
    await page.locator("#message").fill("And then?")
    await page.locator("#race-turn").click()
    await expect(page.locator("#turns .message")).to_have_count(2)
    assert "✓ Identical token for token" in await ended(page)
    await expect(page.locator("#lane-plain")).to_be_visible()
    await page.locator("#forget").click()
    await expect(page.locator("#openers")).to_be_visible()
    await expect(page.locator("#verdict")).to_be_hidden()
    assert await messages(page) == []


async def test_each_view_keeps_what_it_has(page: Page) -> None:
    """An answer, its figures and its rounds are there again when its view is."""
    said = await send(page, "Who goes there?")
    await page.get_by_role("radio", name="Completion").check()
    assert await spoken(page) == ""
    await expect(page.locator("[data-figure=tokens]")).to_have_text("0")
    await fill(page, prompt="Once upon a time", max_tokens=6)
    await page.locator("#generate").click()
    await ended(page)
    told = await spoken(page)
    await page.get_by_role("radio", name="Chat").check()
    await expect(page.locator("[data-figure=tokens]")).not_to_have_text("6")
    assert await answer(page) == said
    await page.get_by_role("radio", name="Completion").check()
    assert await spoken(page) == told
    await expect(page.locator("#lane-main .asked")).to_have_text("Once upon a time")


async def test_leaving_the_view_stops_its_answer(page: Page, stack: RunningStack) -> None:
    """What came of it is there when the conversation is seen again."""
    await fill(page, max_tokens=3000)
    await page.locator("#message").fill("Tell me all.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#lane-main .t").nth(4)).to_be_visible()
    await page.get_by_role("radio", name="Completion").check()
    assert (await ended(page)).startswith("Stopped after")
    await expect(page.locator("#prompt")).to_be_visible()
    await stack.quiet()
    await page.get_by_role("radio", name="Chat").check()
    assert await messages(page) == ["Tell me all."]
    assert await answer(page) != ""


async def test_the_request_as_code_is_the_conversation(page: Page, stack: RunningStack) -> None:
    """With the message that is written, or up to the last one; the curl command gives the same answer."""
    text = await send(page, "It's a “trap”?")
    await page.locator("#copy-as").click()
    words = shlex.split((await page.locator("#snippet").inner_text()).replace("\\\n", " "))
    assert words[2] == f"http://{stack.gateway.rest_address}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(words[2], json={**json.loads(words[-1]), "stream": False})
    assert reply.json()["choices"][0]["message"]["content"] == text
    for language, call in (("openai", "chat.completions.create("), ("outrider", "client.chat("), ("grpcurl", "/Chat")):
        await page.locator("#language").select_option(language)
        assert call in await page.locator("#snippet").inner_text()


async def test_a_link_fills_in_a_conversation_and_sends_nothing(page: Page) -> None:
    """View, system message and message travel in the fragment."""
    await page.locator("#system").fill("Be brief & kind.")
    await page.locator("#message").fill("Who?")
    await page.locator("#copy-link").click()
    other = await page.context.new_page()
    bodies = sent(other)
    await other.goto(page.url)
    await expect(other.locator("[data-service=gateway]")).to_have_attribute("data-state", "up")
    await expect(other.get_by_role("radio", name="Chat")).to_be_checked()
    assert await other.locator("#system").input_value() == "Be brief & kind."
    assert await other.locator("#message").input_value() == "Who?"
    assert await other.locator("#max_tokens").input_value() == "24"
    assert bodies == []
    await other.goto(re.sub("#.*", "#view=completion&prompt=Once", page.url))
    await expect(other.get_by_role("radio", name="Completion")).to_be_checked()


async def test_markup_of_a_message_stays_text(page: Page) -> None:
    """What looks like markup is shown letter by letter."""
    message = "<img src=x onerror=alert(1)><b>fox</b> **bold**"
    await send(page, message)
    assert await messages(page) == [message]
    assert await page.locator("#thread img, #thread b, #turns strong").count() == 0


async def test_the_keyboard_alone_holds_a_conversation(page: Page) -> None:
    """From the skip link to the message, an answer, its tokens, an edit and the other view."""

    async def tab_to(name: str) -> None:
        for _ in range(60):
            await page.keyboard.press("Tab")
            at = await page.evaluate(
                "(() => { const a = document.activeElement; return a.ariaLabel || a.id || a.value; })()"
            )
            if at == name:
                return
        pytest.fail(f"the tab key does not come to {name}")

    await page.locator(".skip").focus()
    await tab_to("message")
    await page.keyboard.type("Who?")
    await page.keyboard.press("Enter")
    await ended(page)
    await page.locator(".skip").focus()
    await tab_to("Edit message 1")
    await page.keyboard.press("Enter")
    await expect(page.locator("#message")).to_be_focused()
    await page.keyboard.press("Escape")
    await page.locator(".skip").focus()
    await tab_to("Answer, token by token")
    await page.keyboard.press("End")
    await expect(page.locator("#tip")).to_be_visible()
    await page.locator(".skip").focus()
    await tab_to("chat")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#prompt")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
async def test_everybody_can_use_it(browser: Browser, stack: RunningStack, scheme: str, width: int) -> None:
    """Axe has no serious finding and nothing scrolls sideways: empty, in a conversation, edited, and after a race."""
    window = {"width": width, "height": 740}
    options = {"color_scheme": scheme, "viewport": window, "reduced_motion": "reduce"}

    async def check() -> None:
        results = await Axe().run(page)
        found = [each for each in results.response["violations"] if each["impact"] in {"serious", "critical"}]
        assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= width

    async with visit(browser, stack.gateway.rest_address, **options) as page:
        await check()
        await fill(page, seed=5, max_tokens=32, draft_count=4)
        await page.locator("#show-rejected").check()
        await send(page, "Rumpelstiltskin" * 12)
        await send(page, "Who?")
        await page.get_by_role("button", name="Edit message 2").click()
        await check()
        await page.keyboard.press("Escape")
        await page.locator("#race-turn").click()
        await ended(page)
        await check()


async def test_the_page_shows_the_models_defaults_and_leaves_them_to_it(browser: Browser, tmp_path: Path) -> None:
    """An empty field says nothing, in neither view; the answer is that of every other door, and says what counted."""
    folder = str(write_recommending(tmp_path / "model", temperature=0.2, top_p=0.9))
    (tmp_path / "tokenizer").mkdir()
    gateway = {"rest_listen": "127.0.0.1:0", "tokenizer": templated(tmp_path / "tokenizer")}
    async with (
        running_stack(folder, draft=None, gateway=gateway) as stack,
        visit(browser, stack.gateway.rest_address, viewport=WINDOW) as page,
    ):
        for name, shown in (("temperature", "0.2"), ("top_p", "0.9")):
            await expect(page.locator(f"#{name}")).to_have_attribute("placeholder", shown)
            await expect(page.locator(f"#{name}")).to_have_value("")
        bodies = sent(page)
        await fill(page, seed=5, max_tokens=24)
        text = await send(page, "Who is the fox?")
        await expect(page.locator("#result")).to_contain_text("temperature 0.2, top-p 0.9")
        await page.get_by_role("radio", name="Completion").check()
        await page.locator("#generate").click()
        await ended(page)
        await fill(page, temperature=0.7)
        await page.locator("#generate").click()
        await expect(page.locator("#result")).to_contain_text("temperature 0.7, top-p 0.9")
        assert [(each.get("temperature"), "top_p" in each) for each in bodies] == [
            (None, False),
            (None, False),
            (0.7, False),
        ]
        async with httpx.AsyncClient(timeout=60) as client:
            said = {"messages": [{"role": "user", "content": "Who is the fox?"}], "seed": 5, "max_tokens": 24}
            url = f"http://{stack.gateway.rest_address}/v1/chat/completions"
            reply = await client.post(url, json=said)
        assert reply.json()["choices"][0]["message"]["content"] == text
