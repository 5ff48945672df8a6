"""The gateway's figures: their books balance, mean what vLLM's mean, and are there under its names when asked for."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.basics import spec_of
from support.observability import families, findings
from support.requests.answer_events import ended
from support.services.markov import round_of
from support.services.markov_services import WORDS, MarkovStack, Mischief, markov_stack, request

from gateway.generation.events import CompletionEvent, OutputToken, RoundEvent
from gateway.generation.request import CheckedRequest
from gateway.metrics import GatewayMetrics
from gateway.rounds.round import AheadRound, BranchOutcome, DrafterId, FallbackReason, HopCost, Proposal, TokenOrigin
from outrider.errors import InvalidRequest, Overloaded, PeerLost
from outrider.parameters import FinishReason
from outrider.process.metrics import new_registry
from outrider.token_tree import TokenTree
from outrider.v1 import generation_service_pb2 as pb

PLAIN, ACCEPTED = TokenOrigin.PLAIN, TokenOrigin.ACCEPTED
CORRECTION, BONUS = TokenOrigin.CORRECTION, TokenOrigin.BONUS


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Every series of an exposition that is right, by its name and the values of its labels."""
    text = generate_latest(registry).decode()
    assert findings(text) == []
    found = {}
    for family in families(text).values():
        for sample in family.samples:
            found[" ".join([sample.name.removeprefix("outrider_"), *sample.labels.values()])] = sample.value
    return found


def round_event(origins: Sequence[TokenOrigin], num_spoken: int | None = None, **changes: Any) -> RoundEvent:
    """A round with a token for each origin, all of which were spoken unless a number is given."""
    fields: dict[str, Any] = {
        "accepted_count": sum(origin is ACCEPTED for origin in origins),
        "draft_compute_us": 1_000,
        "verify_compute_us": 2_000,
        "round_us": 5_000,
        "draft_hop": HopCost(200, 1_700, 30),
        "verify_hop": HopCost(100, 2_400, 70),
    }
    committed = round_of(range(len(origins)), origins, **{**fields, **changes})
    spoken = tuple(OutputToken(token_id, origin, "") for token_id, origin in enumerate(origins))
    return RoundEvent(spoken[:num_spoken], committed, elapsed_us=30_000)


def completion(**changes: Any) -> CompletionEvent:
    """The end of a sample of eleven tokens."""
    return ended(**{"prompt_tokens": 5, "cached_prompt_tokens": 3, "completion_tokens": 11, **changes})


def counted(*events: RoundEvent | CompletionEvent) -> dict[str, float]:
    """What events count up to."""
    registry = new_registry()
    metrics = GatewayMetrics(registry)
    for event in events:
        metrics.observe(event)
    return values(registry)


def test_rounds_are_counted_as_vllm_counts_them() -> None:
    """Accepted tokens exclude the target's own, and a verdict on nothing is no draft."""
    found = counted(
        round_event([PLAIN], is_first=True),
        round_event([ACCEPTED, ACCEPTED, CORRECTION], draft_count=4, evaluated_count=3),
        round_event([ACCEPTED, BONUS], draft_count=1, evaluated_count=1),
        round_event([CORRECTION], draft_count=2, evaluated_count=1),
        round_event([PLAIN], fallback_reason=FallbackReason.DRAFT_LATE),
        round_event([ACCEPTED], draft_count=3, evaluated_count=1, finish_reason=FinishReason.EOS),
    )
    name = "spec_decode_num_"
    assert [found[f"{name}{each}_total"] for each in ("drafts", "draft_tokens", "accepted_tokens")] == [4, 10, 4]
    assert found[f"{name}evaluated_tokens_total"] == 6
    assert [found[f"{name}accepted_tokens_per_pos_total {position}"] for position in "01"] == [3, 1]
    outcomes = {"plain": 1, "corrected": 2, "bonus": 1, "fallback": 1, "ended": 1}
    assert {each: found[f"round_outcomes_total {each}"] for each in outcomes} == outcomes
    assert found["fallback_rounds_total draft_late"] == 1
    assert found["generation_tokens_total"] == 9
    assert (found["wire_bytes_total draft"], found["wire_bytes_total target"]) == (120, 420)


def test_branches_are_counted_by_what_came_of_them() -> None:
    """And the draft's bytes of such a round, which may have no proposal; a round without branches is in no series."""
    events = [round_event([PLAIN]), *(round_event([PLAIN]) for _ in range(6))]
    for event, outcome in zip(events[1:], [*BranchOutcome, *BranchOutcome], strict=True):
        event.committed.ahead = AheadRound(DrafterId(), 4, 16, outcome)
    found = counted(*events)
    assert {key: value for key, value in found.items() if key.startswith("branches_total")} == {
        f"branches_total {outcome}": 2 for outcome in ("hit", "miss", "late")
    }
    assert found["wire_bytes_total draft"] == 180


