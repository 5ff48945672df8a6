"""A row without a finite logit: a proposal changes neither the tokens before it nor where the request fails."""

import pytest
import torch
from support.basics import spec_of
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, Target, plain
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.walk import Walk, walk
from outrider.errors import OutriderError
from outrider.token_tree import TokenTree
from target_service.states import Step

SPEC = spec_of(PROMPT, 40, eos=())


def _spoil(target: Target, monkeypatch: pytest.MonkeyPatch, token_ids: set[int]) -> None:
    """The model has no logits after these tokens."""
    forward = target.runner.model.forward

    def spoiled(plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        logits = forward(plan, cache, wanted)
        bad = torch.isin(plan.token_ids[wanted], torch.tensor(sorted(token_ids)))
        return logits.masked_fill(bad[:, None], torch.nan)

    monkeypatch.setattr(target.runner.model, "forward", spoiled)


def test_a_row_that_the_walk_never_reaches_harms_nobody(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sibling and the wrong guess are as if they had never been proposed."""
    expected = plain(target.runner, SPEC)
    used = set(expected)
    bad = next(token for token in range(VOCABULARY_SIZE) if token not in used)
    target.open(SPEC)
    target.run()
    _spoil(target, monkeypatch, {bad})
    tree = TokenTree((bad, expected[6], bad), (0, 0, 2))
    target.sessions.step(target.fence(1, 6), Step(tree, 0, 0), target.answers)
    [answer] = target.run()
    assert answer.content is not None
    assert (answer.content.accepted_rows, answer.content.next_token_id) == ((2,), expected[7])


def test_a_row_that_the_walk_reaches_fails_as_in_plain_decoding(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is committed, and the step after it fails."""
    expected = plain(target.runner, SPEC)
    target.open(SPEC)
    target.run()
    bad_at = next(index for index in range(7, 40) if expected[index] not in expected[5:index])
    _spoil(target, monkeypatch, {expected[bad_at]})
    target.step(1, 6, expected[6 : bad_at + 3], budget=9)
    target.device.run(target.verifier.advance)
    error = target.answers.pop().error
    assert isinstance(error, OutriderError)
    assert f"behind {bad_at + 1} tokens" in str(error)
    committed = [answer.content.token_ids for answer in target.run() if answer.content]
    assert [token for token_ids in committed for token in token_ids] == expected[6 : bad_at + 1]


def test_the_walk_does_not_enter_a_row_without_a_draw() -> None:
    """Its token is the target's own next one."""
    assert walk(TokenTree.chain([5, 6, 7]), [5, 6, -1, 9]) == Walk((1,), 6, 2)
