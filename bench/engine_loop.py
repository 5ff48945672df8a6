"""The engine as the services run it, in this process and without a message: single steps, and the plain loop.

Times what a service counts as compute: a forward and the draw behind each row. Changes nothing of the engine.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch

from bench.samples import StepPoint
from outrider.engine.batching import Feed
from outrider.engine.models.config import ModelConfig
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, forward_and_draw, reserve
from outrider.engine.session import Session
from outrider.errors import ModelRefused, OutriderError
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.token_tree import EMPTY, TokenTree
from target_service.acceptance import Walk, commit_walk
from target_service.verifier import commit

STEPS_IN_A_ROW = 5


def spec_of(token_ids: Sequence[int], seed: int, temperature: float, max_tokens: int) -> SessionSpec:
    """The session that the gateway makes of the same request, end of sequence ignored."""
    return SessionSpec(
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids),
        sampling=SamplingParameters(temperature=temperature, ignore_eos=True),
        seed=seed,
        max_len=len(token_ids) + max_tokens,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
    )


def own_config(runner: ModelRunner) -> ModelConfig:
    """The shape of a model of our own transformer; the floors count its matrices. Raises ModelRefused for others."""
    if not isinstance(runner.config, ModelConfig):
        name = runner.identity.model_name
        raise ModelRefused(f"{name} is computed by {runner.identity.modelling}, whose floors are not known", model=name)
    return runner.config


class EngineLoop:
    """One model with sessions of the wanted lengths, which stay cached between the samples."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sessions: dict[int, Session] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return own_config(self._runner)

    def longest_context(self, max_rows: int) -> int:
        """Most committed tokens that leave room for the drafts of a step of max_rows rows."""
        return self._runner.context_len - max_rows + 1

    def step_ms(self, point: StepPoint) -> float:
        """Milliseconds of one forward over the last committed token and a chain behind it, with the draws.

        The median of a few in a row, because that is a loop: a single one would be measured with the caches of whatever
        ran before it.
        """
        torch.set_num_threads(self._runner.torch_threads)
        session = self._session(point.context_len)
        spec = spec_of(session.token_ids, 0, point.temperature, point.rows + 1)
        tree = TokenTree.chain([self._token_id(index) for index in range(point.rows - 1)])
        ask = DrawInput(Feed(session, tree), spec)
        return median(self._step_ms(ask) for _ in range(STEPS_IN_A_ROW))

    def _step_ms(self, ask: DrawInput) -> float:
        reserve(self._runner, ask.feed, lambda allocate: allocate())
        started_ns = time.perf_counter_ns()
        _drawn(forward_and_draw(self._runner, [ask])[0])
        return (time.perf_counter_ns() - started_ns) / 1e6

    def plain(self, spec: SessionSpec) -> tuple[list[int], list[float]]:
        """Decodes a request to its limit; returns its tokens and, for each, the seconds since the beginning."""
        torch.set_num_threads(self._runner.torch_threads)
        session = self._runner.open(spec.token_ids, spec.prompt_len)
        started, times_s = time.perf_counter(), []
        try:
            while len(session) < spec.max_len:
                feed = Feed(session, EMPTY)
                reserve(self._runner, feed, lambda allocate: allocate())
                [token_id] = _drawn(forward_and_draw(self._runner, [DrawInput(feed, spec)])[0])
                commit(session, commit_walk(EMPTY, Walk((), token_id, 0), spec, len(session)))
                times_s.append(time.perf_counter() - started)
            return session.token_ids[spec.prompt_len :], times_s
        finally:
            session.free()

    def _session(self, context_len: int) -> Session:
        if context_len not in self._sessions:
            token_ids = [self._token_id(index) for index in range(context_len)]
            session = self._runner.open(token_ids, context_len)
            while session.cached_len < context_len:
                feed = Feed(session)
                reserve(self._runner, feed, lambda allocate: allocate())
                self._runner.forward([feed])
            self._sessions[context_len] = session
        return self._sessions[context_len]

    def _token_id(self, index: int) -> int:
        return (7 * index + 11) % self._runner.vocabulary_size


def _drawn(outcome: list[int] | OutriderError | None) -> list[int]:
    if isinstance(outcome, OutriderError):
        raise outcome
    if outcome is None:
        raise ValueError("a step is to be small enough for one forward")
    return outcome
