"""Rounds that are tried and taken back: every rule guesses and decides behind the same tokens, as the services do it.

Drafts, laws, coins and decisions are the services' own functions; there is no message and no clock. Nothing that a
round accepts is committed, so that two rules are compared in the same places and not along two texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.engine_loop import spec_of
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.task import MODEL, DraftTask, noise_of
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import quantise
from outrider.engine.sampling.draw import DrawInput, row_contexts
from outrider.engine.sampling.transforms import transform
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.parameters import Acceptance, SessionSpec
from outrider.rpc.fencing import Meter
from outrider.token_tree import EMPTY, TokenTree
from target_service.acceptance import Walk
from target_service.rules.batched import decide


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models with room for the sessions of a run."""

    target: ModelRunner
    draft: ModelRunner


@dataclass(frozen=True, slots=True)
class Trial:
    """One round: what was proposed, and what the target said to it."""

    tree: TokenTree
    way: Walk


class Readers:
    """Both models at the same places of some texts, which the target writes itself."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, text_len: int) -> None:
        """Writes text_len tokens behind every prompt, ends of sequence ignored; prompt i has the seed i."""
        self._pair = pair
        self._specs = [spec_of(prompt, seed, temperature, text_len) for seed, prompt in enumerate(prompts)]
        self._target = [opened(pair.target, prompt) for prompt in prompts]
        self._draft = [opened(pair.draft, prompt) for prompt in prompts]
        for _ in range(text_len):
            for session, trial in zip(self._target, self._decide(self._specs, [EMPTY] * len(prompts)), strict=True):
                session.extend([trial.way.next_token_id])
        self._texts = [tuple(session.token_ids) for session in self._target]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of every session."""
        return [len(session) for session in self._target]

    def go_to(self, place: int) -> None:
        """Makes every session hold its prompt and the first `place` tokens of its text."""
        for spec, text, *sessions in zip(self._specs, self._texts, self._target, self._draft, strict=True):
            for session in sessions:
                session.replace_tail(1, text[1 : spec.prompt_len + place])

    def round(self, acceptance: Acceptance, draft_count: int, top_n: int) -> list[Trial]:
        """One round of every session, from its place and back to it."""
        specs = [replace(spec, acceptance=acceptance) for spec in self._specs]
        trials = self._decide(specs, self._propose(specs, draft_count, top_n))
        for session, place in zip(self._draft, self.lengths, strict=True):
            session.truncate(place)
        return trials

    def overlaps(self, top_ns: Sequence[int]) -> dict[int, list[float]]:
        """For each top-N and session the chance that `ratio` keeps the next draft token: sum of min(target, draft).

        0 stands for the draft's whole law, as it is before quantising.
        """
        target_probs = self._pair.target.ops.softmax(self._scores(self._pair.target, self._target))
        scores = self._scores(self._pair.draft, self._draft)
        draft_probs = self._pair.draft.ops.softmax(scores)
        found = {0: torch.minimum(target_probs, draft_probs).sum(dim=1).tolist()}
        for top_n in top_ns:
            laws = quantise(scores, top_n, self._pair.draft.ops)
            told = laws.weights / laws.weights.sum(dim=1, keepdim=True).double()
            found[top_n] = torch.minimum(target_probs.gather(1, laws.token_ids), told).sum(dim=1).tolist()
        return found

    def close(self) -> None:
        """Gives back what the sessions hold."""
        for session in (*self._target, *self._draft):
            session.free()

    def _propose(self, specs: Sequence[SessionSpec], draft_count: int, top_n: int) -> list[TokenTree]:
        drafter = ModelDrafter(self._pair.draft, call, top_n)
        noise = noise_of(MODEL, specs[0].acceptance.rule)
        tasks = [
            DraftTask(session, spec, noise, draft_count, Meter(), ended, refuse)
            for session, spec in zip(self._draft, specs, strict=True)
        ]
        while waiting := [task for task in tasks if not task.done]:
            drafter.advance(waiting)
        return [task.proposal for task in tasks]

    def _decide(self, specs: Sequence[SessionSpec], trees: Sequence[TokenTree]) -> list[Trial]:
        fed = zip(self._target, trees, specs, strict=True)
        asks = [DrawInput(Feed(session, tree), spec) for session, tree, spec in fed]
        result = self._pair.target.forward([ask.feed for ask in asks])
        ways = decide(self._pair.target, asks, result.logits, [rows or range(0) for rows in result.ranges])
        return [Trial(tree, found(way)) for tree, way in zip(trees, ways, strict=True)]

    def _scores(self, runner: ModelRunner, sessions: Sequence[Session]) -> Tensor:
        asks = [DrawInput(Feed(session), spec) for session, spec in zip(sessions, self._specs, strict=True)]
        logits = runner.forward([ask.feed for ask in asks]).logits
        return transform(logits, [row_contexts(ask)[0] for ask in asks], runner.vocabulary_size, runner.ops)


def opened(runner: ModelRunner, token_ids: Sequence[int]) -> Session:
    """A session whose tokens are cached, so that what follows fits into one forward."""
    session = runner.open(token_ids, len(token_ids))
    while session.cached_len < len(session):
        runner.forward([Feed(session)])
    return session


def call(allocate: Callable[[], None]) -> None:
    """Reserves room; a full pool is a run that was planned wrongly, and ends it."""
    allocate()


def ended(_task: DraftTask) -> None:
    """The task itself says that it is done."""


def refuse(error: OutriderError) -> None:
    """Nothing may fail in a measurement."""
    raise error


def found(way: Walk | OutriderError) -> Walk:
    """The walk; raises the error in its place."""
    if isinstance(way, OutriderError):
        raise way
    return way
