"""Steps of a head in one call: proposals are those of single steps, whatever is asked for and whoever is beside."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.basics import check_empty, grid, spec_of
from support.heads.heads import random_head
from support.models.engine_cases import random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.drafters.drafter import DrafterProposal, GuessLimits
from outrider.drafters.hosted import HostedModel, host_head
from outrider.drafters.lines import StepLine
from outrider.drafters.scales import Scales
from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.heads.fused import FusedHead, LineDraws
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.parameters import SessionSpec
from outrider.token_tree import TreeShape

TREE = TreeShape()
LENGTHS = (5, 17, 33, 48)
LIMITS = [
    GuessLimits(1, None, 1),
    GuessLimits(3, None, 3),
    GuessLimits(7, None, 7),
    GuessLimits(2, TREE, 2),
    GuessLimits(6, TREE, 3),
    GuessLimits(12, TREE, 12),
]
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lines") / "model", "llama")


@pytest.fixture
def target(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    if not isinstance(runner.ops, NativeOps):
        pytest.skip("no kernels are built here")
    yield runner
    check_empty(runner.pool)


@pytest.fixture(autouse=True)
def nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are those of the texts alone, and not of what was accepted before."""
    monkeypatch.setattr(Scales, "learn", lambda *_: None)


def hosting_of(target: ModelRunner, fuse: Fuse = Fuse.WIDE) -> HostedModel:
    return host_head(target, random_head(target, fuse), "")


def specs(temperature: float, **changes: object) -> list[SessionSpec]:
    """Requests of other lengths and seeds."""
    ids = [random_ids(length, seed=length, vocab_size=300) for length in LENGTHS]
    made = [spec_of(tuple(each), 60, seed=number, eos=(), temperature=temperature) for number, each in enumerate(ids)]
    return [replace(each, **changes) for each in made]


def proposals(
    target: ModelRunner, hosting: HostedModel, wanted: Sequence[SessionSpec], limits: GuessLimits
) -> list[DrafterProposal]:
    """What the head proposes in two rounds after each text, all texts side by side."""
    sessions = [target.open(spec.token_ids, spec.prompt_len) for spec in wanted]
    drafts = [hosting.open(spec, None) for spec in wanted]
    found = []
    try:
        for next_id in (7, 11):
            target.forward([Feed(session) for session in sessions])
            for session, draft in zip(sessions, drafts, strict=True):
                session.extend([next_id])
                draft.propose(session, limits)
            while waiting := [draft for draft in drafts if draft.proposal is None]:
                hosting.advance(waiting)
            found += [draft.proposal for draft in drafts if draft.proposal is not None]
    finally:
        for draft in drafts:
            draft.free()
        for session in sessions:
            session.free()
    return found


