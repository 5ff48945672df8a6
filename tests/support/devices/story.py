"""Forwards of all kinds over one cache, for whoever computes them and wherever."""

import torch
from support.models.engine_cases import TREE, finish, random_ids
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import TokenTree

CHAIN = TokenTree.chain((7, 8, 9))


def numbers(runner: ModelRunner, logits: list[Tensor], *sessions: Session) -> list[Tensor]:
    """Logits, and what the sessions have cached; copied on the device, which makes nobody wait."""
    features = [
        runner.cache.features.index_select(0, torch.from_numpy(slots).to(runner.device, non_blocking=True))
        for session in sessions
        for slots in (session.table.slots(0, session.cached_len),)
    ]
    pages = [part for each in sessions for part in runner.cache.gather(each.table.slots(0, each.cached_len))]
    return [*logits, *features, *pages]


def tell(runner: ModelRunner) -> list[Tensor]:
    """Prompts in pieces beside trees, chains and steps; what is kept of a bushy tree, a fork, a cut and a prefix."""
    runner.max_rows = 24
    one, other, third = (runner.open(random_ids(20 + 9 * number, number, 257), 5, b"salt") for number in range(3))
    found = finish(runner, Feed(one, TREE), Feed(other), Feed(third, CHAIN))
    one.keep((2, 5, 6, 7))
    third.keep((1, 2))
    twin = third.fork()
    twin.extend([4])
    other.truncate(11)
    found += finish(runner, Feed(one), Feed(twin, TREE), Feed(other, CHAIN), Feed(third, wants_prefix=True))
    one.publish(len(one))
    late = runner.open([*one.token_ids, 9], 5, b"salt")
    assert late.take_prefix()
    found += finish(runner, Feed(late))
    grown = finish(runner, Feed(one, CHAIN))
    more = TokenTree((*CHAIN.token_ids, 11, 12), (*CHAIN.parents, 1, 4))
    return numbers(runner, [*found, *grown, *finish(runner, Feed(one, more, num_computed=4))], one, twin, late, third)


def tapped(runner: ModelRunner) -> ModelRunner:
    """The runner, which keeps features."""
    runner.tap((0, 1, runner.config.num_layers))
    return runner
