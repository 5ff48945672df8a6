"""Several guesses of a chain in one call: they are those of single steps, whoever is beside and whatever happens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.basics import Answers, check_empty, spec_of
from support.models.engine_cases import random_ids
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import SPEC, Draft, assert_like_fresh, continued, fresh_guesses
from torch import Tensor

from draft_service.states import Wanted
from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.decoder import ChainDraws
from outrider.engine.models.fused import FusedTransformer
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import TreeShape

# Enough for as many steps as a message may ask for.
LONG_S = 1e6
LENGTHS = (5, 17, 23, 48)
MODELS = {
    "qwen3": ("qwen3", {}),
    "windows": ("mistral", {"sliding_window": 7}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 9}),
    "wide": ("llama", {"vocab_size": 300}),
}


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model; of one the logits are wider than the tokenizer knows ids."""
    family, changes = MODELS[request.param]
    changes = {"vocab_size": 257, **changes}
    folder = write_tiny_model(tmp_path_factory.mktemp("lines") / "model", family, context_len=128, **changes)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048, vocabulary_size=257)
    if not isinstance(runner.ops, NativeOps):
        pytest.skip("no kernels are built here")
    return runner


@pytest.fixture
def draft(runner: ModelRunner) -> Iterator[Draft]:
    made = Draft(runner, line_s=LONG_S)
    yield made
    made.table.clear()
    check_empty(runner.pool)


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each call from now on."""
    calls: list[int] = []
    real = FusedTransformer.chain

    def chain(
        model: FusedTransformer, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws
    ) -> list[list[int]]:
        calls.append(len(draws.keys))
        return real(model, plan, cache, wanted, draws)

    monkeypatch.setattr(FusedTransformer, "chain", chain)
    return calls


def specs(temperature: float) -> list[SessionSpec]:
    """Requests of other lengths and seeds."""
    ids = [random_ids(length, seed=length, vocab_size=257) for length in LENGTHS]
    return [spec_of(tuple(each), 90, seed=number, eos=(), temperature=temperature) for number, each in enumerate(ids)]


def guesses_of_all(draft: Draft, wanted: Sequence[SessionSpec], draft_count: int) -> list[tuple[int, ...]]:
    """What the draft guesses in two rounds after each text, all texts side by side."""
    answers = [Answers() for _ in wanted]
    found: list[tuple[int, ...]] = []
    for round_ in range(2):
        for number, (spec, own) in enumerate(zip(wanted, answers, strict=True)):
            fence = Fence(bytes([number] * 16), 1, len(spec.token_ids) + round_)
            if round_:
                draft.sessions.advance(fence, (7,), Wanted(draft_count, 0), own)
            else:
                draft.sessions.open(fence, spec, Wanted(draft_count, 0), own)
        draft.device.run(draft.steps.advance)
        found += [own[-1].content.token_ids for own in answers]
    draft.table.clear()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("draft_count", [2, 5, 11])
def test_guesses_are_those_of_single_steps(
    runner: ModelRunner, draft_count: int, temperature: float, depths: list[int]
) -> None:
    """Token by token, of each text alone and of all at once, of hot ones and others side by side."""
    texts = [*specs(temperature)[:2], *specs(1.0 - temperature)[2:]]
    single = guesses_of_all(Draft(runner), texts, draft_count)
    assert not depths
    assert guesses_of_all(Draft(runner, line_s=LONG_S), texts, draft_count) == single
    assert depths[-1] == draft_count
    alone = [guesses_of_all(Draft(runner, line_s=LONG_S), [text], draft_count) for text in texts]
    assert [each[0] for each in alone] + [each[1] for each in alone] == single


def test_the_cache_is_that_of_single_steps(draft: Draft) -> None:
    """Right guesses stay cached bit for bit, and wrong ones leave no trace."""
    spec = SPEC
    draft.open(spec, 6)
    guesses = draft.guesses()
    for num_right in (0, 2, 6, 1):
        committed = [*guesses[:num_right], 7]
        spec = continued(spec, committed)
        draft.advance(1, len(spec.token_ids), committed, 6)
        guesses = draft.guesses()
        assert guesses == fresh_guesses(draft.runner, spec, 6)
        assert_like_fresh(draft)


def test_a_proposal_counts_its_steps(draft: Draft, depths: list[int]) -> None:
    """However many calls they are."""
    draft.open(SPEC, 1)
    guesses = draft.guesses()
    draft.advance(1, 6, guesses, 5)
    counts = draft.runner.forward_counts
    before = counts.num_rows, counts.batch_sizes[1]
    [answer] = draft.run()
    assert (answer.times.forward_count, answer.times.row_count, depths) == (5, 5, [5])
    assert (counts.num_rows - before[0], counts.batch_sizes[1] - before[1]) == (5, 5)
    assert counts.last[0] * 5 <= counts.busy_s


def test_a_line_has_as_many_steps_as_there_is_time_for(runner: ModelRunner, depths: list[int]) -> None:
    """By what a step took last; of one whose steps are long each is a call, so that others come in between."""
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += 0.004
        return seconds[0]

    draft = Draft(runner, line_s=0.01)
    draft.drafter._pace._clock = clock
    draft.open(SPEC, 6)
    assert len(draft.guesses()) == 6
    # The first step shows what it takes; then there is room for two, which look twice as fast, and so for the rest.
    assert depths == [2, 3]
    draft.table.clear()


def test_a_chain_ends_with_the_request(draft: Draft) -> None:
    """No guess follows a token that ends it, wherever in a line that is."""
    draft.open(SPEC, 1)
    first = draft.guesses()
    whole = fresh_guesses(draft.runner, continued(SPEC, first), 6)
    for end in range(6):
        draft.table.clear()
        spec = replace(SPEC, eos_token_ids=frozenset({whole[end]}))
        draft.open(spec, 1)
        draft.run()
        draft.advance(1, 6, first, 6)
        assert draft.guesses() == whole[: whole.index(whole[end]) + 1]


def test_a_line_ends_with_the_room(draft: Draft) -> None:
    """The last token of a request is the target's alone."""
    spec = replace(SPEC, max_len=10)
    draft.open(spec, 1)
    first = draft.guesses()
    draft.advance(1, 6, first, 8)
    assert draft.guesses() == fresh_guesses(draft.runner, continued(SPEC, first), 8)[:3]


