"""Long prompts beside running sessions, through the verifier: who runs goes on, and no token changes."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from support.basics import spec_of
from support.services.stepped_target import PROMPT, Target

from outrider.engine.runner import ModelRunner
from outrider.engine.sharing import MIN_PROMPT_ROWS, PROBE_STEPS
from target_service.states import MAX_READINGS, PromptRead
from target_service.verifier import Verifier

PROMPTS = [tuple(range(first, first + 120)) for first in (10, 60, 110)]


class Watched:
    """A target of which each step takes as long as its rows; what was computed of each session, step by step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.now_s = 0.0
        self.target = Target(runner)
        self.target.verifier = Verifier(runner, self.target.table, self.clock)
        self.runner = runner
        self.num_rows = runner.forward_counts.num_rows

    def clock(self) -> float:
        """A millisecond a row, and ten for the weights."""
        if self.runner.forward_counts.num_rows > self.num_rows:
            self.now_s += 10 + self.runner.forward_counts.num_rows - self.num_rows
            self.num_rows = self.runner.forward_counts.num_rows
        return self.now_s

    def open(self, token_ids: tuple[int, ...], budget: int, seed: int) -> bytes:
        self.target.session_id = os.urandom(16)
        self.target.open(spec_of(token_ids, 600, seed=seed, eos=(), temperature=0.7), budget=budget)
        return self.target.session_id

    def step(self) -> None:
        self.target.device.step(self.target.verifier.advance)

    def cached(self, session_id: bytes) -> int:
        held = self.target.table.get(session_id)
        assert held is not None
        return held.session.cached_len

    def tokens(self, session_id: bytes) -> list[int]:
        held = self.target.table.get(session_id)
        assert held is not None
        return list(held.session.token_ids)


@pytest.fixture
def watched(runner: ModelRunner) -> Iterator[Watched]:
    made = Watched(runner)
    yield made
    made.target.table.clear()


def test_who_runs_has_a_token_in_every_step(watched: Watched) -> None:
    """Prompts are read one after the other beside it, at the pace of a step that is half as long again."""
    running = watched.open(PROMPT, 150, seed=1)
    for _ in range(3):
        watched.step()
    prompts = [watched.open(token_ids, 0, seed) for seed, token_ids in enumerate(PROMPTS)]
    chunks = []
    while watched.cached(prompts[-1]) < len(PROMPTS[-1]):
        length, before = len(watched.tokens(running)), [watched.cached(each) for each in prompts]
        started_s = watched.now_s
        watched.step()
        read = [watched.cached(each) - had for each, had in zip(prompts, before, strict=True)]
        # After the first of them that is not read no other is read.
        assert all(
            not later for at, each in enumerate(prompts) if watched.cached(each) < 112 for later in read[at + 1 :]
        )
        assert len(watched.tokens(running)) == length + 1
        assert watched.now_s - started_s <= 10 + 1 + 5 + 8
        chunks.append(sum(read))
    assert chunks[:3] == [MIN_PROMPT_ROWS, 5, 5]
    assert 0 in chunks[: PROBE_STEPS + 1]


def test_alone_a_prompt_is_read_at_once(watched: Watched) -> None:
    """When no session runs, and again when those that ran have ended."""
    running = watched.open(PROMPT, 40, seed=1)
    for _ in range(3):
        watched.step()
    watched.target.table.drop(running)
    prompt = watched.open(PROMPTS[0], 0, seed=0)
    watched.step()
    assert len(watched.tokens(prompt)) == len(PROMPTS[0]) + 1


def test_tokens_do_not_depend_on_how_prompts_were_cut(watched: Watched, runner: ModelRunner) -> None:
    """Three prompts beside a running session say what each says alone."""
    ids = [watched.open(PROMPT, 60, seed=9)]
    for _ in range(3):
        watched.step()
    ids += [watched.open(token_ids, 20, seed) for seed, token_ids in enumerate(PROMPTS)]
    watched.target.run()
    for session_id, token_ids, budget, seed in zip(
        ids, (PROMPT, *PROMPTS), (60, 20, 20, 20), (9, 0, 1, 2), strict=True
    ):
        alone = Target(runner, prefix_cache=False)
        alone.open(spec_of(token_ids, 600, seed=seed, eos=(), temperature=0.7), budget=budget)
        alone.run()
        assert watched.tokens(session_id) == alone.tokens
        alone.table.clear()


def test_how_much_of_a_prompt_is_read_is_told_while_it_is_read(watched: Watched) -> None:
    """To who wants it, as far as each step came and no more often than its share; the token behind it is the same."""
    watched.open(PROMPT, budget=300, seed=1)
    for _ in range(3):
        watched.step()
    target, told, said, steps = watched.target, list[list[int]](), list[int](), set[int]()
    for wants in (True, False):
        target.session_id = os.urandom(16)
        # Nothing that was read for one is there for the other.
        spec = replace(spec_of(PROMPTS[0], 121, seed=3, eos=()), cache_salt=bytes([wants]))
        target.open(spec, tells_reading=wants)
        while len(target.tokens) == len(PROMPTS[0]):
            watched.step()
            steps.add(watched.cached(target.session_id))
        mine = [each.content for each in target.answers if each.fence.session_id == target.session_id]
        told.append([each.read_len for each in mine if isinstance(each, PromptRead)])
        said.append(mine[-1].next_token_id)
    assert len(told[0]) > 3
    assert told[0] == sorted({*told[0]} & steps)
    assert all(later - one >= len(PROMPTS[0]) / MAX_READINGS for one, later in pairwise([0, *told[0], len(PROMPTS[0])]))
    assert told[1] == []
    assert said[0] == said[1]
