"""The shadow audit over real connections: what is compared, what is found, and what is left out."""

import asyncio
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from support.basics import PATIENCE_S, eventually, spec_of
from support.requests.answer_events import ended
from support.services.markov_services import MarkovStack, Mischief, markov_stack, request

from gateway.generation import audit
from gateway.generation.request import CheckedRequest
from gateway.rounds.round import Round
from gateway.sessions.peer import ModelInfo
from outrider.errors import PeerLost
from outrider.v1 import types_pb2

EVERYTHING = {"audit_fraction": 1.0, "metrics_listen": "127.0.0.1:0"}


def counts(stack: MarkovStack) -> dict[str, float]:
    """The audit's counters, as Prometheus reads them."""
    assert stack.gateway.metrics is not None
    with urllib.request.urlopen(f"http://{stack.gateway.metrics.address}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_total")]
    return {sample.name + "".join(sample.labels.values()): sample.value for sample in samples}


@pytest.mark.slow
async def test_what_plain_decoding_says_too_is_no_mismatch(tokenizer: str) -> None:
    """Speculative requests, one of them ended by a stop string and one of several samples, are all found right."""
    async with markov_stack(tokenizer, **EVERYTHING) as stack:
        await stack.run(request())
        await stack.run(request(stop=["moon"]))
        for _ in range(2):
            responses = [response async for response in stack.generate(request(sample_count=3))]
            assert sum(response.HasField("completion") for response in responses) == 3
        await eventually(lambda: counts(stack)["outrider_audit_total"] == 8)
        assert counts(stack)["outrider_audit_mismatch_total"] == 0
        await eventually(lambda: stack.target.sessions == 0)


@pytest.mark.slow
async def test_a_token_that_plain_decoding_does_not_say_is_found(tokenizer: str) -> None:
    """A target whose weights changed without the gateway's knowledge."""
    async with markov_stack(tokenizer, **EVERYTHING) as stack:
        await stack.run(request())
        await eventually(lambda: counts(stack)["outrider_audit_total"] == 1)
        stack.target.model = type(stack.target.model)(noise=2.0)
        waiting = stack.gateway.backend.audit
        await stack.run(request())
        stack.target.model = type(stack.target.model)()
        await eventually(lambda: counts(stack)["outrider_audit_total"] == 2)
        assert waiting is stack.gateway.backend.audit
        assert counts(stack)["outrider_audit_mismatch_total"] == 1


async def test_an_audit_asks_for_tokens_only_and_outlives_a_bug(tokenizer: str) -> None:
    """Log-probabilities are not compared, and those of a prompt would take as much of the target as its logits do."""
    asked: list[tuple[int | None, int | None, bool]] = []
    errors = [RuntimeError("a bug"), PeerLost("the target is away")]

    async def decode(request: CheckedRequest, _target: ModelInfo) -> AsyncGenerator[Round, None]:
        asked.append((request.draft_count, request.spec.logprob_count, request.spec.prompt_logprobs))
        raise errors.pop(0)
        yield

    async with markov_stack(tokenizer) as stack:
        target = await stack.gateway.backend.target.after_handshake(PATIENCE_S)
        completion = ended(numerics_ids=(target.numerics_id,))
        request = CheckedRequest(replace(spec_of([5, 6]), logprob_count=20, prompt_logprobs=True), (), None)
        tested = audit.ShadowAudit(1.0, CollectorRegistry())
        auditing = asyncio.create_task(tested.run(decode))
        for _ in range(2):
            tested.offer(request, (), completion, target)
        await eventually(lambda: not errors or auditing.done())
        assert asked == [(0, None, False)] * 2
        auditing.cancel()


async def test_the_address_of_the_metrics_is_told(tokenizer: str) -> None:
    """With port 0 it could not be found otherwise."""
    with capture_logs() as logs:
        async with markov_stack(tokenizer, metrics_listen="127.0.0.1:0") as stack:
            assert stack.gateway.metrics is not None
            address = stack.gateway.metrics.address
    assert [line["address"] for line in logs if line["event"] == "serving metrics"] == [address]


async def test_only_match_is_audited_and_only_in_its_share(tokenizer: str) -> None:
    """A rule that promises the distribution has no tokens to compare; a fraction of 0 takes nothing."""
    async with markov_stack(tokenizer, **EVERYTHING) as stack:
        typical = request(draft_count=0)
        typical.speculation.rule = types_pb2.ACCEPTANCE_RULE_TYPICAL
        await stack.run(typical)
        await stack.run(request())
        await eventually(lambda: counts(stack)["outrider_audit_total"] == 1)
    async with markov_stack(tokenizer, metrics_listen="127.0.0.1:0") as stack:
        await stack.run(request())
        answers = stack.target.answers
        await stack.run(request())
        assert stack.target.answers == 2 * answers
        assert counts(stack)["outrider_audit_total"] == 0


@pytest.mark.slow
async def test_an_audit_that_cannot_be_made_is_counted(tokenizer: str) -> None:
    """The target fails, its numerics are others by now, or more requests wait than one at a time can do."""
    async with markov_stack(tokenizer, **EVERYTHING) as stack:
        await stack.run(request(draft_count=0))
        await eventually(lambda: counts(stack)["outrider_audit_total"] == 1)
        stack.target.mischief = {stack.target.answers + 41: Mischief.FULL}
        await stack.run(request(draft_count=0))
        await eventually(lambda: counts(stack).get("outrider_audit_skipped_totalfailed") == 1)
        await stack.run(request())
        stack.target.numerics_id = "another"
        await eventually(lambda: counts(stack).get("outrider_audit_skipped_totalnumerics") == 1)
        assert counts(stack)["outrider_audit_mismatch_total"] == 0


async def test_no_more_than_a_few_wait_for_their_audit(tokenizer: str) -> None:
    """While the first audit has no answer, the next ones wait, and what is too much is counted and left out."""
    async with markov_stack(tokenizer, **EVERYTHING) as stack:
        # The first answer is that of the request, and the second one its audit's.
        stack.target.mischief = {2: Mischief.FROZEN}
        await stack.run(request(max_tokens=1))
        await eventually(lambda: stack.target.answers == 2)
        for _ in range(audit.MAX_WAITING + 3):
            await stack.run(request(max_tokens=1))
        assert counts(stack)["outrider_audit_skipped_totalbusy"] == 3