def test_each_drafter_has_its_part_of_what_was_drafted() -> None:
    """By the name that its rounds have; one without a name is the draft service's own choice."""
    named = round_event([ACCEPTED, CORRECTION], draft_count=3, evaluated_count=2)
    named.committed.proposal = replace(named.committed.proposal, drafter=DrafterId("eagle3"))
    found = counted(named, named, round_event([ACCEPTED, BONUS], draft_count=1, evaluated_count=1))
    name = "drafter_draft_tokens_total"
    assert (found[f"{name} eagle3"], found[f"{name} default"]) == (6, 1)
    name = "drafter_accepted_tokens_total"
    assert (found[f"{name} eagle3"], found[f"{name} default"]) == (2, 1)


def test_rows_of_a_tree_count_for_who_guessed_them_and_by_their_depth() -> None:
    """A merged tree has several drafters, and its accepted rows are a path, whose positions are depths."""
    merged = round_event([ACCEPTED, ACCEPTED, BONUS], draft_count=4, evaluated_count=2)
    tree = TokenTree((5, 6, 7, 8), (0, 0, 1, 2))
    merged.committed.proposal = Proposal(tree, sources=("model", "lookup", "model", ""))
    merged.committed.verdict.accepted_rows = (2, 4)
    found = counted(merged, merged)
    drafters = ("model", "lookup", "default")
    assert [found[f"drafter_draft_tokens_total {each}"] for each in drafters] == [4, 2, 2]
    assert [found[f"drafter_accepted_tokens_total {each}"] for each in drafters] == [0, 2, 2]
    at_position = [found[f"spec_decode_num_accepted_tokens_per_pos_total {position}"] for position in "01"]
    assert at_position == [2, 2]
    assert "spec_decode_num_accepted_tokens_per_pos_total 3" not in found


def test_tokens_behind_a_stop_string_are_counted_apart() -> None:
    """They were accepted and decoded, and no client was sent them."""
    found = counted(round_event([ACCEPTED, ACCEPTED, BONUS], num_spoken=1, draft_count=2, evaluated_count=2))
    assert (found["generation_tokens_total"], found["dropped_tokens_total"]) == (1, 2)
    assert found["spec_decode_num_accepted_tokens_total"] == 2


def test_where_the_time_of_a_round_goes() -> None:
    """Overhead is what neither queue nor computing took, and the prompt's own pass is in no figure of rounds."""
    speculative = round_event([ACCEPTED, BONUS], draft_count=1, evaluated_count=1)
    found = counted(speculative, round_event([PLAIN]), round_event([PLAIN], is_first=True, verify_compute_us=9_000))
    sums = {name: found[f"{name}_seconds_sum"] for name in ("draft_compute", "draft_rpc", "draft_rpc_overhead")}
    assert sums == pytest.approx({"draft_compute": 0.001, "draft_rpc": 0.0017, "draft_rpc_overhead": 0.0005})
    assert found["verify_rpc_overhead_seconds_sum"] == pytest.approx(0.0003)
    assert found["round_seconds_count"] == found["verify_rpc_seconds_count"] == 1
    assert found["verify_compute_seconds_count"] == found["inter_token_latency_seconds_count"] == 2
    assert (found["prompt_compute_seconds_count"], found["prompt_compute_seconds_sum"]) == (1, 0.009)
    own = round_event([ACCEPTED, BONUS], draft_count=1, evaluated_count=1)
    own.committed.verdict.own = own.committed.proposal
    hosted = counted(own)
    assert hosted["draft_compute_seconds_count"] == hosted["round_seconds_count"] == 1
    assert hosted["draft_rpc_seconds_count"] == hosted["verify_rpc_seconds_count"] == 0
    gaps = counted(round_event([PLAIN], gap_us=7_000))
    assert gaps["inter_token_latency_seconds_sum"] == pytest.approx(0.007)
    early = counted(round_event([ACCEPTED, BONUS], draft_count=1, verify_hop=HopCost(0, 10, 0)))
    assert early["verify_rpc_overhead_seconds_sum"] == 0


def test_the_first_token_is_counted_when_it_comes() -> None:
    """Once a sample, and whether or not the sample ends."""
    found = counted(round_event([PLAIN], is_first=True), round_event([PLAIN]))
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(0.03)
    assert counted(completion())["time_to_first_token_seconds_count"] == 0


def test_what_users_feel() -> None:
    """The time of a token is that after the first; the samples of a request share its prompt."""
    found = counted(completion(), completion(sample_index=1, completion_tokens=1, finish_reason=FinishReason.LENGTH))
    assert found["request_time_per_output_token_seconds_count"] == 1
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.01)
    assert found["request_prefill_time_seconds_sum"] == pytest.approx(0.04)
    assert found["request_decode_time_seconds_sum"] == pytest.approx(0.2)
    assert found["request_inference_time_seconds_sum"] == pytest.approx(0.24)
    assert (found["prompt_tokens_total"], found["cached_prompt_tokens_total"]) == (5, 3)
    assert (found["request_success_total stop"], found["request_success_total length"]) == (1, 1)
    assert found["request_generation_tokens_sum"] == 12


