"""A target that guesses with its own lower layers: the tokens of plain decoding, and no row of a layer twice."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import check_empty, spec_of
from support.drafting.rules import ruled
from support.heads.heads import random_head
from support.models.layers import NUM_LAYERS, count_rows, write_layered_model
from support.services.stepped_target import PROMPT, OwnTarget, assert_like_fresh, check_pure, plain
from torch import Tensor

from outrider.drafters.hosted import host_head
from outrider.drafters.shelf import early_exit
from outrider.drafters.shelf.early_exit import LayerSkip
from outrider.drafters.shelf.lower_layers import BegunRows
from outrider.engine.batching import Feed
from outrider.engine.cache import KVCache
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import InvalidRequest, ModelRefused
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree
from target_service import verifier
from target_service.block_allocator import BlockAllocator
from target_service.server import TargetSettings, start

GREEDY = spec_of(PROMPT, 60, seed=3, eos=())
SAMPLED = spec_of(PROMPT, 60, seed=3, eos=(), temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layered_model(tmp_path_factory.mktemp("layers") / "model")


def load(folder: Path, *, fused: bool = True, kv_tokens: int = 4096) -> ModelRunner:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=kv_tokens)
    if not fused:
        runner.model = runner.model._model  # type: ignore[attr-defined]
    return runner


@pytest.fixture
def runner(folder: Path) -> Iterator[ModelRunner]:
    loaded = load(folder)
    yield loaded
    check_empty(loaded.pool)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("budget", [0, 40])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_tokens_are_those_of_plain_decoding(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: SessionSpec,
    count: int,
    budget: int,
    exit_layer: int,
    fused: bool,
) -> None:
    """In fewer passes; what is cached is a fresh session's, and every layer has computed each row once."""
    runner = load(folder, fused=fused)
    tokens = plain(load(folder), spec)
    hosting = LayerSkip(runner, exit_layer)
    counts = count_rows(runner, monkeypatch)
    own = OwnTarget(runner, hosting)
    answers = own.to_the_end(spec, count, budget)
    assert own.tokens == tokens
    num_rows = len(PROMPT) + sum(len(answer.content.hosted.tree) + 1 for answer in answers[1:])
    assert counts == dict.fromkeys(range(NUM_LAYERS), num_rows)
    if exit_layer > 1:
        assert sum(len(answer.content.accepted_rows) for answer in answers) > 10
    monkeypatch.undo()
    assert_like_fresh(own)
    own.table.clear()
    check_empty(runner.pool)


