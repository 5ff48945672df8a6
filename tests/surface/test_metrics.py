"""/metrics after requests over REST: well-formed, and every token and every verdict is counted once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.observability import findings
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, rest_stack, said
from support.rest.vllm_figures import positions, read_metrics

TALE = "Once upon a time there was a king who had"
OUTCOMES = "outrider_round_outcomes_total"
SURFACE = pytest.mark.surface
RULES = ["match", *(pytest.param(rule, marks=SURFACE) for rule in ("ratio", "block", "lenient", "typical"))]
ASKS: list[tuple[str, dict[str, Any]]] = [
    (path, {**prompt, "max_tokens": length, "seed": length, "ignore_eos": True, **options})
    for path, prompt in ((CHAT, said(TALE)), (COMPLETIONS, {"prompt": TALE}))
    for length in (1, 7, 40)
    for options in (
        {"speculation": {"draft_count": 4}},
        {"speculation": {"enabled": False}},
        {"speculation": {"rule": "ratio", "draft_count": 3}},
        {},
    )
]


@pytest.fixture
async def rest() -> AsyncIterator[RestStack]:
    """A gateway that has counted nothing yet."""
    async with rest_stack() as running:
        yield running


async def scraped(rest: RestStack) -> Counter[str]:
    """Sums of all samples by name; those with a position or an outcome also by that."""
    reply = await rest.http.get("/metrics")
    assert reply.status_code == 200
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
            for label in {"position", "outcome"} & set(sample.labels):
                sums[f"{sample.name}[{sample.labels[label]}]"] += sample.value  # type: ignore[assignment]
    return sums


@pytest.mark.slow
async def test_counters_are_the_sums_of_the_replies(rest: RestStack) -> None:
    """Tokens are those of all usages; drafts, guesses and kept guesses those of all figures, by position as well."""
    replies = await asyncio.gather(*(rest.ask(path, **fields) for path, fields in ASKS))
    usages = [reply["usage"] for reply in replies]
    figures = [read_metrics(reply).speculative_decoding for reply in replies]
    counted = await scraped(rest)
    assert findings((await rest.http.get("/metrics")).text) == []
    assert counted["outrider_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert counted["outrider_generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    told = [each for each in figures if each is not None]
    assert 0 < len(told) < len(replies)
    prefix = "outrider_spec_decode_num_"
    assert counted[f"{prefix}drafts_total"] == sum(each.num_spec_steps for each in told)
    assert counted[f"{prefix}draft_tokens_total"] == sum(each.num_draft_tokens for each in told)
    accepted = sum(each.num_accepted_draft_tokens for each in told)
    assert counted[f"{prefix}accepted_tokens_total"] == accepted > 0
    by_position: Counter[int] = Counter()
    for each in told:
        by_position.update(dict(enumerate(positions(each))))
    for place, count in by_position.items():
        assert counted[f"{prefix}accepted_tokens_per_pos_total[{place}]"] == count
    assert counted["outrider_request_success_total"] == len(replies)
    assert counted["outrider_e2e_request_latency_seconds_count"] == len(replies)
    assert counted["outrider_num_requests_running"] == counted["outrider_num_requests_waiting"] == 0


async def gained(rest: RestStack, **fields: Any) -> tuple[Counter[str], dict[str, Any]]:
    """What one request adds to the counters, and its reply."""
    before = await scraped(rest)
    reply = await rest.ask(COMPLETIONS, **{"prompt": TALE, "seed": 1, **fields})
    after = await scraped(rest)
    after.subtract(before)
    return after, reply


@pytest.mark.parametrize("rule", RULES)
async def test_emitted_tokens_are_accepted_ones_and_one_a_verdict(rest: RestStack, rule: str) -> None:
    """In every request that only its length ends."""
    for length in (1, 33):
        speculation = {"draft_count": 3, "rule": rule}
        counted, reply = await gained(rest, max_tokens=length, ignore_eos=True, speculation=speculation)
        emitted = counted["outrider_generation_tokens_total"]
        assert emitted == reply["usage"]["completion_tokens"] == length
        accepted, verdicts = counted["outrider_spec_decode_num_accepted_tokens_total"], counted[OUTCOMES]
        assert emitted == accepted + verdicts
        assert counted[f"{OUTCOMES}[ended]"] == counted["outrider_dropped_tokens_total"] == 0


@SURFACE
async def test_books_balance_when_text_or_a_token_ends_the_answer(rest: RestStack) -> None:
    """Tokens after a stop string are dropped, and an accepted token that ends an answer has none beside it."""
    full = (await gained(rest, max_tokens=48, ignore_eos=True))[1]["choices"][0]["text"]
    stops = [{"stop": full[start : start + 2]} for start in range(8, len(full) - 2, 9)]
    ends: list[dict[str, Any]] = [{"stop_token_ids": [token_id]} for token_id in range(10, 20)]
    total: Counter[str] = Counter()
    for end in [*stops, *ends]:
        counted, reply = await gained(rest, max_tokens=48, speculation={"draft_count": 4}, **end)
        sent, dropped = counted["outrider_generation_tokens_total"], counted["outrider_dropped_tokens_total"]
        accepted = counted["outrider_spec_decode_num_accepted_tokens_total"]
        assert sent == reply["usage"]["completion_tokens"]
        assert sent + dropped == accepted + counted[OUTCOMES] - counted[f"{OUTCOMES}[ended]"]
        total += counted
    # Both ways to end were there.
    assert total["outrider_dropped_tokens_total"]
    assert total[f"{OUTCOMES}[ended]"]
