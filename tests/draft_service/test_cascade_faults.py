"""A cascade at its limits: ends, contexts, rows that cannot be drawn, bugs, full pools, guesses that must not leak."""

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.basics import check_empty, spec_of
from support.drafting.cheaper_drafts import (
    CASCADES,
    Oracle,
    ToyCheaper,
    cascade_of,
    plain_proposal,
    stopped,
    toy_cascade,
)
from support.drafting.rules import ruled
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import CONTEXT_LEN, PROMPT, SPEC, Draft, assert_like_fresh

from outrider.drafters.model_drafter import DraftTask
from outrider.drafters.shelf.cascade import Cascade, SmallerDraft, TextDraft, model_cascade, text_cascade
from outrider.drafters.shelf.text_index import TextIndex
from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.parameters import DraftDistribution, Rule, SessionSpec


@pytest.fixture(autouse=True)
def _empty(smaller: ModelRunner, twin: ModelRunner) -> Iterator[None]:
    yield
    check_empty(smaller.pool)
    check_empty(twin.pool)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("cascade", ["oracle", "itself", "smaller+lookup"])
def test_nothing_is_proposed_past_an_end(
    runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, cascade: str, place: int
) -> None:
    """Wherever in a chain it stands; what is cached after it is of use to no session."""
    stop = plain_proposal(runner, SPEC, 8).token_ids[place]
    spec = replace(SPEC, stop_token_ids=frozenset({stop}))
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin))
    draft.open(spec, 8)
    [answer] = draft.run()
    assert answer.content == plain_proposal(runner, spec, 8)
    assert answer.content.token_ids[-1] == stop
    assert len(draft.held.session) == len(PROMPT) + len(answer.content)
    assert_like_fresh(draft)
    draft.table.clear()


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("length", [CONTEXT_LEN - 3, CONTEXT_LEN])
def test_no_guess_lies_past_the_context(
    runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, cascade: str, length: int
) -> None:
    """Neither of the draft nor of what guesses for it."""
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin))
    spec = spec_of(range(1, length + 1), 1000, eos=())
    draft.open(spec, 8)
    assert draft.guesses() == plain_proposal(runner, spec, 8).token_ids
    draft.table.clear()


@pytest.mark.parametrize("fault", [math.nan, -math.inf])
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.BLOCK])
def test_a_row_that_cannot_be_drawn_is_met_as_by_the_draft_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, rule: Rule, fault: float
) -> None:
    """After the third guess: an error under match, a guess of id 0 with its distribution under block."""
    spec, oracle = ruled(SPEC, rule), Oracle(runner)
    plain = plain_proposal(runner, spec, 8)
    forward = runner.forward

    def spoiled(feeds: Sequence[Feed], *others: Any) -> ForwardResult:
        result = forward(feeds, *others)
        for feed, rows in zip(feeds, result.ranges, strict=True):
            for depth, row in enumerate(rows or ()):
                if len(feed.session) + depth == len(PROMPT) + 3:
                    result.logits[row] = fault
        return result

    monkeypatch.setattr(runner, "forward", spoiled)
    oracle.known.clear()
    draft = Draft(runner, cascade=toy_cascade(lambda outer, count: plain.token_ids[len(outer.guesses) :][:count]))
    draft.open(spec, 8)
    draft.device.run(draft.drafter.advance)
    [answer] = draft.answers
    if rule is Rule.MATCH:
        assert "behind 8 tokens, so no token can be drawn" in str(answer.error)
    else:
        assert answer.content == plain_proposal(runner, spec, 8)
        assert answer.content.distributions[3] == DraftDistribution((0,), (65535,))
    draft.table.clear()


class Broken(ToyCheaper):
    """Raises in place of a guess."""

    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("depth", [0, 2])
def test_a_guesser_that_fails_costs_no_guess(runner: ModelRunner, depth: int) -> None:
    """The draft goes on alone; a bug of what guesses is for the log."""
    opened: list[Broken] = []

    def open_broken(_spec: SessionSpec, _salt: bytes | None) -> Broken:
        opened.append(Broken(lambda outer, count: ()))
        return opened[-1]

    draft = Draft(runner, cascade=Cascade(open_broken, depth=depth, clock=stopped))
    with capture_logs() as logs:
        draft.open(SPEC, 8)
        assert draft.guesses() == plain_proposal(runner, SPEC, 8).token_ids
    assert {line["event"] for line in logs if line["log_level"] == "error"} == {"guessing for the draft failed"}
    draft.table.clear()
    assert opened[0].freed


