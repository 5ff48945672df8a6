"""What is measured without a service, in this process: bandwidth, PyTorch's operators, and the bare engine.

One call of `Instruments.sample` takes a few samples of each, so that a run can spread them over its whole time.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from outrider.cli.bench.common import spec_of
from outrider.cli.bench.rounds.samples import (
    CONTEXT_LEN,
    DRAFT,
    ENGINE,
    MEMORY,
    MEMORY_BYTES,
    OPERATORS,
    READ,
    TARGET,
    Measurements,
    ModelSize,
    RoundsPlan,
    TimedAnswer,
    TimeSample,
)
from outrider.engine.batching import Feed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import TappedDecoder
from outrider.engine.models.weights import BESIDE_BLOCKS, DTYPES
from outrider.engine.runner import ModelRunner, reserve
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.engine.walk import Walk
from outrider.errors import ModelRefused, OutriderError
from outrider.model_service.server import load_model
from outrider.model_service.settings import Dtype, ModelServiceSettings
from outrider.parameters import SessionSpec
from outrider.token_tree import EMPTY, TokenTree
from target_service.acceptance import commit_walk
from target_service.verifier import commit

OPERATOR_ROWS = (1, 5)
STEPS_IN_A_ROW = 5
REPEATS = 2
KV_TOKENS = 4096


class Instruments:
    """Both models of a pair with their floors."""

    def __init__(self, plan: RoundsPlan) -> None:
        """Loads the pair as the services load it; takes seconds, and raises ModelRefused and InvalidRequest."""
        stack, memory_bytes = plan.stack, plan.memory_bytes
        self._plan = plan
        self.loops: dict[str, EngineLoop] = {}
        self.sizes: dict[str, ModelSize] = {}
        self._operators: dict[str, OperatorStep] = {}
        # A model that fits a cache is held against the cache, and a larger one against the memory.
        self._buffers: list[tuple[str, Tensor, int]] = []
        for role, model, dtype, threads in (
            (TARGET, stack.target, stack.dtype, stack.threads),
            (DRAFT, stack.draft or "", stack.dtype_of_draft, stack.draft_threads),
        ):
            settings = ModelServiceSettings(model, dtype=Dtype(dtype), threads=threads, kv_tokens=KV_TOKENS)
            loop = self.loops[role] = EngineLoop(load_model(settings).runner)
            size = self.sizes[role] = loop.size()
            self._operators[role] = OperatorStep(loop.config, DTYPES[loop.dtype] or BESIDE_BLOCKS, threads)
            # Past the caches more bytes do not come faster, so a large model needs no second copy of its size.
            self._buffers.append((role, torch.ones(min(size.step_bytes, memory_bytes) // 4), threads))
        self._buffers.append((MEMORY, torch.ones(memory_bytes // 4), stack.threads))

    def sample(self, measurements: Measurements) -> None:
        """Takes REPEATS samples of everything, one after the other."""
        plan, times = self._plan, measurements.times
        for _ in range(REPEATS):
            for role, buffer, threads in self._buffers:
                times.append(TimeSample(READ, role, read_ms(buffer, threads), num_bytes=buffer.nbytes))
            for (role, step), rows in product(self._operators.items(), OPERATOR_ROWS):
                times.append(TimeSample(OPERATORS, role, step.ms(rows), rows))
        for (role, loop), temperature, rows in product(self.loops.items(), plan.temperatures, plan.row_counts):
            # The caches hold something else after the point before: one step brings the weights back, as in a row of
            # rounds of one request.
            loop.step_ms(rows, temperature)
            for _ in range(REPEATS):
                times.append(TimeSample(ENGINE, role, loop.step_ms(rows, temperature), rows, temperature))


def read_ms(buffer: Tensor, num_threads: int) -> float:
    """Milliseconds to read a buffer, each thread its part of it."""
    # Threads of our own: those within one operator wait for each other, which is dear on a busy machine.
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = buffer.chunk(num_threads)
        return second_ms(lambda: list(pool.map(Tensor.sum, parts)))


def second_ms(run: Callable[[], object]) -> float:
    """Milliseconds of a second run right after a first one, which brings back what the caches lost."""
    run()
    started_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - started_ns) / 1e6


class OperatorStep:
    """One decoder step of a model's shape, written by hand in PyTorch's operators: the second floor.

    Weights are constants, the cache is one contiguous tensor, rows are not bitwise independent of their number. It
    shows what an engine would cost that does nothing but call the operators.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_threads: int) -> None:
        self._config, self._dtype, self._num_threads = config, dtype, num_threads
        width, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
        shapes = {
            "qkv": ((heads + 2 * groups) * config.head_dim, width),
            "output": (width, heads * config.head_dim),
            "gate_up": (2 * config.intermediate_size, width),
            "down": (width, config.intermediate_size),
        }
        # Values do not change the time, but layers must have memory of their own, at least as much as no cache holds.
        layer_bytes = sum(rows * columns for rows, columns in shapes.values()) * dtype.itemsize
        num_own = min(config.num_layers, 1 + MEMORY_BYTES // layer_bytes)
        own = [{name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()} for _ in range(num_own)]
        self._layers = [own[index % num_own] for index in range(config.num_layers)]
        self._head = torch.full((config.vocab_size, width), 0.01, dtype=dtype)
        self._norm = torch.ones(width, dtype=dtype)
        length = CONTEXT_LEN + max(OPERATOR_ROWS)
        self._cache = torch.zeros(config.num_layers, 2, groups, length, config.head_dim, dtype=dtype)

    def ms(self, rows: int) -> float:
        """Milliseconds of a second forward over `rows` new tokens after the context, logits of every row included."""
        torch.set_num_threads(self._num_threads)
        token_ids = torch.arange(rows) % self._config.vocab_size
        rotation = torch.ones(2, rows, 1, self._config.head_dim, dtype=self._dtype)
        mask = torch.ones(rows, CONTEXT_LEN + rows, dtype=torch.bool).tril(CONTEXT_LEN) if rows > 1 else None
        return second_ms(lambda: self._forward(token_ids, rotation, mask))

    def _forward(self, token_ids: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        config, rows, x = self._config, len(token_ids), functional.embedding(token_ids, self._head)
        num_rotated = config.num_heads + config.num_kv_heads
        for layer, cache in zip(self._layers, self._cache, strict=True):
            heads = functional.linear(self._normed(x), layer["qkv"]).view(rows, -1, config.head_dim)
            # Rotary embedding of halves (Su et al., 2021); the rotation holds cosines and sines.
            first, second = heads[:, :num_rotated].chunk(2, dim=-1)
            rotated = heads[:, :num_rotated] * rotation[0] + torch.cat((second.neg(), first), dim=-1) * rotation[1]
            window = cache[:, :, : CONTEXT_LEN + rows]
            window[0, :, CONTEXT_LEN:] = rotated[:, config.num_heads :].transpose(0, 1)
            window[1, :, CONTEXT_LEN:] = heads[:, num_rotated:].transpose(0, 1)
            query = rotated[:, : config.num_heads].transpose(0, 1).unsqueeze(0)
            keys, values = window.unsqueeze(1)
            mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + functional.linear(mixed[0].transpose(0, 1).reshape(rows, -1), layer["output"])
            gate, up = functional.linear(self._normed(x), layer["gate_up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(self._normed(x), self._head)

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self._norm.shape, self._norm, 1e-5)


class EngineLoop:
    """The engine as a service runs it, without a message: single steps, and the plain loop.

    Times what a service counts as compute: a forward and the draw after each row.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Raises ModelRefused unless it is a model of our own transformer; the floors count its matrices."""
        if not isinstance(runner.config, ModelConfig):
            name, modelling = runner.identity.model_name, runner.identity.modelling
            raise ModelRefused(f"{name} is computed by {modelling}, whose floors are not known", model=name)
        self.config, self._runner, self.dtype = runner.config, runner, runner.identity.dtype
        self._token_ids = [(7 * index + 11) % runner.vocabulary_size for index in range(CONTEXT_LEN)]
        # Stays cached between the samples.
        self._session = runner.open(self._token_ids, CONTEXT_LEN)
        while self._session.cached_len < CONTEXT_LEN:
            runner.forward([Feed(self._session)])

    def size(self) -> ModelSize:
        """Bytes that one step touches: all layers and the product with the vocabulary.

        Of an embedding of its own a step reads one row for a token, which does not count.
        """
        model = self._runner.model
        is_own = isinstance(model, TappedDecoder) and model.head is not model.embedding
        read = [weight for weight in model.weights if not (is_own and weight is model.embedding)]
        step_bytes = sum(weight.nbytes for weight in read)
        return ModelSize(self._runner.identity.model_name, step_bytes)

    def step_ms(self, rows: int, temperature: float) -> float:
        """Milliseconds of one forward over the last committed token and a chain after it, with the draws.

        The median of a few in a row, because that is a loop: a single one would be measured with the caches of whatever
        ran before it.
        """
        torch.set_num_threads(self._runner.torch_threads)
        spec = spec_of(self._token_ids, 0, temperature, rows + 1)
        draw_input = DrawInput(Feed(self._session, TokenTree.chain(self._token_ids[: rows - 1])), spec)
        return median(self._step(draw_input)[1] for _ in range(STEPS_IN_A_ROW))

    def plain(self, spec: SessionSpec) -> TimedAnswer:
        """Decodes a request to its limit."""
        torch.set_num_threads(self._runner.torch_threads)
        session = self._runner.open(spec.token_ids, spec.prompt_len)
        started_s, first_token_s = time.perf_counter(), 0.0
        try:
            while len(session) < spec.max_len:
                [token_id], _ = self._step(DrawInput(Feed(session, EMPTY), spec))
                commit(session, commit_walk(EMPTY, Walk((), token_id, 0), spec, len(session)))
                first_token_s = first_token_s or time.perf_counter() - started_s
            return tuple(session.token_ids[spec.prompt_len :]), time.perf_counter() - started_s, first_token_s, ()
        finally:
            session.free()

    def _step(self, draw_input: DrawInput) -> tuple[list[int], float]:
        """Tokens drawn after the rows of one forward, and its milliseconds."""
        reserve(self._runner, draw_input.feed, lambda allocate: allocate())
        started_ns = time.perf_counter_ns()
        [drawn] = forward_and_draw(self._runner, [draw_input])
        passed_ms = (time.perf_counter_ns() - started_ns) / 1e6
        if isinstance(drawn, OutriderError):
            raise drawn
        if drawn is None:
            raise ValueError("a step is to be small enough for one forward")
        return drawn, passed_ms
