"""Which draft tokens the target keeps under the rule `match`, and what a walk commits under any rule.

Under `match` the target draws its own token at every row of the
proposal, with the noise of that position, and follows the child that carries it. What is committed is therefore what
plain decoding with the same noise would have drawn, whatever the draft proposed. A draft that uses the same noise
proposes the target's token as often as the two distributions allow without communication: Daliri, Musco and Suresh,
"Coupling without communication and drafter-invariant speculative decoding", 2024, arXiv 2408.07978.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.parameters import FinishReason, SessionSpec, TokenLogprob
from outrider.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk down a proposal: what is kept of it, the token behind that, and how many draft tokens were tested."""

    accepted_rows: tuple[int, ...]
    next_token_id: int
    evaluated_count: int


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """What the target commits on top of the first `base_len` tokens.

    `token_ids` are the tokens of the accepted rows, then `next_token_id` unless that is None because the request ended
    within the accepted rows. `finish_reason` says why the last of them is the request's last token, None while it goes
    on. `evaluated_count` draft tokens were tested.
    """

    base_len: int
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    next_token_id: int | None
    finish_reason: FinishReason | None
    evaluated_count: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of token_ids, where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each token of the prompt but the first, where the request asked for them and this comes first."""
    prefix_len: int = 0
    """Tokens found in the prefix cache, where this is the first verdict of an opening."""


def walk(tree: TokenTree, drawn: Sequence[int], substitutes: Sequence[int] = ()) -> Walk:
    """Follows the draws from the root; drawn[row] is the target's token behind that row, drawn[0] behind the root.

    Rows count from 1. Of siblings with the same token the lowest row is followed. Where no child carries the draw,
    substitutes[row] is followed, unless it is 0: the rule `typical`. A row whose draw is negative has none and is not
    entered: its token ends the walk as the target's own, and the next step finds the fault where plain decoding finds
    it. Raises ValueError when there is not one draw for the root and each row.
    """
    if len(drawn) != len(tree) + 1:
        raise ValueError(f"{len(drawn)} draws for a root and {len(tree)} rows")
    visited, next_token_id = [0], drawn[0]
    while child := child_with(tree, visited[-1], drawn[visited[-1]]) or (substitutes and substitutes[visited[-1]]):
        if drawn[child] < 0:
            next_token_id = tree.token_ids[child - 1]
            break
        visited.append(child)
        next_token_id = drawn[child]
    return Walk(tuple(visited[1:]), next_token_id, _evaluated_count(tree, visited))


def child_with(tree: TokenTree, row: int, token_id: int) -> int:
    """The first child with this token, 0 for none: the root is nobody's child."""
    return next((child for child in tree.children(row) if tree.token_ids[child - 1] == token_id), 0)


def commit_walk(tree: TokenTree, walked: Walk, spec: SessionSpec, base_len: int) -> TargetVerdict:
    """Commits what a walk accepted, up to the first token that ends the request.

    A draft token that is accepted and ends the request is the last one: there is no next token, and nothing behind it
    counts as evaluated. EOS comes before a stop token, and both before the length. Raises ValueError when the request
    had ended before.
    """
    if base_len >= spec.max_len:
        raise ValueError(f"a request of {spec.max_len} tokens has ended at {base_len}")
    token_ids = (*(tree.token_ids[row - 1] for row in walked.accepted_rows), walked.next_token_id)
    for count, token_id in enumerate(token_ids, start=1):
        reason = _finish_reason(token_id, base_len + count, spec)
        if reason is not None and count <= len(walked.accepted_rows):
            rows = walked.accepted_rows[:count]
            evaluated_count = _evaluated_count(tree, (0, *rows[:-1]))
            return TargetVerdict(base_len, rows, token_ids[:count], None, reason, evaluated_count)
    # The loop ended at the next token, so that `reason` is the one of that token.
    return TargetVerdict(
        base_len, walked.accepted_rows, token_ids, walked.next_token_id, reason, walked.evaluated_count
    )


def _evaluated_count(tree: TokenTree, visited: Sequence[int]) -> int:
    """A visited row's draw decides all of its children at once: one is accepted at most, the others are rejected."""
    return sum(len(tree.children(row)) for row in visited)


def _finish_reason(token_id: int, length: int, spec: SessionSpec) -> FinishReason | None:
    if token_id in spec.eos_token_ids:
        return FinishReason.EOS
    if token_id in spec.stop_token_ids:
        return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if length >= spec.max_len else None
