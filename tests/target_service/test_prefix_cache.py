"""A target's prefix cache: what an opening finds, what it changes (nothing but the time), and what it never serves."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import check_empty, spec_of
from support.drafting.rules import asking
from support.services.stepped_target import VOCABULARY_SIZE, Target, assert_like_fresh

from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.parameters import SessionSpec

LONG = tuple(range(1, 81))


@pytest.fixture(params=["bfloat16", "float32"])
def target(folder: Path, request: pytest.FixtureRequest) -> Iterator[Target]:
    """A target whose cache has seen nothing; 32 blocks."""
    made = Target(ModelRunner.load(str(folder), dtype=request.param, kv_tokens=512))
    yield made
    made.table.clear()
    check_empty(made.runner.pool)


def said(target: Target, spec: SessionSpec, guesses: int = 0) -> tuple[list[int], int]:
    """The tokens of a session of its own, closed at its end, and the prefix_len of its first verdict.

    With guesses each step has a proposal, whose second token is wrong.
    """
    target.session_id = os.urandom(16)
    target.open(spec)
    [first] = target.run()
    assert first.content is not None
    while target.held.finish_reason is None:
        room = spec.max_len - len(target.tokens)
        proposal = [target.tokens[-1], 255, 7][: min(guesses, room)]
        target.step(1, len(target.tokens), proposal)
        [answer] = target.run()
        assert answer.content is not None
        assert answer.content.prefix_len == 0
    assert_like_fresh(target)
    tokens = list(target.tokens)
    target.table.close(target.fence(1, 1), target.answers)
    return tokens, first.content.prefix_len


@pytest.mark.parametrize("guesses", [0, 3])
def test_a_conversation_sent_again_costs_its_new_turn(target: Target, guesses: int) -> None:
    """Three turns, each with all before it: under `match` the tokens are those of a target without a cache."""
    plain = Target(target.runner, prefix_cache=False)
    turn, found = LONG[:40], []
    for number in range(3):
        spec = spec_of(turn, len(turn) + 30, seed=number, eos=(), temperature=1.0)
        tokens, prefix_len = said(target, spec, guesses)
        assert (tokens, 0) == said(plain, spec)
        found.append(prefix_len)
        turn = (*tokens, *LONG[:10])
    # The last token of an answer was never fed, so that its block may be missing.
    assert found == [0, 64, 96]
    counts = target.sessions.counts()
    assert (counts.prefix_query_tokens, counts.prefix_hit_tokens) == (40 + 80 + 120, 160)
    assert counts.cached_block_count == 9
    assert counts.free_block_count == 32


def test_only_the_new_tokens_are_computed(target: Target) -> None:
    """The rows of the forwards say so, and the tokens found count as cached."""
    said(target, spec_of(LONG, 90, eos=()))
    target.session_id = os.urandom(16)
    target.open(spec_of((*LONG, 5), 90, eos=()))
    assert (target.held.cached_len, target.held.session.token_ids[target.held.session.cached_len :]) == (80, [5])
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.prefix_len == 80


def test_other_salts_find_nothing(target: Target) -> None:
    """And the same one finds all."""
    spec = replace(spec_of(LONG, 90, eos=()), cache_salt=b"tenant")
    said(target, spec)
    assert [said(target, replace(spec, cache_salt=salt))[1] for salt in (b"", b"tenan", b"tenant")] == [0, 0, 64]


def test_a_changed_salt_at_a_reopening_gives_up_what_was_cached(target: Target) -> None:
    """The session's own keys belonged to the salt that it had."""
    spec = spec_of(LONG, 90, eos=())
    target.open(spec)
    target.run()
    target.open(replace(spec, cache_salt=b"tenant"), epoch=2)
    assert target.held.session.cached_len == 0
    [answer] = target.run()
    assert answer.content is not None
    assert answer.content.prefix_len == 0


def test_whoever_wants_the_prompts_log_probabilities_computes_its_rows(target: Target) -> None:
    """With the same numbers whether or not somebody has sent the prompt before."""
    spec = spec_of(LONG, 90, eos=())
    wishes = asking(spec)
    answers = []
    for _ in range(2):
        target.session_id = os.urandom(16)
        target.open(wishes)
        [answer] = target.run()
        answers.append(answer.content)
        said(target, spec)
    assert answers[0] == answers[1]
    assert answers[0] is not None
    assert (len(answers[0].prompt_logprobs), answers[0].prefix_len) == (79, 0)


