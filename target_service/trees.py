"""Choice of the path of a session's tree that the target keeps, under rules that test with the draft's distributions.

One session at a time, because no two trees are alike. Chains, as most proposals are, go many at once through
target_service.acceptance; here they would be decided the same, bit for bit.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.devices import send
from outrider.engine.noise import Purpose, first_uniforms, noise_key, round_key
from outrider.engine.ops.faults import check_probs
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import (
    DrawInput,
    before_argmax,
    draw_from,
    row_contexts,
    scores_behind,
    undrawable,
)
from outrider.engine.sampling.transforms import index, transform
from outrider.errors import OutriderError
from outrider.parameters import Rule
from outrider.token_tree import TokenTree
from target_service.rules.lenient import lenient_greedy_row
from target_service.rules.recursive_rejection import recursive_rejection
from target_service.rules.traversal import traversal
from target_service.rules.tree_probs import tree_probs


class KeptPath(NamedTuple):
    """Rows of a tree that are accepted, from below the root on, and the token after the last of them."""

    rows: tuple[int, ...]
    next_token_id: int


def keep_path(runner: ModelRunner, draw_input: DrawInput, logits: Tensor) -> KeptPath | OutriderError:
    """Decides one session's tree under `ratio`, `block` or `lenient`, or says why there is no token after its root.

    logits [R + 1, V] are those after root and rows. A row that cannot be drawn is tested as a leaf. Where it passes it
    is not entered: its token is committed as the last one, and the next step finds the fault where plain decoding does.
    """
    session, tree = draw_input.feed.session, draw_input.feed.tree
    looked_at = before_argmax(draw_input) if draw_input.spec.acceptance.rule is Rule.LENIENT else draw_input
    rows: Sequence[int] = range(1, len(tree) + 1)
    try:
        target_probs = check_probs(runner.ops.softmax(scores_behind(runner, logits, [looked_at])))
    except ValueError:
        found = _row_by_row(runner, looked_at, logits)
        if isinstance(found, OutriderError):
            return found
        target_probs, faulty = found
        # Only rows with no faulty one above them. Such a row itself stays: dropped for what follows it, its token would
        # be judged by more than its probability.
        rows = [row for row in rows if not any(above in faulty for above in tree.path(row)[:-1])]
        numbers = {0: 0, **{row: number for number, row in enumerate(rows, start=1)}}
        tree = TokenTree(
            tuple(tree.token_ids[row - 1] for row in rows),
            tuple(numbers[tree.parents[row - 1]] for row in rows),
            tuple(tree.distributions[row - 1] for row in rows),
        )
        target_probs = target_probs.index_select(0, index([0, *rows], target_probs))
    last, next_probs = _decide(draw_input, tree, rows, target_probs)
    length = len(session) + tree.depths[last]
    purpose = Purpose.RESIDUAL if tree.children(last) else Purpose.TOKEN
    key = noise_key(draw_input.spec.seed, length, purpose)
    next_token_id = int(draw_from(next_probs[None], torch.tensor([key])))
    path = tree.path(last)
    if next_token_id < 0:
        path, next_token_id = path[:-1], tree.token_ids[last - 1]
    return KeptPath(tuple(rows[row - 1] for row in path), next_token_id)


def row_uniforms(tree: TokenTree, seed: int, base_len: int) -> list[float]:
    """The uniform that decides about each row: of its position, and of its number among the rows of its depth."""
    counts = [0] * (max(tree.depths) + 1)
    keys = []
    for depth in tree.depths[1:]:
        keys.append(round_key(seed, base_len, base_len + depth - 1, Purpose.ACCEPTANCE, lane=counts[depth]))
        counts[depth] += 1
    uniforms: list[float] = first_uniforms(keys).tolist()
    return uniforms


def _decide(draw_input: DrawInput, tree: TokenTree, numbers: Sequence[int], target_probs: Tensor) -> tuple[int, Tensor]:
    """The last accepted row of a tree, and what the next token follows [V], of any sum; of a faulty leaf all 0.

    numbers[row - 1] is what row of the proposal a row is: noise belongs to the proposal.
    """
    spec, proposal = draw_input.spec, draw_input.feed.tree
    acceptance = spec.acceptance
    if acceptance.rule is Rule.LENIENT and spec.sampling.temperature == 0:
        row = lenient_greedy_row(tree, target_probs, acceptance.lenience)
        probs, best = target_probs[row], target_probs[row].argmax(dim=0, keepdim=True)
        return row, torch.zeros_like(probs).scatter(0, best, probs[best])
    every = row_uniforms(proposal, spec.seed, len(draw_input.feed.session))
    uniforms = torch.tensor([[every[number - 1] for number in numbers]], dtype=torch.float64).numpy()
    probs_of_tree, token_ids = tree_probs(tree, target_probs)
    if acceptance.rule is Rule.BLOCK:
        outcome = traversal(probs_of_tree, uniforms)
    else:
        lenience = acceptance.lenience if acceptance.rule is Rule.LENIENT else 1.0
        outcome = recursive_rejection(probs_of_tree, uniforms, lenience)
    row = int(outcome.rows[0])
    ids, probs = index(token_ids[row], target_probs), target_probs[row]
    residual = probs.scatter(0, ids, send(outcome.left[0, : len(ids)], probs.device))
    # Where the target's distribution is the draft's, a rejection has probability 0 up to rounding.
    return row, torch.where(residual.amax() > 0, residual, probs)


def _row_by_row(
    runner: ModelRunner, looked_at: DrawInput, logits: Tensor
) -> tuple[Tensor, Collection[int]] | OutriderError:
    """Distributions [R + 1, V] after root and rows, 0 after those that cannot be drawn, and which these are."""
    found: dict[int, Tensor] = {}
    for row, context in enumerate(row_contexts(looked_at)):
        try:
            scores = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)
            found[row] = check_probs(runner.ops.softmax(scores))[0]
        except ValueError as error:
            if not row:
                return undrawable(runner, logits[row : row + 1], looked_at, context, error)
    nothing = torch.zeros_like(found[0])
    rows = range(len(logits))
    return torch.stack([found.get(row, nothing) for row in rows]), set(rows) - found.keys()
