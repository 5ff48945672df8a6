"""A draft's guesses on a device that is not there: the CPU's, no host tensor among its own, and counted waits."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.basics import spec_of
from support.devices.pairs import on_both
from support.drafting.rules import ruled
from support.models.layers import write_layered_model
from support.services.stepped_draft import PROMPT, Draft

from outrider.engine.runner import ModelRunner
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TreeShape

SPEC = spec_of(PROMPT, 60, seed=11, eos=(), temperature=1.0)
SHAPES: dict[str, TreeShape | None] = {
    "chain": None,
    "grown": TreeShape(max_depth=4, max_children=3),
    "expanded": TreeShape(expansions=(3, 2, 1)),
    "static": TreeShape(is_static=True, max_children=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layered_model(tmp_path_factory.mktemp("layers") / "model")


def drafted(spec: SessionSpec, shape: TreeShape | None, runner: ModelRunner) -> list[Any]:
    """Proposals, as they travel, before and after a verdict that agrees with a part of them."""
    draft = Draft(runner)
    draft.open(spec, 11 if shape else 4, shape=shape)
    proposals, length = [draft.tree()], len(spec.token_ids)
    for count in (0, 1, 2):
        tree = proposals[-1]
        said = [*(tree.token_ids[row - 1] for row in tree.path(len(tree))[:count]), 7]
        length += len(said)
        draft.advance(1, length, said, 11 if shape else 4, shape)
        proposals.append(draft.tree())
    draft.table.clear()
    return proposals


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
@pytest.mark.parametrize("name", SHAPES)
def test_guesses_are_made_on_the_drafts_device(
    folder: Path, name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees, with the target's noise and with noise of its own, with their log-probabilities."""
    spec = replace(ruled(SPEC, rule), draft_logprobs=True)
    expected, found, waits = on_both(monkeypatch, folder, partial(drafted, spec, SHAPES[name]))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.parents, ours.distributions) == (
            theirs.token_ids,
            theirs.parents,
            theirs.distributions,
        )
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    # Distributions are made of what is read of their scores.
    assert set(waits) == ({"tolist"} if rule is Rule.MATCH else {"cpu"})
