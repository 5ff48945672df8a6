"""Beam search through the sessions of a target: equal to transformers', whatever is guessed and whatever happens."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from support.basics import check_empty, spec_of
from support.drafting.beams import Oracle, Searching, beams_of, junk, last_rows, texts
from support.models.engine_cases import assert_like_fresh
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target

from outrider.beams import BeamSearch, plant
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.parameters import FinishReason, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree
from target_service.states import Step

MAX_TOKENS = 24
ENDS = (0, 9, 30)
WIDTH = 4


def spec(seed: int, prompt_len: int = 5, max_tokens: int = MAX_TOKENS, **sampling: object) -> SessionSpec:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, VOCABULARY_SIZE, (prompt_len,), generator=generator).tolist()
    return spec_of(prompt, prompt_len + max_tokens, eos=ENDS, **{"temperature": 1.0, **sampling})


def reference(folder: Path, request: SessionSpec, width: int, **options: object) -> list[list[int]]:
    """What transformers finds, best first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.generate(
        torch.tensor([request.token_ids]),
        attention_mask=torch.ones(1, request.prompt_len, dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=request.max_len - request.prompt_len,
        eos_token_id=sorted(request.eos_token_ids),
        pad_token_id=VOCABULARY_SIZE - 1,
        **options,
    )
    return output[:, request.prompt_len :].tolist()


def assert_found(search: Searching, expected: list[list[int]]) -> None:
    """The search found just these sequences, which are padded."""
    found = texts(search.record.finished)
    assert [list(each) for each in found] == [said[: len(each)] for each, said in zip(found, expected, strict=True)]
    assert all(set(said[len(each) :]) <= {VOCABULARY_SIZE - 1} for each, said in zip(found, expected, strict=True))


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_guesses_change_passes_and_nothing_else(target: Target, folder: Path, width: int, seed: int) -> None:
    request, oracle, chance = spec(seed, prompt_len=20), Oracle(3), random.Random(seed)
    plain = Searching(target, request, BeamSearch(width), os.urandom(16))
    plain.to_the_end(oracle.watch)
    assert_found(plain, reference(folder, request, width))
    guided = Searching(target, request, BeamSearch(width), os.urandom(16))
    assert guided.to_the_end(oracle) == plain.record.finished
    assert guided.num_passes <= 1 + -(-plain.num_passes // 3)
    mixed = Searching(target, request, BeamSearch(width), os.urandom(16))
    guess = last_rows(junk(chance, VOCABULARY_SIZE, Oracle(0)), MAX_TOKENS)
    assert mixed.to_the_end(guess) == plain.record.finished
    mixed = Searching(target, request, BeamSearch(width), os.urandom(16))
    assert mixed.to_the_end(last_rows(junk(chance, VOCABULARY_SIZE, oracle), MAX_TOKENS)) == plain.record.finished
    assert mixed.num_passes < plain.num_passes


def test_edits_come_before_the_softmax(target: Target, folder: Path) -> None:
    """As with renormalize_logits in transformers: a bias, banned sequences and a minimum length."""
    request = spec(3, min_tokens=6, logit_bias={17: 2.0, 40: -3.0})
    search = Searching(target, request, BeamSearch(WIDTH))
    search.to_the_end()
    bias = {(17,): 2.0, (40,): -3.0}
    options = {"sequence_bias": bias, "min_new_tokens": 6, "renormalize_logits": True}
    assert_found(search, reference(folder, request, WIDTH, **options))


def test_beams_that_part_keep_what_they_have_computed(target: Target) -> None:
    """After every verdict the cache of each beam is bit for bit that of a session of its own."""
    oracle, request = Oracle(3), spec(5, prompt_len=30)
    Searching(target, request, BeamSearch(WIDTH), os.urandom(16)).to_the_end(oracle.watch)
    search, guess = Searching(target, request, BeamSearch(WIDTH)), junk(random.Random(1), VOCABULARY_SIZE, oracle)
    search.open()
    search.take()
    num_kept = 0
    while search.record.finish_reason is None:
        search.step(last_rows(guess, MAX_TOKENS)(search.record))
        search.take()
        held = target.held
        assert held.beams is not None
        for session in held.beams.sessions:
            num_kept += session.cached_len == len(session) - 1 > request.prompt_len
            tail = session.token_ids[session.cached_len :]
            session.truncate(session.cached_len)
            assert_like_fresh(target.runner, session)
            session.extend(tail)
        target.runner.pool.check_integrity()
    assert num_kept > 10


def test_whatever_happens_to_a_session_the_search_finds_the_same(target: Target) -> None:
    """Rollbacks, new openings, repetitions and lost caches."""
    request, oracle = spec(1, prompt_len=18), Oracle(2)
    plain = Searching(target, request, BeamSearch(WIDTH), os.urandom(16))
    plain.to_the_end(oracle.watch)
    for seed in range(6):
        chance = random.Random(seed)
        search = Searching(target, request, BeamSearch(WIDTH), os.urandom(16))
        guess = last_rows(junk(chance, VOCABULARY_SIZE, oracle), MAX_TOKENS)
        search.open()
        search.take()
        while search.record.finish_reason is None:
            event, held = chance.randrange(6), target.table.get(search.session_id)
            if event == 0:
                search.epoch += 1
                length = chance.randrange(1, len(search.record) + 1)
                target.sessions.rollback(Fence(search.session_id, search.epoch, length))
                search.step(guess(search.record))
                target.run()
                search.open()
            elif event == 1:
                search.open(guess(search.record))
            elif event == 2:
                assert held is not None
                for session in held.sessions:
                    session.free()
                search.step(guess(search.record))
            elif event == 3:
                tree = guess(search.record)
                search.step(tree)
                search.step(tree)
                target.device.step(target.verifier.advance)
                search.step(tree)
            elif event == 4:
                target.table.drop(search.session_id)
                search.step()
                assert [answer.content for answer in target.run()] == [None]
                search.open(guess(search.record))
            else:
                search.step(guess(search.record))
            search.take()
            target.runner.pool.check_integrity()
        assert search.record.finished == plain.record.finished


@pytest.fixture
def small(folder: Path) -> Iterator[Target]:
    target = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=416))
    yield target
    target.table.clear()
    check_empty(target.runner.pool)


