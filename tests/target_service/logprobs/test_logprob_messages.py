"""Log-probabilities and bans of a target service over real links."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.basics import spec_of
from support.models.tiny_models import PROMPT
from support.services.session_clients import TargetClient

from outrider.errors import InvalidRequest
from outrider.parameters import TokenLogprob
from outrider.rpc import wire
from outrider.rpc.messages.round import logprobs_from
from target_service import servicer

SPEC = spec_of(PROMPT, 20, eos=())


async def verdicts(client: TargetClient, count: int) -> tuple[list[TokenLogprob], list[TokenLogprob], list[int]]:
    """Entries of the prompt, entries of the tokens, and the tokens of plain verdicts."""
    prompt, entries, tokens = [], [], []
    for _ in range(count):
        verdict = (await client.read()).verdict
        prompt += logprobs_from(verdict.prompt_logprobs)
        entries += logprobs_from(verdict.logprobs)
        tokens.append(verdict.next_token_id)
    await client.close(1)
    return prompt, entries, tokens


async def test_every_token_comes_with_its_number(client: TargetClient) -> None:
    """Greedy: each is the first of its own alternatives; the prompt's come once, all but the first."""
    await client.open(replace(SPEC, logprob_count=3, prompt_logprobs=True), plain_budget=5)
    prompt, entries, tokens = await verdicts(client, 6)
    assert [entry.top_token_ids[0] for entry in entries] == tokens
    assert [entry.top_logprobs[0] for entry in entries] == [entry.logprob for entry in entries]
    assert len(prompt) == len(PROMPT) - 1
    assert all(len(entry.top_token_ids) == len(entry.top_logprobs) == 3 for entry in prompt + entries)


async def test_numbers_come_when_asked_for_only(client: TargetClient) -> None:
    """None by default."""
    await client.open(SPEC, plain_budget=2)
    assert (await verdicts(client, 3))[:2] == ([], [])


async def test_none_of_the_prompt_unless_asked_for(client: TargetClient) -> None:
    """And no alternatives with a count of 0."""
    await client.open(replace(SPEC, logprob_count=0), plain_budget=2)
    prompt, entries, _ = await verdicts(client, 3)
    assert prompt == []
    assert [entry.top_token_ids for entry in entries] == [()] * 3


async def test_a_prompt_too_long_for_a_message_is_refused(
    client: TargetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its open, by field, value and limit; 217 bytes an entry of 20 alternatives leave room for four here."""
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", servicer.OTHER_VERDICT_BYTES + 5 * 217 - 1)
    await client.open(replace(SPEC, logprob_count=20, prompt_logprobs=True))
    message = r"^session\.prompt_len is 6, but must be at most 5 under prompt_logprobs with logprob_count 20$"
    with pytest.raises(InvalidRequest, match=message):
        await client.read()


async def test_what_fits_into_a_message_is_not_refused(client: TargetClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five entries for six tokens; nor are log-probabilities of the output alone."""
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", servicer.OTHER_VERDICT_BYTES + 5 * 217)
    await client.open(replace(SPEC, logprob_count=20, prompt_logprobs=True))
    assert len((await verdicts(client, 1))[0]) == 5


@pytest.mark.slow
async def test_the_longest_prompt_has_room(client: TargetClient) -> None:
    """A thousand tokens with 20 alternatives each, in chunks and in one message."""
    spec = spec_of([number % 4000 + 1 for number in range(1000)], 1010, eos=())
    await client.open(replace(spec, logprob_count=20, prompt_logprobs=True))
    assert len((await verdicts(client, 1))[0]) == 999


async def test_banned_sequences_do_not_occur(client: TargetClient) -> None:
    """The greedy answer with its second token forbidden after the first, and with the first forbidden everywhere."""
    await client.open(SPEC, plain_budget=7)
    first, second, *_ = (await verdicts(client, 8))[2]
    again = client.beside()
    await again.open(replace(SPEC, banned=((first, second),)), plain_budget=7)
    tokens = (await verdicts(again, 8))[2]
    assert tokens[0] == first
    assert (first, second) not in pairwise(tokens)
    last = client.beside()
    await last.open(replace(SPEC, banned=((PROMPT[-1], first), (second,))), plain_budget=7)
    tokens = (await verdicts(last, 8))[2]
    assert tokens[0] != first
    assert second not in tokens
