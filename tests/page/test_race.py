"""The race: the same prompt and seed with and without speculation, and what is said of the outcome."""

import re

import pytest
from page.browser import ended, fill, sent, spoken
from playwright.async_api import Page, expect
from support.stack import HaltedTarget, RunningStack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]


# A figure, or that the machine was busy, which on a machine that also runs tests it may be.
SPEED = r"times as fast.*, the median of 3 turns|There is no figure of speed: the machine was busy"
# Rounds and times of runs that nobody made: total times in seconds, with speculation and without by turns.
VERDICT = """async ([fasts, plains]) => {
    const [{ verdict }, { Run }] = await Promise.all([import("/static/js/race.js"), import("/static/js/run.js")]);
    const made = (seconds, perRound) => {
        const run = new Run({});
        const tokens = Array(perRound).fill({ token_id: 7, text: "a", origin: "plain", row: null });
        const round = { tokens, draft_count: perRound - 1, accepted_count: perRound - 1, draft_depth: perRound - 1,
            evaluated_count: 0, rejected: [], draft_compute_us: 0, verify_compute_us: 1, round_us: 1, base_len: 1 };
        for (let place = 0; place < 12 / perRound; place += 1) run.takeRound({ ...round, time_us: place });
        run.completion = { rule: "match", numerics_ids: ["x"], timings: { total_us: seconds * 1e6 } };
        run.timings = run.completion.timings;
        return run;
    };
    const [[fast, ...again], [plain, ...others]] = [fasts.map((s) => made(s, 2)), plains.map((s) => made(s, 1))];
    fast.again = again;
    plain.again = others;
    return verdict(fast, plain);
}"""


async def race(page: Page, **values: str | int | float) -> str:
    """Runs a race to its end and gives the verdict."""
    await fill(page, **{"prompt": "Once upon a time", "max_tokens": 64, "draft_count": 4, **values})
    await page.locator("#race").click()
    await ended(page)
    return await page.locator("#verdict").inner_text()


async def test_a_race_under_match_ends_with_the_tick(page: Page, stack: RunningStack) -> None:
    """In the default dtype, above temperature 0 and with a seed of the gateway's choice, both lanes say the same."""
    assert stack.target_settings.dtype == "bfloat16"
    verdict = await race(page, temperature=0.9, rule="match")
    assert "✓ Identical token for token: 64 tokens" in verdict
    assert re.search(SPEED, verdict)
    assert await spoken(page) == await spoken(page, "lane-plain") != ""
    assert await page.locator("#lane-main .t.accepted").count() > 0
    assert await page.locator("#lane-plain .t:not(.plain)").count() == 0
    for clock in await page.locator(".lane .clock").all_inner_texts():
        assert "64 tokens" in clock


async def test_the_lanes_share_no_cached_prompt(page: Page, stack: RunningStack) -> None:
    """Every answer reads its prompt itself, so that no clock is helped by another; they come by turns."""
    prompt, bodies = "Once upon a time there was a king who had three sons, " * 4, sent(page)
    await race(page, prompt=prompt, seed=3)
    assert [each["speculation"]["enabled"] for each in bodies] == [True, False, False, True, True, False]
    assert len({each["cache_salt"] for each in bodies}) == len(bodies)
    assert {each["seed"] for each in bodies} == {"3"}
    await race(page, prompt=prompt, seed=3)
    runs = await page.locator("#result").inner_text()
    assert "0 of them cached" in runs


async def test_a_race_under_ratio_says_why_the_lanes_differ(page: Page) -> None:
    """Another rule promises the distribution only; the page names the first token that differs and the reason."""
    verdict = await race(page, temperature=1, rule="ratio", seed=3)
    assert "≠ Differs at token" in verdict
    assert "The rule ratio keeps the target's distribution" in verdict
    assert "Identical" not in verdict


async def test_equal_answers_without_a_promise_get_no_tick(page: Page) -> None:
    """Under another rule two answers may be the same by chance; the page says so, and that nothing promises it."""
    verdict = await race(page, temperature=0.1, top_p=0.01, rule="typical", seed=0, max_tokens=3)
    assert "The same this time: 3 tokens" in verdict
    assert "The rule typical does not follow the target's distribution" in verdict
    assert "✓" not in verdict
    assert "Identical" not in verdict
    assert await page.locator("#verdict.same").count() == 0


async def test_a_race_without_guesses_credits_no_speculation(page: Page) -> None:
    """With no guesses both lanes do the same, whatever the clocks say."""
    assert "Neither run had any guesses" in await race(page, draft_count=0, max_tokens=8)


async def test_a_stopped_race_claims_nothing(page: Page, stack: RunningStack) -> None:
    """Half a race has no result."""
    await fill(page, prompt="Once upon a time", max_tokens=2000)
    halted = HaltedTarget(stack, 12)
    await page.locator("#race").click()
    await expect(page.locator("#lane-main .t").first).to_be_visible()
    await page.keyboard.press("Escape")
    assert "No result" in await ended(page)
    await expect(page.locator("#verdict")).to_contain_text("must end by themselves")
    halted.let_go()


@pytest.mark.parametrize(
    ("fasts", "plains", "said", "tone"),
    [
        ([1, 1, 1], [1.5, 1.6, 1.5], "1.50 times as fast, the median of 3 turns", "same"),
        ([1, 1, 1], [1, 1.5, 1.1], "the machine was busy, for the same answer without speculation took 1.00 s and", ""),
        ([1, 1, 1], [3, 3, 3], "the machine was busy, for 3.00 times as fast is more than passes of 2.00 tokens", ""),
        ([1], [1.5], "the race ended before both answers came again", ""),
        ([1, 1], [1.5, 1.5], "the race ended before both answers came again", ""),
    ],
)
async def test_a_busy_machine_has_no_green_figure(
    page: Page, fasts: list[float], plains: list[float], said: str, tone: str
) -> None:
    """Nor has a race that was stopped; what is the same is said of all."""
    told = await page.evaluate(VERDICT, [fasts, plains])
    assert told["head"] == "✓ Identical token for token: 12 tokens"
    assert said in told["lines"][0]
    assert told["tone"] == tone
