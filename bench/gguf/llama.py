"""llama.cpp by its C API, for a program that asks in lines of JSON; runs in an environment of its own (`make lab`).

Each line names what to `do` and its arguments, and is answered by a line with what came of it, or an error. Everything
is greedy. Speculation is written here, because the library has none: a batch of the last token and its guesses is
decoded, what agrees with the greedy tokens is kept, and the cache is cut after it.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from statistics import median
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

BATCH, CONTEXT = 512, 4096
# Tokens before the guesses that must have come before, the longest first.
NGRAMS = (3, 2, 1)
REPEATS = 5
# Rows that are quantised at a time.
ROWS = 64

row_size, quantise_chunk = libggml.ggml_row_size, libggml.ggml_quantize_chunk
row_size.argtypes, row_size.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_size_t
quantise_chunk.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
quantise_chunk.restype = ctypes.c_size_t

Guess = Callable[[list[int]], Sequence[int]]


class LlamaContext:
    """A model with a cache for one sequence."""

    def __init__(self, file: str, threads: int) -> None:
        self.model = lib.llama_model_load_from_file(os.fsencode(file), lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {file}")
        wanted = lib.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = CONTEXT, BATCH, BATCH
        wanted.n_threads = wanted.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, wanted)
        self.memory = lib.llama_get_memory(self.context)
        self.vocabulary_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def free(self) -> None:
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def cut(self, length: int) -> None:
        """Leaves the first tokens in the cache."""
        lib.llama_memory_seq_rm(self.memory, 0, length, -1)

    def decode(self, token_ids: Sequence[int], position: int, wanted: int) -> NDArray[np.float32]:
        """Logits [wanted, V] after the last of the tokens, which are put at a position; a view until the next call."""
        batch, first = self.batch, len(token_ids) - wanted
        batch.n_tokens = len(token_ids)
        for place, token_id in enumerate(token_ids):
            batch.token[place], batch.pos[place] = token_id, position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= first
        code = lib.llama_decode(self.context, batch)
        if code:
            raise ValueError(f"llama_decode of {len(token_ids)} tokens at {position} says {code}")
        return np.ctypeslib.as_array(lib.llama_get_logits(self.context), (wanted, self.vocabulary_size))

    def read(self, token_ids: Sequence[int]) -> int:
        """The greedy token after a prompt that replaces what is cached."""
        self.cut(0)
        for first in range(0, len(token_ids), BATCH):
            logits = self.decode(token_ids[first : first + BATCH], first, 1)
        return int(logits[0].argmax())


class LlamaDrafter:
    """Greedy guesses of a small model, whose cache follows the text."""

    def __init__(self, context: LlamaContext, count: int) -> None:
        self._context, self._count = context, count
        self._cached: list[int] = []

    def __call__(self, text: list[int]) -> list[int]:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._cached, text[:-1], strict=False)))
        self._context.cut(shared)
        missing, guesses = text[shared:], list[int]()
        for first in range(0, len(missing), BATCH):
            logits = self._context.decode(missing[first : first + BATCH], shared + first, 1)
        guesses.append(int(logits[0].argmax()))
        while len(guesses) < self._count:
            logits = self._context.decode(guesses[-1:], len(text) + len(guesses) - 1, 1)
            guesses.append(int(logits[0].argmax()))
        self._cached = text + guesses[:-1]
        return guesses


def looked_up(count: int) -> Guess:
    """Guesses are what followed when the last tokens came before, the latest time."""

    def guess(text: list[int]) -> list[int]:
        for length in NGRAMS:
            ending = text[-length:]
            for place in range(len(text) - length - 1, -1, -1):
                if text[place : place + length] == ending:
                    return text[place + length : place + length + count]
        return []

    return guess


class Lab:
    """What can be asked for, by the names of the methods."""

    def __init__(self) -> None:
        self._target: LlamaContext | None = None
        self._draft: LlamaContext | None = None

    @property
    def target(self) -> LlamaContext:
        if self._target is None:
            raise ValueError("no model is loaded")
        return self._target

    def load(self, file: str, threads: int, draft: str | None = None) -> float:
        """Takes a model, and perhaps one that guesses for it, in the place of those before; seconds that it took."""
        started_s = time.perf_counter()
        for each in filter(None, (self._target, self._draft)):
            each.free()
        self._target = LlamaContext(file, threads)
        # Of a draft so small a second thread is waited for longer than it helps.
        self._draft = LlamaContext(draft, 1) if draft else None
        return time.perf_counter() - started_s

    def generate(self, prompt: list[int], tokens: int, setting: str = "plain", count: int = 0) -> dict[str, Any]:
        """Tokens after a prompt; the seconds to the first of them and from there to the last; the passes for these."""
        guess = self._guess(setting, count)
        started_s = time.perf_counter()
        said = [self.target.read(prompt)]
        first_s, passes = time.perf_counter() - started_s, 0
        while len(said) < tokens:
            guesses = guess(prompt + said)
            position = len(prompt) + len(said) - 1
            best = self.target.decode([said[-1], *guesses], position, len(guesses) + 1).argmax(1).tolist()
            right = next((place for place, each in enumerate(guesses) if each != best[place]), len(guesses))
            said += best[: right + 1]
            self.target.cut(position + 1 + right)
            passes += 1
        seconds = time.perf_counter() - started_s - first_s
        return {"tokens": said, "first_s": first_s, "seconds": seconds, "passes": passes}

    def step_ms(self, rows: int, context: list[int]) -> float:
        """Median milliseconds of decoding so many tokens after a context, their greedy tokens found."""
        self.target.read(context)
        times = []
        for _ in range(REPEATS):
            started_s = time.perf_counter()
            self.target.decode(context[:rows], len(context), rows).argmax(1)
            times.append(1e3 * (time.perf_counter() - started_s))
            self.target.cut(len(context))
        return median(times)

    def logits(self, tokens: list[int], file: str) -> None:
        """Writes logits [T, V] after each of at most BATCH tokens into a file of numpy."""
        self.target.cut(0)
        np.save(file, self.target.decode(tokens, 0, len(tokens)))

    def quantise(self, source: str, file: str, mix: str, threads: int) -> None:
        """Writes a file in a mix of types, with llama.cpp's own quantiser."""
        wanted = lib.llama_model_quantize_default_params()
        wanted.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{mix}")
        wanted.nthread, wanted.allow_requantize = threads, True
        if lib.llama_model_quantize(os.fsencode(source), os.fsencode(file), ctypes.byref(wanted)):
            raise ValueError(f"llama.cpp cannot write {source} as {mix}")

    def blocks(self, file: str, kind: int) -> None:
        """Replaces rows of float32 in a file of numpy by those of a type with this number, uint8 [rows, bytes]."""
        rows = np.load(file)
        made = np.empty((len(rows), row_size(kind, rows.shape[1])), np.uint8)

        def write(first: int) -> None:
            some = rows[first : first + ROWS]
            quantise_chunk(kind, some.ctypes.data, made[first:].ctypes.data, 0, *some.shape, None)

        with ThreadPoolExecutor() as pool:
            list(pool.map(write, range(0, len(rows), ROWS)))
        np.save(file, made)

    def _guess(self, setting: str, count: int) -> Guess:
        if setting == "lookup":
            return looked_up(count)
        if setting == "draft" and self._draft is not None:
            return LlamaDrafter(self._draft, count)
        if setting == "plain":
            return lambda _text: ()
        raise ValueError(f"setting is {setting}, but must be plain, lookup, or draft where one is loaded")


@contextmanager
def own_output() -> Iterator[int]:
    """Standard output for the answers alone; whatever else is printed goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    yield answers


def main() -> None:
    """Answers every line until there are no more."""
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    lab = Lab()
    with own_output() as answers:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                said = {"said": getattr(lab, asked.pop("do"))(**asked)}
            except ValueError as error:
                said = {"error": str(error)}
            os.write(answers, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