def go_on(target: Target, searches: list[Searching]) -> None:
    """Takes what has been answered to each search, and asks for its next pass."""
    answers, target.answers[:] = list(target.answers), []
    ids = {search.session_id: search for search in searches}
    for answer in answers:
        assert answer.error is None
        search = ids.get(answer.fence.session_id)
        if search is None:
            continue
        search.num_passes += 1
        search.record.take(answer.content.beam_steps)
        if search.record.finish_reason is None:
            search.step()
        else:
            target.table.drop(search.session_id)


def test_searches_take_turns_in_a_full_pool(small: Target, target: Target) -> None:
    """They lose their caches and nothing else, and a session of one sequence among them loses nothing either."""
    requests = [spec(seed, prompt_len=40) for seed in range(4)]
    alone = [Searching(target, each, BeamSearch(WIDTH), os.urandom(16)).to_the_end() for each in requests]
    searches = [Searching(small, each, BeamSearch(WIDTH), os.urandom(16)) for each in requests]
    for search in searches:
        search.open()
    one = spec_of(PROMPT, 60, eos=())
    small.open(one, budget=50)
    for _ in range(400):
        small.device.step(small.verifier.advance)
        go_on(small, searches)
        small.runner.pool.check_integrity()
    assert [search.record.finished for search in searches] == alone
    assert small.sessions.counts().preemption_count > 0
    assert len(small.tokens) > 50


@pytest.mark.parametrize("max_rows", range(WIDTH, 3 * WIDTH))
def test_searches_take_turns_in_a_narrow_forward(
    target: Target, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """The beams of a search count for something only in one forward, and none of the searches starves."""
    searches = [Searching(target, spec(seed, prompt_len=20), BeamSearch(WIDTH), os.urandom(16)) for seed in range(3)]
    for search in searches:
        search.open()
    target.device.run(target.verifier.advance)
    monkeypatch.setattr(target.runner, "max_rows", max_rows)
    for _ in range(MAX_TOKENS):
        go_on(target, searches)
        live = [(search, search.num_passes) for search in searches if search.record.finish_reason is None]
        for _ in live:
            target.device.step(target.verifier.advance)
            go_on(target, searches)
        assert all(search.num_passes > num_passes for search, num_passes in live)
    assert all(search.record.finish_reason is not None for search in searches)


@pytest.mark.parametrize("what", ["other beams", "a second root", "past the end"])
def test_a_proposal_that_is_not_for_these_beams_is_refused(target: Target, what: str) -> None:
    search = Searching(target, spec(2, max_tokens=3), BeamSearch(2))
    search.open()
    search.take()
    last = beams_of(search.record)
    trees = {
        "other beams": plant([last[0], (last[1] + 1) % VOCABULARY_SIZE], [1], [5]),
        "a second root": TokenTree((*last, 7), (0, 0, 0)),
        "past the end": plant(last, [1, 3, 4], [5, 6, 7]),
    }
    with pytest.raises(InvalidRequest, match="proposal"):
        search.step(trees[what])


def test_a_search_that_has_ended_takes_no_more_steps(target: Target) -> None:
    """But it repeats its last verdict."""
    search = Searching(target, spec(2, max_tokens=2), BeamSearch(2))
    search.open()
    search.take()
    before = search.fence
    search.step()
    [said] = target.run()
    target.sessions.step(before, Step(EMPTY, 0, 0), target.answers)
    assert target.run() == [said]
    assert (said.content.finish_reason, said.cached_len) == (FinishReason.LENGTH, search.spec.max_len - 1)
    with pytest.raises(ProtocolViolation, match="has ended"):
        target.sessions.step(Fence(search.session_id, 1, search.spec.max_len), Step(EMPTY, 0, 0), target.answers)