def test_where_bits_depend_on_neighbours_nothing_goes_on(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are computed for all rows, and those below the exit twice."""
    monkeypatch.setattr(ModelRunner, "is_row_invariant", False)
    own = OwnTarget(runner, LayerSkip(runner, 2))
    tokens = plain(runner, GREEDY)
    counts = count_rows(runner, monkeypatch)
    answers = own.to_the_end(GREEDY, 4)
    assert own.tokens == tokens
    assert counts[0] - counts[2] == sum(len(answer.content.hosted.tree) for answer in answers) > 40
    own.table.clear()


def test_sessions_of_all_kinds_share_a_forward(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that guess and one that does not go on together: each has its own tokens, and each row is computed once."""
    specs = [SAMPLED, replace(SAMPLED, seed=5, token_ids=(9, 8, 7, 6, 5), max_len=50), replace(GREEDY, max_len=40)]
    hosting = LayerSkip(runner, 2)
    own = OwnTarget(runner, hosting)
    ids = [os.urandom(16) for _ in specs]
    counts = count_rows(runner, monkeypatch)
    for own.session_id, spec, count in zip(ids, specs, (4, 2, 0), strict=True):
        own.ask(spec, count, budget=64)
    own.run()
    assert len(set(counts.values())) == 1
    for own.session_id, spec in zip(ids, specs, strict=True):
        assert own.tokens == plain(runner, spec)
    own.table.clear()


def test_no_room_costs_guesses_and_nothing_else(folder: Path) -> None:
    """A session without a block for its guesses decodes plainly, and takes none from others."""
    tokens = plain(load(folder), GREEDY)
    runner = load(folder, kv_tokens=64)
    own = OwnTarget(runner, LayerSkip(runner, 2))
    other = runner.open(list(range(48)), 48)
    other.reserve()
    own.ask(GREEDY, 5)
    answers = own.run()
    while len(own.tokens) < 16:
        own.go_on(5)
        answers += own.run()
    assert len(other.table) == 3
    other.free()
    while own.held.finish_reason is None:
        own.go_on(5)
        answers += own.run()
    assert own.tokens == tokens
    drafted = {answer.fence.base_len: len(answer.content.hosted.tree) for answer in answers[1:]}
    assert {base for base, count in drafted.items() if not count} == {*range(min(b for b in drafted if b > 11), 16), 59}
    own.table.clear()
    check_empty(runner.pool)


def steal_between(patch: pytest.MonkeyPatch, own: OwnTarget) -> list[int]:
    """Lets others take a session's blocks between its guesses and their check; returns where that happened."""

    def begin_step(allocator: BlockAllocator) -> dict[Session, int]:
        session = own.held.session
        if BegunRows.in_forwards_of(own.runner).of(session).token_ids:
            stolen.append(len(session))
            session.free()
            thief = own.runner.open(list(range(100, 200)), 1)
            own.runner.forward([Feed(thief)])
            thief.free()
        return real(allocator)

    real, stolen = BlockAllocator.begin_step, list[int]()
    patch.setattr(BlockAllocator, "begin_step", begin_step)
    return stolen


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO, Rule.BLOCK])
def test_rows_that_were_lost_are_computed_again(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """A session that gives way after its guesses is checked with them, from its tokens alone."""
    spec = ruled(SAMPLED, rule)
    hosting = LayerSkip(runner, 2)
    undisturbed = OwnTarget(runner, hosting)
    undisturbed.to_the_end(spec, 3)
    own = OwnTarget(runner, hosting)
    stolen = steal_between(monkeypatch, own)
    own.to_the_end(spec, 3)
    assert len(stolen) > 10
    assert own.tokens == undisturbed.tokens
    for each in (own, undisturbed):
        each.table.clear()


def test_a_head_and_lower_layers_can_share_a_target(runner: ModelRunner) -> None:
    """Each finds the features that it reads, whichever taps them first, and proposes what it would propose alone."""
    hostings = [LayerSkip(runner, 2), host_head(runner, random_head(runner), "")]
    tokens = plain(runner, SAMPLED)
    for hosting in hostings:
        own = OwnTarget(runner, hosting)
        answers = own.to_the_end(SAMPLED, 3)
        assert own.tokens == tokens
        proposals = [
            (tokens[: each.fence.base_len], each.content.hosted.tree) for each in answers if each.content.hosted.tree
        ]
        assert len(proposals) > 5
        check_pure(runner, hosting, SAMPLED, proposals)
        own.table.clear()


def _read_another_row(patch: pytest.MonkeyPatch) -> None:
    def load_tap(cache: KVCache, boundary: int, slots: Tensor) -> Tensor:
        return real(cache, boundary, slots.roll(1))

    real = KVCache.load_tap
    patch.setattr(KVCache, "load_tap", load_tap)


def _guess_over_committed_tokens(patch: pytest.MonkeyPatch) -> None:
    def ahead(session: Session, num_rows: int) -> Session:
        own = real(session, num_rows)
        del own.token_ids[-2]
        own.cached_len -= 1
        return own

    real = early_exit.session_ahead
    patch.setattr(early_exit, "session_ahead", ahead)


def _begin_at_another_layer(patch: pytest.MonkeyPatch) -> None:
    def starts(begun: BegunRows, feeds: Sequence[Feed], grants: Sequence[int]) -> list[int]:
        return [start and start + 1 for start in real(begun, feeds, grants)]

    real = BegunRows.starts
    patch.setattr(BegunRows, "starts", starts)


def _compare_no_tokens(patch: pytest.MonkeyPatch) -> None:
    def starts(begun: BegunRows, feeds: Sequence[Feed], grants: Sequence[int]) -> list[int]:
        [feed] = feeds
        rows = begun.of(feed.session)
        num_begun = min(len(rows.token_ids), *grants)
        return [rows.boundary] * num_begun + [0] * (grants[0] - num_begun)

    patch.setattr(BegunRows, "starts", starts)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a row goes on from another's residual": _read_another_row,
    "guesses lie where committed tokens do": _guess_over_committed_tokens,
    "rows go on a layer too high": _begin_at_another_layer,
    "rows go on for other tokens": _compare_no_tokens,
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    """Each of these gives other tokens, or none; without one, a session that is disturbed in every way has plain's."""
    tokens = plain(load(folder), SAMPLED)
    runner = load(folder, fused=False)
    runner.tap((3,))
    own = OwnTarget(runner, LayerSkip(runner, 2))
    if fault is not None:
        FAULTS[fault](monkeypatch)

    def check() -> None:
        own.ask(SAMPLED, 4)
        own.run()
        for count in (4, 3, 4):
            own.go_on(count)
            own.run()
        # The right tokens are checked where others were guessed.
        for _ in range(5):
            at = len(own.tokens)
            own.go_on(4)
            verifier._with_proposals(own.device.tasks)
            own.device.tasks[0].tree = TokenTree.chain(tokens[at : at + 4])
            own.run()
            assert own.tokens == tokens[: at + 5]
            assert_like_fresh(own)
        steal_between(monkeypatch, own)
        while own.held.finish_reason is None:
            own.go_on(4)
            own.run()
        assert own.tokens == tokens

    try:
        if fault is None:
            check()
        else:
            with pytest.raises((AssertionError, ValueError)):
                check()
    finally:
        monkeypatch.undo()
        own.table.clear()
    check_empty(runner.pool)


async def test_an_exit_layer_is_an_option_of_the_service(folder: Path) -> None:
    """The drafter has its name among the others; an exit that is none is refused with one sentence."""
    settings = TargetSettings(str(folder), listen="127.0.0.1:0", threads=1, kv_tokens=640, exit_layer=2)
    running = await start(settings)
    try:
        assert list(running.facts.drafters) == ["layer_skip"]
    finally:
        await running.stop(0)
    for exit_layer, limit in ((4, r"the exit layer is 4, but must be in \[1, 3\]"), (-1, "--exit-layer is -1")):
        with pytest.raises((ModelRefused, InvalidRequest), match=limit):
            await start(replace(settings, exit_layer=exit_layer))
    with pytest.raises(
        ModelRefused, match=r"^sim:h100-1b cannot be computed layer by layer, and so has no exit layer$"
    ):
        await start(replace(settings, model="sim:h100-1b"))
