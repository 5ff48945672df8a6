"""Trees through a whole gateway: every surface reports the same rows, who guessed them, and what was kept."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from support.services.markov import MarkovModel, branching_tree, plain_decoding
from support.services.markov_services import SEED, MarkovStack, markov_stack, request

from outrider.client.events import event_from
from outrider.v1 import generation_service_pb2 as pb

BODY = {"prompt": "fox sea", "seed": SEED, "max_tokens": 40}


@pytest_asyncio.fixture
async def stack(tokenizer: str) -> AsyncIterator[MarkovStack]:
    """A gateway with REST, whose draft proposes trees."""
    async with markov_stack(tokenizer, rest_listen="127.0.0.1:0") as running:
        running.draft.branching = True
        yield running


@pytest_asyncio.fixture
async def http(stack: MarkovStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows nothing of the protocol."""
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}", trust_env=False) as client:
        yield client


def asked(*, return_rounds: bool = True, drafter: str = "model") -> pb.GenerateRequest:
    """A request for eight guesses a round."""
    made = request(draft_count=8)
    made.speculation.return_rounds, made.speculation.drafter = return_rounds, drafter
    return made


def rows_of(told: pb.Round) -> dict[int, tuple[int, str]]:
    """The parent and the drafter of every row that a round reports."""
    kept = [token for token in told.tokens if token.origin == pb.TOKEN_ORIGIN_ACCEPTED]
    rows, above = dict[int, tuple[int, str]](), 0
    for token in kept:
        rows[token.row], above = (above, token.drafter), token.row
    return rows | {guess.row: (guess.parent, guess.drafter) for guess in told.rejected}


async def test_rounds_tell_whole_trees(stack: MarkovStack) -> None:
    """Kept and rejected rows make up the tree that the draft proposed, and the tokens are those of plain decoding."""
    rounds, _ = await stack.run(asked())
    token_ids = [token.token_id for each in rounds for token in each.tokens]
    assert (3, 5, *token_ids) == plain_decoding(MarkovModel(), (3, 5), SEED, 42)
    assert sum(len(each.rejected) > 0 for each in rounds) > 3
    for each in rounds:
        rows = rows_of(each)
        tree = branching_tree([0] * (each.facts.draft_count // 2))
        assert [rows[row] for row in range(1, len(tree) + 1)] == [(parent, "model") for parent in tree.parents]
        for guess in each.rejected:
            assert guess.value == tree.values[guess.row - 1]
        own = [token for token in each.tokens if token.origin != pb.TOKEN_ORIGIN_ACCEPTED]
        assert [(token.row, token.drafter) for token in own] == [(0, "")] * len(own)
    # The guess stands after a wrong sibling, so that its row is not its token's place in the round.
    assert max(token.row for each in rounds for token in each.tokens) == 8


async def test_nothing_is_told_that_was_not_asked_for(stack: MarkovStack) -> None:
    """Without return_rounds there are no rows; the figures by drafter are there in any case."""
    rounds, completion = await stack.run(asked(return_rounds=False, drafter=""))
    assert not any(each.rejected or any(token.row for token in each.tokens) for each in rounds)
    figures = completion.speculation
    [only] = figures.drafters
    assert (only.drafter, only.draft_tokens, only.accepted_tokens) == (
        "",
        figures.draft_tokens,
        figures.accepted_tokens,
    )
    assert figures.accepted_tokens > 0


async def test_siblings_count_as_one_evaluated_guess(stack: MarkovStack) -> None:
    """However many stood side by side, a round tests one guess more than it keeps where it corrects, else none more."""
    rounds, completion = await stack.run(asked())
    corrected = [each.tokens[-1].origin == pb.TOKEN_ORIGIN_CORRECTION for each in rounds]
    evaluated = [each.facts.evaluated_count - each.facts.accepted_count for each in rounds]
    assert evaluated == corrected
    assert sum(evaluated) > 3
    figures = completion.speculation
    assert figures.evaluated_tokens == sum(each.facts.evaluated_count for each in rounds) < figures.draft_tokens


async def test_the_python_client_reads_all_of_it(stack: MarkovStack) -> None:
    """Rows of tokens and guesses, values, and the figures of each drafter."""
    rounds, completion = await stack.run(asked())
    for message in rounds:
        event: Any = event_from(pb.GenerateResponse(round=message))
        assert [(token.row, token.drafter) for token in event.tokens] == [(e.row, e.drafter) for e in message.tokens]
        assert [(guess.row, guess.parent, guess.drafter, guess.value) for guess in event.rejected] == [
            (each.row, each.parent, each.drafter, each.value) for each in message.rejected
        ]
    result: Any = event_from(pb.GenerateResponse(completion=completion))
    [only] = result.speculation.drafters
    assert (only.drafter, only.accepted_tokens) == ("model", completion.speculation.accepted_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_rest_tells_figures_by_drafter(http: httpx.AsyncClient, stack: MarkovStack, stream: bool) -> None:
    """In the reply's own object, whole and streamed, the same as over gRPC; and the prediction's part of the usage."""
    _, completion = await stack.run(asked())
    body: dict[str, Any] = {**BODY, "speculation": {"draft_count": 8, "drafter": "model"}}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await http.post("/v1/completions", json=body)
    told = httpx.Response(200, text=response.text.split("data: ")[-2]).json() if stream else response.json()
    only = completion.speculation.drafters[0]
    assert told["outrider"]["drafters"] == [
        {"drafter": "model", "draft_tokens": only.draft_tokens, "accepted_tokens": only.accepted_tokens}
    ]
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0}
    assert told["usage"]["completion_tokens_details"] == details


async def test_metrics_count_a_tree_by_depth(http: httpx.AsyncClient, stack: MarkovStack) -> None:
    """Accepted tokens by position are those of each depth, and each drafter has its rows."""
    rounds, completion = await stack.run(asked())
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    for depth in range(4):
        reached = sum(each.facts.accepted_count > depth for each in rounds)
        assert found["outrider_spec_decode_num_accepted_tokens_per_pos_total", str(depth)] == reached > 0
    assert found["outrider_drafter_draft_tokens_total", "model"] == completion.speculation.draft_tokens
    assert found["outrider_drafter_accepted_tokens_total", "model"] == completion.speculation.accepted_tokens
