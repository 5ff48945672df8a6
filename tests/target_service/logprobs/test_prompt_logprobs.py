"""Log-probabilities of a prompt: complete and right in chunks, with bounded logits, whatever happens to its cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.basics import Answers, check_empty, spec_of
from support.drafting.rules import Entries, all_entries, asking, first_entries, of_text, plain_tokens
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, plain

from outrider.engine import runner as runner_module
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelFault
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import Step

LONG_PROMPT = tuple((7 * number + 3) % VOCABULARY_SIZE for number in range(75))


@pytest.fixture
def expected_prompt(runner: ModelRunner) -> Entries:
    return of_text(runner, LONG_PROMPT)


@pytest.fixture
def chunked(folder: Path) -> Iterator[Target]:
    """A target that computes nine rows at a time, with a cache of 96 tokens."""
    loaded = ModelRunner.load(str(folder), dtype="float32", kv_tokens=96)
    loaded.max_rows = 9
    made = Target(loaded)
    yield made
    made.table.clear()
    check_empty(loaded.pool)


def test_a_prompt_in_chunks_has_the_same_numbers(chunked: Target, expected_prompt: Entries) -> None:
    """Even with a proposal that waits for its last token."""
    spec = asking(spec_of(LONG_PROMPT, 90, eos=()))
    target = chunked
    target.open(spec, tree=TokenTree.chain([1, 2, 3]))
    assert first_entries(target.run()) == expected_prompt


def test_logits_of_a_prompt_are_bounded(
    target: Target, expected_prompt: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for ten rows' logits, no forward computes more besides those to draw after; numbers stay."""
    monkeypatch.setattr(runner_module, "MAX_PREFIX_LOGITS", 10 * VOCABULARY_SIZE)
    forward, sizes = target.runner.forward, []

    def measured(feeds, max_prompt_rows):  # noqa: ANN001, ANN202 - as the runner's
        result = forward(feeds, max_prompt_rows)
        sizes.append(result.logits.shape[0])
        return result

    monkeypatch.setattr(target.runner, "forward", measured)
    other = replace(asking(spec_of(LONG_PROMPT[::-1], 90, eos=())), logprob_count=0)
    answers = Answers()
    target.sessions.open(Fence(bytes(16), 1, 75), other, Step(EMPTY, 0, 0), answers)
    target.open(asking(spec_of(LONG_PROMPT, 90, eos=())))
    assert first_entries(target.run()) == expected_prompt
    assert len(first_entries(answers)) == 74
    assert max(sizes) <= 12
    assert len(sizes) >= 15


def test_a_cache_that_is_lost_costs_no_number(chunked: Target, expected_prompt: Entries) -> None:
    """Preempted in the middle of the prompt, again and again."""
    chunked.open(asking(spec_of(LONG_PROMPT, 90, eos=())))
    for num_steps in (1, 3, 5):
        for _ in range(num_steps):
            chunked.device.step(chunked.verifier.advance)
        assert chunked.held.session.cached_len > 0
        chunked.held.session.free()
    assert first_entries(chunked.run()) == expected_prompt


def test_two_that_take_turns_have_their_numbers(chunked: Target, runner: ModelRunner) -> None:
    """The pool holds one of them; the later one waits or begins again."""
    answers = Answers()
    second = asking(spec_of(LONG_PROMPT[:60], 80, eos=()))
    chunked.open(asking(spec_of(LONG_PROMPT, 90, eos=())), budget=15)
    chunked.sessions.open(Fence(bytes(16), 1, 60), second, Step(EMPTY, 20, 0), answers)
    first = chunked.run()
    tokens = chunked.tokens
    assert all_entries(first, asking(spec_of(LONG_PROMPT))) == of_text(runner, tokens)
    assert first_entries(answers) == of_text(runner, LONG_PROMPT[:60])


def test_a_cached_prompt_is_read_again(target: Target, runner: ModelRunner, expected_prompt: Entries) -> None:
    """Opened without log-probabilities, then with them; rolled back to its prompt; opened once more."""
    spec = spec_of(LONG_PROMPT, 90, eos=())
    target.open(spec, budget=5)
    target.run()
    assert target.held.session.cached_len > 75
    target.open(asking(spec), epoch=2, budget=5)
    answers = target.run()
    assert first_entries(answers) == expected_prompt
    target.step(3, 75, budget=5)
    assert target.run() != []
    assert target.tokens == plain_tokens(runner, spec)[:81]
    target.sessions.rollback(target.fence(4, 75))
    target.step(4, 75)
    assert first_entries(target.run()) == expected_prompt


def test_half_a_prompt_that_is_cached_is_read_again(chunked: Target, expected_prompt: Entries) -> None:
    """Its job was stopped in the middle, and its numbers are gone."""
    spec = asking(spec_of(LONG_PROMPT, 90, eos=()))
    chunked.open(spec)
    for _ in range(4):
        chunked.device.step(chunked.verifier.advance)
    assert 0 < chunked.held.session.cached_len < 75
    chunked.open(spec, epoch=2)
    assert first_entries(chunked.run()) == expected_prompt


def test_a_session_that_begins_behind_its_prompt_has_none_of_it(runner: ModelRunner, target: Target) -> None:
    """Its gateway has them already."""
    expected = plain(runner, spec_of(PROMPT, 40, eos=()))
    target.open(asking(spec_of(expected[:20], 40, eos=(), prompt_len=len(PROMPT))))
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.prompt_logprobs == ()
    assert list(answer.content.logprobs) == of_text(runner, expected[:21])[19:]


def test_a_prompt_of_one_token_has_none(target: Target) -> None:
    """Nothing comes before it."""
    target.open(asking(spec_of((9,), 5, eos=())))
    [answer] = target.run()
    assert answer.content is not None
    assert (answer.content.prompt_logprobs, len(answer.content.logprobs)) == ((), 1)


def test_a_repeated_verdict_repeats_its_numbers(target: Target, expected_prompt: Entries) -> None:
    """The answers that are kept for a repetition are whole."""
    spec = asking(spec_of(LONG_PROMPT, 90, eos=()))
    target.open(spec, budget=3)
    answers = target.run()
    target.open(spec)
    assert target.run() == answers
    assert first_entries(answers) == expected_prompt


def test_a_prompt_without_a_distribution_fails_alone(
    target: Target, expected_prompt: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that plain decoding would not look at is a fault of the model; the neighbour loses nothing."""
    forward = target.runner.model.forward
    bad_id = next(token_id for token_id in range(VOCABULARY_SIZE) if token_id not in LONG_PROMPT)

    def spoiled(plan, cache, wanted):  # noqa: ANN001, ANN202 - as the model's
        bad = plan.token_ids[wanted] == bad_id
        return forward(plan, cache, wanted).masked_fill(bad[:, None], torch.nan)

    monkeypatch.setattr(target.runner.model, "forward", spoiled)
    culprit = asking(spec_of((bad_id, *PROMPT), 90))
    target.open(asking(spec_of(LONG_PROMPT, 90, eos=())))
    target.sessions.open(Fence(bytes(16), 1, 6), culprit, Step(EMPTY, 0, 0), target.answers)
    good, bad = target.device.tasks
    target.verifier.advance([good, bad])
    [error] = [each.error for each in target.answers if each.error is not None]
    assert isinstance(error, ModelFault)
    assert first_entries(target.answers) == expected_prompt
