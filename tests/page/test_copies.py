"""What leaves the page: code that does what the page did, and the trace."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import httpx
import pytest
from google.protobuf import json_format
from page.browser import ended, fill, spoken, visit
from playwright.async_api import Browser, Page, expect
from support.stack import RunningStack

from outrider.v1 import generation_service_pb2 as pb

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

# Quotes of the shell and of Python, a line break, and a letter that is no ASCII.
PROMPT = '"It\'s a trap," said the fox.\n“Why?” asked the wolf, and \\'
SEED = 9_007_199_254_740_993
MORE = {
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "min_tokens": 2,
    "stop_token_ids": "7",
    "logit_bias": '{"13": -100}',
    "banned_words": "wolf",
}


async def answered(page: Page) -> str:
    """An answer on the page, whose request the snippets are about."""
    settings = {"drafter": "model", "temperature": 0.8, "stop_strings": "xyzzy\n\\n\\n\\n"}
    await page.locator("#more-sampling summary").click()
    await fill(page, prompt=PROMPT, seed=SEED, max_tokens=24, **settings, **MORE)
    await page.locator("#generate").click()
    assert (await ended(page)).startswith("Done")
    return await spoken(page)


async def snippet(page: Page, language: str) -> str:
    """The code in a language."""
    await page.locator("#copy-as").click()
    await page.locator("#language").select_option(language)
    code = await page.locator("#snippet").text_content()
    await page.locator("#snippet-close").click()
    assert code
    return code


async def test_the_curl_command_gives_the_same_text(page: Page, stack: RunningStack) -> None:
    """Its body, as a shell would pass it on, is a request to /v1 with the same answer."""
    text = await answered(page)
    words = shlex.split((await snippet(page, "curl")).replace("\\\n", " "))
    assert words[:2] == ["curl", "-N"]
    assert words[2] == f"http://{stack.gateway.rest_address}/v1/completions"
    body = {**json.loads(words[-1]), "stream": False}
    async with httpx.AsyncClient() as client:
        response = await client.post(words[2], json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == text
    assert [each["drafter"] for each in response.json()["outrider"]["drafters"]] == ["model"]


async def test_the_grpcurl_command_gives_the_same_text(page: Page, stack: RunningStack) -> None:
    """Its message is a GenerateRequest with the same answer."""
    text = await answered(page)
    words = shlex.split((await snippet(page, "grpcurl")).replace("\\\n", " "))
    request = json_format.Parse(words[words.index("-d") + 1], pb.GenerateRequest())
    assert words[-1] == "outrider.v1.GenerationService/Generate"
    messages = [message async for message in stack.call(request)]
    assert "".join(message.round.text_delta + message.completion.text_delta for message in messages) == text
    assert [each.drafter for each in messages[-1].completion.speculation.drafters] == ["model"]


@pytest.mark.parametrize("language", ["openai", "outrider"])
async def test_the_python_programs_print_the_same_text(page: Page, stack: RunningStack, language: str) -> None:
    """They run as they are."""
    text = await answered(page)
    code = await snippet(page, language)
    assert (stack.gateway.address in code) == (language == "outrider")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    assert output.decode() == text


async def test_the_trace_has_all_events(page: Page) -> None:
    """The download is JSON with the request and every event in order, and the texts add up."""
    text = await answered(page)
    async with page.expect_download() as downloading:
        await page.locator("#download").click()
    path = await (await downloading.value).path()
    trace = json.loads(await asyncio.to_thread(Path(path).read_text, encoding="utf-8"))
    assert trace["format"] == "outrider-trace-1"
    events = trace["runs"][0]["events"]
    assert [events[0]["event"], events[-1]["event"]] == ["opened", "completion"]
    assert {event["event"] for event in events[1:-1]} == {"round"}
    tokens = [token for event in events[1:-1] for token in event["data"]["tokens"]]
    assert "".join(token["text"] for token in tokens) + events[-1]["data"]["text"] == text
    assert events[0]["data"]["seed"] == str(SEED)


async def test_a_form_that_is_wrong_gives_no_code(page: Page) -> None:
    """The browser marks the field; no dialog opens, and no script fails."""
    await fill(page, prompt=PROMPT, seed="seven")
    await page.locator("#copy-as").click()
    await expect(page.locator("#seed")).to_be_focused()
    await expect(page.locator("#copy-dialog")).to_be_hidden()


async def test_the_buttons_say_whether_they_copied(browser: Browser, stack: RunningStack) -> None:
    """Where it can be seen, and in the announcement what to do where the browser refuses."""
    async with visit(browser, stack.gateway.rest_address, permissions=["clipboard-read", "clipboard-write"]) as page:
        text = await answered(page)
        button = page.locator("#copy-text")
        await button.click()
        await expect(button).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == text
        await expect(button).to_have_text("Copy text")
        await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        await button.click()
        await expect(button).to_have_text("Not copied")
        await expect(page.locator("#announce")).to_contain_text("Mark the answer instead")


async def test_the_dialog_is_closed_by_escape(page: Page) -> None:
    """Esc closes the dialog and gives the focus back."""
    await page.locator("#copy-as").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#copy-dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("#copy-dialog")).to_be_hidden()
    await expect(page.locator("#copy-as")).to_be_focused()