def test_a_smaller_model_without_room_guesses_for_those_it_has_room_for(runner: ModelRunner, folder: Path) -> None:
    """Its cache is its own: the others go on alone, no session gives way, and no block is lost in either pool."""
    tight = ModelRunner.load(str(folder), dtype="float32", kv_tokens=48)
    draft = Draft(runner, cascade=model_cascade(tight, 64, clock=stopped))
    ids, answers = [os.urandom(16) for _ in range(4)], {}
    for number, draft.session_id in enumerate(ids):
        draft.open(spec_of(range(number + 1, number + 20), 60, seed=number, eos=(), temperature=0.7), 8)
    for answer in draft.run():
        answers[answer.fence.session_id] = answer
    for number, session_id in enumerate(ids):
        spec = spec_of(range(number + 1, number + 20), 60, seed=number, eos=(), temperature=0.7)
        assert answers[session_id].content == plain_proposal(runner, spec, 8)
    counts = [answers[session_id].times.forward_count for session_id in ids]
    assert counts[0] < 8 <= min(counts[1:])
    assert tight.pool.num_free < tight.pool.num_blocks
    draft.table.clear()
    check_empty(tight.pool)


def test_a_draft_without_room_for_guesses_verifies_none(folder: Path) -> None:
    """A proposal that just fits alone fits with a cascade; rows of guesses push no session out."""
    small = ModelRunner.load(str(folder), dtype="float32", kv_tokens=64)
    draft = Draft(small, cascade=toy_cascade(lambda outer, count: [1] * count))
    other, first = os.urandom(16), draft.session_id
    draft.open(spec_of(range(1, 29), 60, eos=()), 4)
    draft.session_id = other
    draft.open(spec_of(range(2, 30), 60, eos=()), 4)
    answers = {answer.fence.session_id: answer.content for answer in draft.run()}
    assert {len(tree) for tree in answers.values()} == {4}
    assert set(answers) == {first, other}
    draft.table.clear()
    check_empty(small.pool)


def test_a_smaller_model_reads_a_long_prompt_beside_the_draft(folder: Path, tmp_path: Path) -> None:
    """While it reads there are no guesses, and the draft waits for nothing."""
    long = write_tiny_model(tmp_path / "long", "qwen3", vocab_size=257, context_len=700)
    runner, twin = (ModelRunner.load(str(long), dtype="float32", kv_tokens=2048) for _ in range(2))
    twin.max_rows = 16
    draft = Draft(runner, cascade=model_cascade(twin, 64, clock=stopped))
    spec = spec_of([1 + number % 256 for number in range(300)], 680, eos=(), seed=4, temperature=1.0)
    draft.open(spec, 30)
    [answer] = draft.run()
    assert answer.content == plain_proposal(runner, spec, 30)
    # One step of its own beside each of the draft's, 16 rows of 300 at a time.
    assert 18 < answer.times.forward_count < 22
    draft.table.clear()
    check_empty(twin.pool)


def test_rejected_guesses_reach_no_index(runner: ModelRunner) -> None:
    """After any rounds the index is that of the committed tokens, and other sessions find only those cached."""
    draft = Draft(runner, cascade=text_cascade(clock=stopped))
    tokens, dice = [*PROMPT], random.Random(2)
    draft.open(SPEC, 6)
    for _ in range(12):
        draft.run()
        new = [dice.choice((3, 7, 9)) for _ in range(3)]
        tokens += new
        draft.advance(1, len(tokens), new, 6)
    draft.run()
    cheaper, fresh = draft.held.inner, TextIndex()
    fresh.follow(tokens, len(tokens))
    assert isinstance(cheaper, TextDraft)
    assert vars(cheaper.index) == vars(fresh)
    draft.table.clear()


@pytest.mark.parametrize("depth", [0, 20])
def test_a_smaller_model_publishes_committed_tokens_only(runner: ModelRunner, twin: ModelRunner, depth: int) -> None:
    """Of the draft's guesses and its own no other session finds anything, also where it takes over from the draft."""
    draft = Draft(runner, cascade=model_cascade(twin, 64, depth, clock=stopped))
    spec = replace(SPEC, cache_salt=bytes([depth]))
    draft.open(spec, 40)
    [answer] = draft.run()
    assert isinstance(draft.held.inner, SmallerDraft)
    assert draft.held.inner.session is not None
    reader = twin.open([*PROMPT, *answer.content.token_ids], len(PROMPT), spec.cache_salt)
    assert reader.take_prefix() == 0
    tokens = [*PROMPT, *answer.content.token_ids[:30]]
    draft.advance(1, len(tokens), answer.content.token_ids[:30], 4)
    draft.run()
    assert reader.take_prefix() == len(tokens) // twin.pool.block_size * twin.pool.block_size
    reader.free()
    draft.table.clear()