def test_rejected_rows_are_never_found(target: Target) -> None:
    """A proposal fills two blocks and is refused; no session with it as a prompt finds anything of it."""
    spec = spec_of(LONG[:16], 200, eos=())
    target.open(spec)
    target.run()
    wrong = [(token + 1) % VOCABULARY_SIZE for token in range(32)]
    target.step(1, 17, wrong)
    target.run()
    prompt = (*target.tokens[:17], *wrong, 1)
    assert said(target, spec_of(prompt, 60, eos=()))[1] == 16


def test_a_rollback_leaves_what_others_find(target: Target) -> None:
    """A session goes back into its published tokens and says something else; the first text is still whole."""
    spec = spec_of(LONG[:40], 100, seed=1, eos=(), temperature=1.0)
    text, _ = said(target, spec)
    target.session_id = os.urandom(16)
    target.open(spec_of(text[:90], 100, seed=1, eos=(), temperature=1.0))
    target.run()
    other = (*text[:50], *LONG[:20])
    target.open(spec_of(other, 100, seed=2, eos=(), temperature=1.0), epoch=2)
    target.run()
    assert_like_fresh(target)
    assert said(target, spec_of(text[:95], 100, seed=1, eos=(), temperature=1.0)) == (text, 80)


def test_a_lost_session_comes_back_without_its_tokens_being_computed(target: Target) -> None:
    """Its gateway opens it again with all its tokens, after an eviction or in a newer epoch."""
    spec = spec_of(LONG, 120, eos=())
    target.open(spec, budget=20)
    target.run()
    tokens = list(target.tokens)
    target.table.drop(target.session_id)
    target.open(spec_of(tokens, 120, eos=(), prompt_len=80), epoch=2)
    assert target.held.session.cached_len == len(tokens) // 16 * 16
    target.run()
    assert_like_fresh(target)


def test_who_gave_way_finds_what_is_left_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pool takes a session's blocks from the end; only what was taken is computed again, with the same bits."""
    target = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=160))
    first, second = target.session_id, os.urandom(16)
    target.open(spec_of(range(1, 50), 90, eos=()))
    target.run()
    target.session_id = second
    target.open(spec_of(range(100, 170), 90, eos=()), budget=4)
    target.run()
    length = len(target.tokens)
    target.session_id = first
    target.step(1, 50, budget=36)
    target.run()
    target.session_id = second
    assert (target.held.session.cached_len, target.sessions.counts().preemption_count) == (0, 1)
    target.table.drop(first)
    fed = []
    forward = target.runner.forward

    def counting(feeds: Sequence[Feed], max_prompt_rows: int) -> ForwardResult:
        fed.extend(feed.num_committed for feed in feeds)
        return forward(feeds, max_prompt_rows)

    monkeypatch.setattr(target.runner, "forward", counting)
    target.step(1, length)
    target.run()
    assert (length, fed) == (75, [75 - 64])
    assert_like_fresh(target)
    target.table.clear()
    check_empty(target.runner.pool)


def test_who_waits_holds_nothing_that_it_found(folder: Path) -> None:
    """A session that gave way and finds no room yet leaves its old blocks to those who go on."""
    target = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=160))
    first, second = target.session_id, os.urandom(16)
    target.open(spec_of(range(1, 50), 150, eos=()))
    target.run()
    target.session_id = second
    target.open(spec_of(range(100, 170), 160, eos=()), budget=90)
    target.device.step(target.verifier.advance)
    target.session_id = first
    target.step(1, 50, budget=100)
    for _ in range(90):
        target.device.step(target.verifier.advance)
    preemptions = target.sessions.counts().preemption_count
    assert preemptions == 1
    waiting = target.table.get(second)
    assert waiting is not None
    assert (waiting.session.cached_len, len(waiting.session.table)) == (0, 0)
    target.table.clear()
    check_empty(target.runner.pool)
