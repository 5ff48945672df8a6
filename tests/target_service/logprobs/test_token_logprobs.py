"""Log-probabilities of a session's tokens: those of the raw logits, and bitwise the same however the tokens came."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import Answers, check_empty, spec_of
from support.drafting.rules import COUNT, Entries, all_entries, asking, of_text, plain_tokens
from support.models.model_cases import logprobs_and_reach, reference
from support.models.tiny_models import TARGET
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, plain

from outrider.engine.runner import ModelRunner
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import Acceptance, DraftDistribution, Rule, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service import verifier
from target_service.states import Step

LONG_PROMPT = tuple((7 * number + 3) % VOCABULARY_SIZE for number in range(75))
WANTED = {
    "greedy": {"temperature": 0.0},
    "shaped": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
}


def decode(target: Target, spec: SessionSpec, expected: Sequence[int], num_drafts: int) -> list[SessionAnswer]:
    """Rounds to the end, with proposals of which every third has a wrong token; the answers."""
    target.open(spec)
    answers = target.run()
    while target.held.finish_reason is None:
        base_len = len(target.tokens)
        guesses = list(expected[base_len : min(base_len + num_drafts, spec.max_len - 1)])
        if base_len % 3 == 0 and guesses:
            guesses[-1] = (guesses[-1] + 1) % VOCABULARY_SIZE
        target.step(1, base_len, guesses)
        answers += target.run()
    return answers


def check_against(folder: Path, token_ids: Sequence[int], entries: Entries) -> None:
    """What transformers says about each token but the first, up to float32's rounding, and about the alternatives;
    those are the most probable ones, in order.
    """
    rows, limit = logprobs_and_reach(reference(folder), token_ids)
    for row, token_id, entry in zip(rows[:-1], token_ids[1:], entries, strict=True):
        assert abs(entry.logprob - float(row[token_id])) < limit
        for expected in (row[list(entry.top_token_ids)], row.topk(COUNT).values):
            assert entry.top_logprobs == pytest.approx(expected.tolist(), rel=0, abs=limit)


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("name", WANTED)
def test_numbers_are_those_of_transformers(
    runner: ModelRunner, target: Target, folder: Path, name: str, num_drafts: int
) -> None:
    """Prompt and output, whatever the sampling parameters do to the distribution that is drawn from."""
    spec = asking(spec_of(LONG_PROMPT, 100, eos=(), **WANTED[name]))
    expected = plain_tokens(runner, spec)
    entries = all_entries(decode(target, spec, expected, num_drafts), spec)
    assert target.tokens == expected
    check_against(folder, expected, entries)


@pytest.mark.slow
def test_numbers_of_the_embedded_target_are_those_of_transformers() -> None:
    """A trained model, whose distributions are peaked."""
    target = Target(ModelRunner.load(str(TARGET), dtype="float32", kv_tokens=1024))
    spec = asking(spec_of((0, 401, 913, 260, 555, 12), 60, eos=()))
    target.open(spec, budget=60)
    entries = all_entries(target.run(), spec)
    check_against(TARGET, target.tokens, entries)
    target.table.clear()
    check_empty(target.runner.pool)


@pytest.mark.parametrize("name", WANTED)
def test_numbers_do_not_depend_on_proposals_and_neighbours(runner: ModelRunner, target: Target, name: str) -> None:
    """Bit for bit: no drafts, four, a batch of sixteen with others who want none, and one prompt of the whole text."""
    spec = asking(spec_of(PROMPT, 40, seed=11, eos=(), **WANTED[name]))
    expected = plain_tokens(runner, spec)
    with_drafts, without = Target(runner), Target(runner)
    found = [
        all_entries(decode(without, spec, expected, 0), spec),
        all_entries(decode(with_drafts, spec, expected, 4), spec),
    ]
    neighbours = [spec_of((*PROMPT, number), 30 + number, seed=number, eos=(), temperature=1.0) for number in range(15)]
    for number, neighbour in enumerate(neighbours):
        wanted = asking(neighbour, number) if number % 3 else neighbour
        step = Step(EMPTY, 60, 0)
        target.sessions.open(Fence(bytes([number] * 16), 1, 6), wanted, step, Answers())
    target.open(spec, budget=60)
    found.append(all_entries(target.run(), spec))
    assert target.tokens == with_drafts.tokens == without.tokens == expected
    assert found == [of_text(runner, expected)] * 3
    for other in (with_drafts, without):
        other.table.clear()


def test_rows_of_a_tree_have_the_numbers_of_their_paths(runner: ModelRunner, target: Target) -> None:
    """Accepted rows that do not follow each other, and the bonus after the last of them."""
    spec = asking(spec_of(PROMPT, 40, eos=()))
    expected = plain_tokens(runner, spec)
    target.open(spec)
    target.run()
    wrong = [(token + 1) % VOCABULARY_SIZE for token in expected]
    tree = TokenTree((wrong[6], expected[6], wrong[7], expected[7]), (0, 0, 2, 2))
    target.sessions.step(target.fence(1, 6), Step(tree, 0, 0), target.answers)
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.accepted_rows == (2, 4)
    assert list(answer.content.logprobs) == of_text(runner, expected)[5:8]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_numbers_are_those_of_the_text_under_every_rule(
    runner: ModelRunner, target: Target, rule: Rule, temperature: float
) -> None:
    """Whether a token was accepted, corrected or a bonus: the number is the target's, of the text that was made."""
    spec = asking(spec_of(PROMPT, 40, eos=(), temperature=temperature))
    spec = replace(spec, acceptance=Acceptance(rule=rule))
    expected = plain_tokens(runner, spec)
    target.open(spec)
    answers = target.run()
    while target.held.finish_reason is None:
        base_len = len(target.tokens)
        guesses = expected[base_len : min(base_len + 3, 39)]
        distributions = [DraftDistribution((token, (token + 1) % VOCABULARY_SIZE), (3, 1)) for token in guesses]
        tree = TokenTree.chain(guesses, distributions if rule.needs_distributions else ())
        target.sessions.step(target.fence(1, base_len), Step(tree, 0, 0), target.answers)
        answers += target.run()
    assert any(answer.content and answer.content.accepted_rows for answer in answers)
    assert all_entries(answers, spec) == of_text(runner, target.tokens)


def test_an_end_inside_a_proposal_ends_the_numbers(runner: ModelRunner, target: Target) -> None:
    """No token after a stop token, and no number."""
    expected = plain(runner, spec_of(PROMPT, 40, eos=()))
    stop = expected[7]
    length = expected.index(stop, 5) + 1
    target.open(asking(spec_of(PROMPT, 40, eos=(), stops=(stop,))), tree=TokenTree.chain(expected[5:10]))
    [answer] = target.run()
    assert answer.content is not None
    assert len(answer.content.logprobs) == len(answer.content.token_ids) == length - 5
    assert list(answer.content.logprobs) == of_text(runner, expected)[4 : length - 1]


def test_who_asks_for_none_pays_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed, and no more logits than are drawn after."""

    def refuse(*_arguments: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(verifier, "row_logprobs", refuse)
    target.open(spec_of(LONG_PROMPT, 90, eos=()), budget=5)
    assert len(target.run()) == 6