@TEMPERATURES
@pytest.mark.parametrize("fuse", [Fuse.WIDE, Fuse.PAIR], ids=["some ids", "all ids"])
@pytest.mark.parametrize(
    "limits", LIMITS, ids=lambda each: f"{each.draft_count}{'' if each.shape is None else ' tree'}"
)
def test_proposals_are_those_of_single_steps(
    target: ModelRunner, limits: GuessLimits, fuse: Fuse, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, parents and values, bit for bit, of each text alone and of all at once."""
    hosting, texts = hosting_of(target, fuse), specs(temperature)
    together = [each.tree for each in proposals(target, hosting, texts, limits)]
    alone = [[each.tree for each in proposals(target, hosting, [text], limits)] for text in texts]
    assert sorted(map(repr, together)) == sorted(repr(tree) for trees in alone for tree in trees)
    monkeypatch.setattr(StepLine, "of", lambda *_: None)
    assert [each.tree for each in proposals(target, hosting, texts, limits)] == together
    assert all(len(tree) for tree in together)


def test_fewer_calls_make_as_many_steps(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven guesses of a chain are two calls, and count as seven steps of four rows each."""
    calls: list[int] = []

    def line(head: FusedHead, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: LineDraws) -> tuple[Tensor, Tensor]:
        calls.append(draws.depth)
        return real(head, plan, cache, wanted, draws)

    real = FusedHead.line
    monkeypatch.setattr(FusedHead, "line", line)
    hosting, texts = hosting_of(target), specs(0.0)
    found = proposals(target, hosting, texts, GuessLimits(7, None, 7))
    # In the second round, when no text is left to be read.
    assert calls[-2:] == [4, 3]
    assert {(each.times.forward_count, each.times.row_count) for each in found[len(texts) :]} == {(7, 7 * 4)}


@TEMPERATURES
def test_a_chain_ends_with_the_request(target: ModelRunner, temperature: float) -> None:
    """No guess follows a token that ends it, wherever in a line that is."""
    hosting, limits = hosting_of(target), GuessLimits(4, None, 4)
    whole = proposals(target, hosting, specs(temperature)[:1], limits)[0].tree.token_ids
    for end in range(4):
        spec = specs(temperature, eos_token_ids=frozenset({whole[end]}))[:1]
        expected = whole[: whole.index(whole[end]) + 1]
        assert proposals(target, hosting, spec, limits)[0].tree.token_ids == expected


@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("room", range(1, 5))
def test_a_line_ends_with_the_room(target: ModelRunner, shape: TreeShape | None, room: int) -> None:
    """The last token of a request is the target's alone."""
    (spec,) = specs(0.0)[:1]
    spec = replace(spec, max_len=len(spec.token_ids) + 2 + room)
    limits = GuessLimits(8, shape, 8).within(room)
    tree = proposals(target, hosting_of(target), [spec], limits)[0].tree
    assert max(tree.depths) <= room
    assert len(tree) == room or shape is not None


@pytest.mark.parametrize("changes", [{"draft_logprobs": True}, *grid({"prompt_len": 1})])
def test_what_is_wanted_beside_is_there(target: ModelRunner, changes: dict[str, object]) -> None:
    """Log-probabilities of guesses are found step by step, and with the same guesses."""
    hosting, limits = hosting_of(target), GuessLimits(3, None, 3)
    plain = [each.tree for each in proposals(target, hosting, specs(0.7), limits)]
    found = [each.tree for each in proposals(target, hosting, specs(0.7, **changes), limits)]
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert all(len(each.logprobs) == (3 if "draft_logprobs" in changes else 0) for each in found)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [({"draft_logprobs": True}, TREE), ({}, TreeShape(expansions=(4, 2, 2)))],
    ids=["logprobs", "all"],
)
def test_a_tree_that_is_no_line_grows_by_levels(
    target: ModelRunner, changes: dict[str, object], shape: TreeShape
) -> None:
    """Row by row it would take a call for each, and none of them is a line."""
    (spec,) = specs(0.0, **changes)[:1]
    # The second round, when the text is read.
    proposal = proposals(target, hosting_of(target), [spec], GuessLimits(12, shape, 3))[1]
    assert len(proposal.tree) == 12
    assert proposal.times.forward_count <= 4


def test_noise_of_another_place_is_found(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each step's keys at the step before, the guesses are others."""

    def line(head: FusedHead, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: LineDraws) -> tuple[Tensor, Tensor]:
        keys = None if draws.keys is None else draws.keys.roll(1, 0).contiguous()
        return real(head, plan, cache, wanted, draws._replace(keys=keys))

    hosting, texts, limits = hosting_of(target), specs(1.0), GuessLimits(3, None, 3)
    expected = [each.tree for each in proposals(target, hosting, texts, limits)]
    real = FusedHead.line
    monkeypatch.setattr(FusedHead, "line", line)
    assert [each.tree for each in proposals(target, hosting, texts, limits)] != expected


def test_a_row_that_lies_elsewhere_is_found(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below that are stored in place of the first tokens read what they should not."""
    hosting, texts, limits = hosting_of(target), specs(1.0), GuessLimits(4, TREE, 4)
    expected = [each.tree for each in proposals(target, hosting, texts, limits)]

    def line(head: FusedHead, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: LineDraws) -> tuple[Tensor, Tensor]:
        key_slots = plan.key_slots.clone()
        for start, count in zip(plan.key_starts[wanted].tolist(), plan.key_counts[wanted].tolist(), strict=True):
            below = slice(start + count, start + count + draws.depth - 1)
            key_slots[below] = key_slots[start : start + draws.depth - 1]
        return real(head, replace(plan, key_slots=key_slots), cache, wanted, draws)

    real = FusedHead.line
    monkeypatch.setattr(FusedHead, "line", line)
    assert [each.tree for each in proposals(target, hosting, texts, limits)] != expected


def test_what_cannot_be_drawn_ends_a_line(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step finds no numbers, those before it count, and the rest is found step by step."""

    def line(head: FusedHead, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: LineDraws) -> tuple[Tensor, Tensor]:
        ids, shares = real(head, plan, cache, wanted, draws)
        return ids[: kept[0]], shares[: kept[0]]

    hosting, texts, limits = hosting_of(target), specs(0.7), GuessLimits(3, None, 3)
    expected = [each.tree for each in proposals(target, hosting, texts, limits)]
    real, kept = FusedHead.line, np.zeros(1, dtype=int)
    monkeypatch.setattr(FusedHead, "line", line)
    for kept[0] in range(3):
        assert [each.tree for each in proposals(target, hosting, texts, limits)] == expected