def test_what_wants_more_than_tokens_is_made_step_by_step(draft: Draft, depths: list[int]) -> None:
    """Log-probabilities, trees and noise of the draft's own, and whoever shares a step with them."""
    plain = fresh_guesses(draft.runner, SPEC, 4)
    for spec, shape in ((replace(SPEC, draft_logprobs=True), None), (SPEC, TreeShape())):
        draft.open(spec, 4, shape=shape)
        [answer] = draft.run()
        assert answer.content is not None
        assert answer.content.token_ids[0] == plain[0]
        draft.table.clear()
    draft.open(SPEC, 4)
    other = Answers()
    draft.sessions.open(Fence(bytes(16), 1, 5), replace(SPEC, draft_logprobs=True), Wanted(4, 0), other)
    assert draft.guesses() == plain
    assert not depths


def test_a_full_cache_leaves_single_steps(tmp_path: Path, depths: list[int]) -> None:
    """A line may want room for guesses that are never made; then nobody loses any for it."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257, context_len=128)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=32)
    spec = spec_of(tuple(range(1, 13)), 60, eos=(), temperature=0.0)
    whole = fresh_guesses(runner, spec, 4)
    draft, other = Draft(runner, line_s=LONG_S), Answers()
    draft.open(replace(spec, eos_token_ids=frozenset({whole[3]})), 1)
    assert draft.guesses() == whole[:1]
    draft.sessions.open(Fence(bytes(16), 1, 14), spec_of(tuple(range(2, 16)), 60, eos=()), Wanted(0, 0), other)
    draft.run()
    # Each has one block of 16, in which three guesses lie, and the fourth is the end.
    draft.advance(1, 13, whole[:1], 8)
    assert draft.guesses() == whole[1:4]
    assert not depths
    assert runner.pool.num_free == 0
    draft.table.clear()
    check_empty(runner.pool)


def test_noise_of_another_place_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each step's keys at the step before, the guesses are others."""
    texts, real = specs(1.0), FusedTransformer.chain
    expected = guesses_of_all(Draft(runner, line_s=LONG_S), texts, 4)

    def chain(
        model: FusedTransformer, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws
    ) -> list[list[int]]:
        return real(model, plan, cache, wanted, draws._replace(keys=draws.keys.roll(1, 0).contiguous()))

    monkeypatch.setattr(FusedTransformer, "chain", chain)
    assert guesses_of_all(Draft(runner, line_s=LONG_S), texts, 4) != expected


def test_a_row_that_lies_elsewhere_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below that are stored in place of the last tokens read what they should not."""
    texts, real = specs(1.0), FusedTransformer.chain
    expected = guesses_of_all(Draft(runner, line_s=LONG_S), texts, 4)

    def chain(
        model: FusedTransformer, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws
    ) -> list[list[int]]:
        key_slots = plan.key_slots.clone()
        for start, count in zip(plan.key_starts[wanted].tolist(), plan.key_counts[wanted].tolist(), strict=True):
            below = slice(start + count, start + count + len(draws.keys) - 1)
            key_slots[below] = key_slots[start + count - 1]
        return real(model, replace(plan, key_slots=key_slots), cache, wanted, draws)

    monkeypatch.setattr(FusedTransformer, "chain", chain)
    assert guesses_of_all(Draft(runner, line_s=LONG_S), texts, 4) != expected


def test_what_cannot_be_drawn_ends_a_line(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step finds no numbers, those before it count, and the rest is found step by step."""
    texts, real, kept = specs(0.7), FusedTransformer.chain, [0]
    expected = guesses_of_all(Draft(runner), texts, 4)

    def chain(
        model: FusedTransformer, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws
    ) -> list[list[int]]:
        return real(model, plan, cache, wanted, draws)[: kept[0]]

    monkeypatch.setattr(FusedTransformer, "chain", chain)
    for kept[0] in range(4):
        assert guesses_of_all(Draft(runner, line_s=LONG_S), texts, 4) == expected


def test_a_model_without_numbers_fails_its_sessions(tmp_path: Path) -> None:
    """As step by step: with a fault of the model, and not with guesses."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257, context_len=128)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=256)
    draft = Draft(runner, line_s=LONG_S)
    draft.open(SPEC, 1)
    first = draft.guesses()
    assert isinstance(runner.model.embedding, Tensor)
    runner.model.embedding[first[0]] = torch.nan
    draft.advance(1, 6, first, 4)
    draft.device.run(draft.steps.advance)
    [answer] = draft.answers
    assert "NaN or infinity" in str(answer.error)
    draft.table.clear()
    check_empty(runner.pool)
