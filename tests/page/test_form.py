"""The form: parameters of sampling, a schema and tools go as they are typed, and what is wrong is said beside it."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

import pytest
import pytest_asyncio
from google.protobuf import json_format
from page.browser import ended, fill, say, sent, spoken, visit
from playwright.async_api import Browser, Page, expect
from support.services.reciting import RecitingStack, reciting_stack
from support.stack import RunningStack

from gateway.rest.page import PageRequest
from outrider.parameters import SamplingParameters
from outrider.v1 import generation_service_pb2 as pb

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ANSWERS = {"What is the weather?": f"Let me look.\n{CALL}", "18 degrees": "It is mild.", "Thanks": "You are welcome."}
SAMPLED = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 3,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reciter(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RecitingStack]:
    """A target that calls a tool."""

    def script(prompt: str) -> str:
        return ANSWERS[max(ANSWERS, key=prompt.rfind)]

    async with reciting_stack(tmp_path_factory.mktemp("reciter"), script, ANSWERS.values()) as running:
        running.target.numbered = True
        yield running


async def unfolded(page: Page) -> None:
    """Opens all of the form."""
    for name in ("more-sampling", "more-form"):
        await page.locator(f"#{name} summary").click()


async def test_every_parameter_of_sampling_goes_as_it_is_typed(page: Page) -> None:
    """There is a field for each that the gateway knows, an empty one says nothing, and a link has all of them."""
    bodies = sent(page)
    await fill(page, prompt="Once upon a time", max_tokens=8, temperature="", seed=1)
    await page.locator("#generate").click()
    await ended(page)
    named = {"prompt", "max_tokens", "seed", "speculation", "probabilities", "explain"}
    assert bodies[0].keys() == named
    await unfolded(page)
    lists = {
        "stop_token_ids": "13, 198",
        "logit_bias": '{"198": -5}',
        "banned_words": "wolf\nthe \\n",
        "stop_strings": "x",
    }
    await fill(page, rule="typical", **SAMPLED, **lists)
    await fill(page, typical_epsilon=0.1, typical_delta=0.2)
    await page.locator("#ignore_eos").check()
    await page.locator("#generate").click()
    await ended(page)
    extra = {"stop_token_ids": [13, 198], "logit_bias": {"198": -5}, "banned_words": ["wolf", "the \n"], "stop": ["x"]}
    expected = {**SAMPLED, **extra, "ignore_eos": True}
    assert {name: bodies[1].get(name) for name in expected} == expected
    assert SamplingParameters.model_fields.keys() <= expected.keys()
    assert bodies[1]["speculation"] | {"typical_epsilon": 0.1, "typical_delta": 0.2} == bodies[1]["speculation"]
    assert set(bodies[1]) - named <= PageRequest.model_fields.keys()
    await page.locator("#copy-link").click()
    link = parse_qs(page.url.partition("#")[2])
    assert {name: link[name] for name in SAMPLED} == {name: [str(value)] for name, value in SAMPLED.items()}
    other = await page.context.new_page()
    await other.goto(page.url)
    again = sent(other)
    await expect(other.locator("main")).to_be_visible()
    await other.locator("#generate").click()
    await ended(other)
    assert again == [bodies[1]]


async def test_an_answer_by_a_schema(page: Page) -> None:
    """Is JSON that fits it; a schema that is none, or that the gateway does not take, is told beside it."""
    bodies = sent(page)
    await fill(page, prompt="Once", max_tokens=60, seed=1)
    await page.locator("#more-form summary").click()
    await fill(page, response_format="json_schema")
    wrong = page.locator("#wrong-schema")
    for text, sentence in (("", "wanted"), ('{"a": }', "This is no JSON"), ("[]", "A schema is an object, or true")):
        await fill(page, schema=text)
        await page.locator("#more-form").evaluate("(fold) => { fold.open = false; }")
        await page.locator("#generate").click()
        await expect(wrong).to_contain_text(sentence)
        await expect(page.locator("#schema")).to_be_focused()
    assert bodies == []
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, None]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    await fill(page, schema=json.dumps(schema))
    await expect(wrong).to_have_count(0)
    await page.locator("#generate").click()
    assert (await ended(page)).startswith("Done")
    said = "".join(await page.locator("#lane-main .t").all_text_contents())
    assert json.loads(said)["n"] in {1, None}
    assert bodies[0]["response_format"]["json_schema"]["schema"] == schema
    await fill(page, response_format="json_object")
    await expect(page.locator("#schema")).to_be_hidden()
    await page.locator("#generate").click()
    await ended(page)
    assert bodies[1]["response_format"] == {"type": "json_object"}


async def test_a_tool_is_called_and_its_result_goes_back(browser: Browser, reciter: RecitingStack) -> None:
    """The call is shown and not made; what the user says came of it is the next turn, and all is kept."""
    window = {"width": 1280, "height": 900}
    async with visit(browser, reciter.gateway.rest_address, viewport=window) as page:
        bodies = sent(page)
        await page.locator("#more-form summary").click()
        for text, sentence in (
            ("{}", "Tools are a list"),
            ('[{"type": "function"}]', "Tool 1 is not"),
            ('[{"type": "function", "function": {}}]', "Tool 1 has no name."),
        ):
            await fill(page, tools=text, message="What is the weather?")
            await page.locator("#send").click()
            await expect(page.locator("#wrong-tools")).to_contain_text(sentence)
        assert bodies == []
        await fill(page, tools=json.dumps([TOOL]), seed=5, max_tokens=64, draft_count=4)
        await page.locator("#message").press("Control+Enter")
        await ended(page)
        assert bodies[0]["tools"] == [TOOL]
        await expect(page.locator("#lane-main .call b")).to_have_text("get_weather")
        await expect(page.locator("#lane-main .call pre")).to_have_text('{"city": "Paris"}')
        await expect(page.locator("#tool_choice option")).to_have_text(
            ["as the model likes", "none", "at least one", "get_weather"]
        )
        await page.get_by_label("Result of get_weather").fill("18 degrees")
        await page.locator("#send").click()
        await ended(page)
        asked, called, result = bodies[1]["messages"]
        assert asked["content"] == "What is the weather?"
        [call] = called["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather",
            {"city": "Paris"},
        )
        assert result == {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
        assert await spoken(page) == "It is mild."
        await expect(page.locator("#call-results")).to_be_hidden()
        await page.reload()
        await expect(page.locator("#turns .said-result")).to_have_text("Result of get_weather: 18 degrees")
        await expect(page.locator("#turns .call pre")).to_have_text('{"city": "Paris"}')
        await page.get_by_role("button", name="Edit message 2").click()
        await expect(page.get_by_label("Result of get_weather")).to_have_value("18 degrees")
        await page.keyboard.press("Escape")
        await fill(page, tools=json.dumps([TOOL]))
        await say(page, "Thanks")
        assert [each["role"] for each in bodies[2]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
        assert bodies[2]["messages"][:3] == bodies[1]["messages"]
        await page.locator("#copy-as").click()
        for language in ("openai", "outrider"):
            await page.locator("#language").select_option(language)
            code = await page.locator("#snippet").text_content()
            assert code
            program = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            output, complaint = await program.communicate()
            assert output.decode() == ANSWERS["Thanks"], complaint.decode()
        await page.locator("#language").select_option("grpcurl")
        words = shlex.split((await page.locator("#snippet").inner_text()).replace("\\\n", " "))
        request = json_format.Parse(words[words.index("-d") + 1], pb.ChatRequest())
        said = [each async for each in reciter.stub.Chat(request)]
        assert "".join(each.round.text_delta + each.completion.text_delta for each in said) == ANSWERS["Thanks"]
        assert [tool.name for tool in request.tools] == ["get_weather"]


async def test_a_link_without_a_view_opens_what_a_fresh_page_is(
    browser: Browser, stack: RunningStack, reciter: RecitingStack
) -> None:
    """The conversation where the model has a template, else the completion; what it does not name is as there."""
    for address, view in ((stack.gateway.rest_address, "Completion"), (reciter.gateway.rest_address, "Chat")):
        async with visit(browser, address) as page:
            await expect(page.get_by_role("radio", name=view)).to_be_checked()
            fresh = await page.locator("#max_tokens").input_value()
            await page.goto("about:blank")
            await page.goto(f"http://{address}/#seed=7&system=Hi&tools=%5B%5D&view=")
            await expect(page.get_by_role("radio", name=view)).to_be_checked()
            await expect(page.locator("#max_tokens")).to_have_value(fresh)
            await expect(page.locator("#seed")).to_have_value("7")
            await page.evaluate("location.hash = '#message=Who'")
            await expect(page.get_by_role("radio", name=view)).to_be_checked()
            await expect(page.locator("#seed")).to_have_value("")


async def test_the_theme_is_the_users_and_is_kept(browser: Browser, stack: RunningStack) -> None:
    """The system's until another is chosen; then it holds after a reload, before anything is drawn."""
    ground = "getComputedStyle(document.body).backgroundColor"
    async with visit(browser, stack.gateway.rest_address, color_scheme="dark") as page:
        dark = await page.evaluate(ground)
        await page.locator("#theme").select_option("light")
        light = await page.evaluate(ground)
        assert light != dark
        await page.add_init_script(
            "addEventListener('DOMContentLoaded', () => { window.first = document.documentElement.dataset.theme; })"
        )
        await page.reload()
        assert await page.evaluate("window.first") == "light"
        assert await page.evaluate(ground) == light
        await expect(page.locator("#theme")).to_have_value("light")
        await page.locator("#theme").select_option("system")
        assert await page.evaluate(ground) == dark
        await page.emulate_media(color_scheme="light")
        assert await page.evaluate(ground) == light


async def test_figures_fold_away_and_stay_so(page: Page) -> None:
    """With rounds and charts; the answer is as it was. Other choices of what is seen are kept too."""
    await fill(page, prompt="Once upon a time", max_tokens=8)
    await page.locator("#generate").click()
    await ended(page)
    hidden = [page.locator(f"#{name}") for name in ("figures", "legend", "rounds", "positions", "result")]
    await page.locator("#show-figures").uncheck()
    await page.locator("#show-marks").uncheck()
    for each in hidden:
        await expect(each).to_be_hidden()
    await expect(page.locator("#lane-main .t").first).to_be_visible()
    await page.reload()
    await expect(page.locator("#figures")).to_be_hidden()
    await expect(page.locator("#answer")).to_have_class(re.compile("unmarked"))
    await page.locator("#show-figures").check()
    await page.reload()
    await expect(page.locator("#figures")).to_be_visible()