def test_how_requests_end_before_their_time() -> None:
    """Turned away with a reason, left by the client, or failed; one that ended well was counted with its samples."""
    registry = new_registry()
    metrics = GatewayMetrics(registry)
    for error in (Overloaded("full"), InvalidRequest("a", 1, "2"), Overloaded("full")):
        metrics.rejected(error, None)
    for end in (None, asyncio.CancelledError(), PeerLost("gone")):
        metrics.ended(end)
    plan = CheckedRequest(spec_of([1, 2, 3], max_len=43), (), None, sample_count=2)
    metrics.admitted([plan])
    metrics.placed(0.25)
    metrics.placed(0.5)
    found = values(registry)
    assert (found["admission_rejections_total overloaded"], found["admission_rejections_total invalid_request"]) == (
        2,
        1,
    )
    assert (found["request_success_total abort"], found["request_success_total error"]) == (1, 1)
    assert found["request_queue_time_seconds_sum"] == 0.75
    assert (found["request_params_n_sum"], found["request_params_max_tokens_sum"]) == (2, 40)


@pytest.fixture
async def stack(tokenizer: str) -> AsyncIterator[MarkovStack]:
    """The gateway over tiny services, whose registry is read as it is."""
    async with markov_stack(tokenizer) as running:
        yield running


def registry_of(stack: MarkovStack) -> CollectorRegistry:
    """What a running gateway exports."""
    metrics = stack.gateway.frontend.metrics
    assert isinstance(metrics, GatewayMetrics)
    return metrics.registry


def scraped(stack: MarkovStack) -> dict[str, float]:
    """The figures of a running gateway."""
    return values(registry_of(stack))


async def test_the_books_balance(stack: MarkovStack) -> None:
    """Over rounds of every kind, tokens sent and dropped are those accepted and one a verdict; sums equal the usage."""
    stack.draft.mischief = {9: Mischief.LATE}
    completions: list[pb.Completion] = []
    kinds: list[dict[str, Any]] = [{}, {"draft_count": 0}, {"draft_count": 8}, {"draft_count": None}, {"seed": 3}]
    for changes in [*kinds, *({"stop": [word], "draft_count": 8} for word in WORDS[1:6])]:
        completions.append((await stack.run(request(**{"draft_count": 4, **changes})))[1])
    found = scraped(stack)
    outcomes = {key.split()[1]: value for key, value in found.items() if key.startswith("round_outcomes_total")}
    own_tokens = sum(outcomes.values()) - outcomes.get("ended", 0)
    sent, dropped = found["generation_tokens_total"], found["dropped_tokens_total"]
    accepted = found["spec_decode_num_accepted_tokens_total"]
    assert sent + dropped == accepted + own_tokens
    assert dropped > 0
    assert sent == sum(each.usage.completion_tokens for each in completions)
    assert found["prompt_tokens_total"] == sum(each.usage.prompt_tokens for each in completions)
    for name, field in (("draft", "draft"), ("accepted", "accepted"), ("evaluated", "evaluated")):
        total = sum(getattr(each.speculation, f"{field}_tokens") for each in completions)
        assert found[f"spec_decode_num_{name}_tokens_total"] == total
    assert found["spec_decode_num_drafts_total"] == found["round_seconds_count"] > 0
    by_position = [value for key, value in found.items() if key.startswith("spec_decode_num_accepted_tokens_per_pos")]
    assert sum(by_position) == accepted
    fallbacks = sum(value for key, value in found.items() if key.startswith("fallback_rounds"))
    assert fallbacks == sum(each.speculation.fallback_rounds for each in completions) > 0


async def test_rollbacks_and_services_are_looked_up(stack: MarkovStack) -> None:
    """A draft that is late is rolled back, which is timed; services that are there are up."""
    stack.draft.mischief = {9: Mischief.LATE}
    await stack.run(request())
    found = scraped(stack)
    drafted = found["spec_decode_num_draft_tokens_total"]
    rejected = drafted - found["spec_decode_num_accepted_tokens_total"]
    assert found["rollback_rpc_seconds_count draft"] == 1
    assert found["rollback_rpc_seconds_count target"] == 0
    assert found["rolled_back_tokens_total target"] == rejected > 0
    assert found["rolled_back_tokens_total draft"] >= rejected
    up = {key.split()[1]: value for key, value in found.items() if key.startswith("service_up")}
    assert sorted(up.values()) == [1, 1]
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert 0 <= found["current_draft_tokens"] <= 8
