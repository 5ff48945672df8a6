"""A draft's prefix cache: what an opening finds, that guesses are never found, and that it changes no guess."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import check_empty, spec_of
from support.drafting.rules import ruled
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import Draft, assert_like_fresh, fresh_guesses

from outrider.engine.runner import ModelRunner
from outrider.parameters import Rule, SessionSpec

LONG = tuple(range(1, 81))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for more than a few blocks."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=257)


@pytest.fixture(params=["bfloat16", "float32"])
def draft(roomy: Path, request: pytest.FixtureRequest) -> Iterator[Draft]:
    """A draft whose cache has seen nothing; 32 blocks."""
    made = Draft(ModelRunner.load(str(roomy), dtype=request.param, kv_tokens=512))
    yield made
    made.table.clear()
    check_empty(made.runner.pool)


def spec(token_ids: tuple[int, ...], rule: Rule = Rule.MATCH) -> SessionSpec:
    return ruled(spec_of(token_ids, 200, seed=5, eos=(), temperature=1.0), rule)


def opened(draft: Draft, wanted: SessionSpec, draft_count: int = 6) -> tuple[tuple[int, ...], int]:
    """The guesses of a new session, which stays open, and how many tokens it found."""
    before = draft.sessions.counts().prefix_hit_tokens
    draft.session_id = os.urandom(16)
    draft.open(wanted, draft_count)
    guesses = draft.guesses()
    assert_like_fresh(draft)
    return guesses, draft.sessions.counts().prefix_hit_tokens - before


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
def test_a_prompt_sent_again_changes_no_guess(draft: Draft, rule: Rule) -> None:
    """Beside the session that has it, after its end, and with more after it."""
    wanted, longer = spec(LONG, rule), spec((*LONG, *range(100, 140)), rule)
    expected = fresh_guesses(draft.runner, wanted, 6)
    assert opened(draft, wanted) == (expected, 0)
    assert opened(draft, wanted) == (expected, 64)
    draft.table.clear()
    assert opened(draft, longer) == (fresh_guesses(draft.runner, longer, 6), 80)
    assert draft.sessions.counts().prefix_query_tokens == 80 + 80 + 120


def test_guesses_are_found_when_they_are_committed_and_not_before(draft: Draft) -> None:
    """A guess lies in the cache like a token; only the target's word makes it one."""
    guesses, _ = opened(draft, spec(LONG[:16]), 20)
    assert draft.held.session.cached_len > 32
    prompt = (*LONG[:16], *guesses, 1)
    assert opened(draft, spec(prompt), 0)[1] == 16
    draft.table.clear()
    guesses, _ = opened(draft, spec(LONG[16:32]), 20)
    draft.advance(1, 16 + 18, guesses[:18], 2)
    draft.run()
    assert opened(draft, spec((*LONG[16:32], *guesses[:18], 1)), 0)[1] == 32


def test_a_rollback_leaves_what_others_find(draft: Draft) -> None:
    """The session goes on with other tokens in a copy."""
    opened(draft, spec(LONG))
    draft.sessions.rollback(draft.fence(2, 40))
    draft.advance(2, 44, (9, 9, 9, 9), 4)
    draft.run()
    assert_like_fresh(draft)
    assert opened(draft, spec(LONG)) == (fresh_guesses(draft.runner, spec(LONG), 6), 64)


def test_a_lost_session_is_opened_again_at_the_cost_of_its_tail(draft: Draft) -> None:
    """As after an eviction, with all committed tokens."""
    opened(draft, spec(LONG))
    draft.table.drop(draft.session_id)
    draft.open(spec((*LONG, 3, 4)), 2, epoch=2)
    assert draft.held.session.cached_len == 80
    draft.run()


def test_salts_share_nothing(draft: Draft) -> None:
    """And without the cache no session finds anything."""
    opened(draft, spec(LONG))
    assert opened(draft, replace(spec(LONG), cache_salt=b"tenant"))[1] == 0
    alone = Draft(draft.runner, prefix_cache=False)
    assert opened(alone, spec(LONG))[1] == 0
    assert alone.sessions.counts().prefix_query_tokens == 0
    alone.table.clear()
