"""What finished answers said, and what a head read meanwhile, kept on disk for the training of that head.

One file an answer, in the form of models/training/material.py: token_ids and is_answer [1, L], taps [1, L, F] and
normed [1, L, H] in bfloat16, and the temperature [1] beside them. A long one is cut into several files. The device
thread copies rows of the cache; another thread writes them. Files are written beside their places and moved there, so
that a kill leaves whole ones only.
"""

import fcntl
import json
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from safetensors.torch import save
from torch import Tensor

from outrider.engine.devices import send
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import InvalidRequest
from outrider.parameters import SessionSpec

log = structlog.get_logger()

ROW_TOKENS = 512
# Of a prompt that does not fit into a row, what stands before its answer.
CONTEXT_TOKENS = 256
# Fewer tokens of an answer teach nothing that is worth a file.
MIN_ANSWER_TOKENS = 8
MAX_PENDING_BYTES = 64 << 20
FACTS = "recorded.json"
SHARD, VERSION, SUFFIX, UNFINISHED = "shard-", "version-", ".safetensors", ".partial"


class RecordedRows(NamedTuple):
    """A stretch of a text, whose features are on the device still."""

    token_ids: Sequence[int]
    is_answer: Sequence[bool]
    temperature: float
    features: Tensor
    """[L or L - 1, all that is tapped] bfloat16: the last token may not have been read."""


def may_be_recorded(spec: SessionSpec) -> bool:
    """Whether nothing about a request forbids to keep it: no salt, which tenants have, no constraint, and no word."""
    return not (spec.unrecorded or spec.cache_salt or spec.grammar)


class Recorder:
    """Keeps the newest answers of one target in a folder, at most so many bytes of them."""

    def __init__(self, folder: Path, max_bytes: int, target: ModelRunner, taps: Sequence[int]) -> None:
        """From now on the target keeps what leaves its final norm, beside what a head reads at `taps`.

        Raises InvalidRequest about a folder that another target records into, or has; OSError where it cannot be used.
        """
        self._folder, self._max_bytes, self._runner = folder, max_bytes, target
        target.tap((*taps, target.config.num_layers))
        self._columns = torch.from_numpy(target.cache.columns((*taps, target.config.num_layers)))
        self._num_features = len(target.cache.columns(taps))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = {"model": target.identity.model_name, "model_hash": target.identity.model_hash, "taps": [*taps]}
        # Holds the folder for this process.
        self._lock: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _claim(folder, facts)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidRequest("--record", str(folder), "a folder that no other target records into") from None
        except InvalidRequest:
            os.close(self._lock)
            raise
        for path in folder.glob(f"*{UNFINISHED}"):
            path.unlink()
        self._next = max((number_of(path) for path in shards(folder)), default=-1) + 1
        self._pending: queue.SimpleQueue[RecordedRows | None] = queue.SimpleQueue()
        self._pending_bytes, self._guard = 0, threading.Lock()
        self.num_dropped = 0
        """Pieces that were given up, because the disk was too slow or refused them."""
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def take(self, spec: SessionSpec, session: Session) -> None:
        """Takes what a session has said before its blocks are freed; on the device thread."""
        end = min(len(session), session.cached_len + 1)
        if end - session.prompt_len < MIN_ANSWER_TOKENS:
            return
        first = 0 if end <= ROW_TOKENS else max(0, session.prompt_len - CONTEXT_TOKENS)
        for start in range(first, end, ROW_TOKENS):
            stop = min(start + ROW_TOKENS, end)
            if stop - max(start, session.prompt_len) >= MIN_ANSWER_TOKENS:
                self._put(spec, session, start, stop)

    def _put(self, spec: SessionSpec, session: Session, start: int, stop: int) -> None:
        cached = min(stop, session.cached_len)
        cache = self._runner.cache
        num_bytes = 2 * (cached - start) * cache.features.shape[1]
        with self._guard:
            # One is always taken, however large its rows are.
            if self._pending_bytes and self._pending_bytes + num_bytes > MAX_PENDING_BYTES:
                self._drop("the disk is slower than the answers")
                return
            self._pending_bytes += num_bytes
        slots = send(session.table.slots(start, cached), cache.features.device)
        features = cache.features.index_select(0, slots).to(torch.bfloat16)
        is_answer = [position >= session.prompt_len for position in range(start, stop)]
        self._pending.put(RecordedRows(session.token_ids[start:stop], is_answer, spec.sampling.temperature, features))

    def close(self) -> None:
        """Writes what is pending, and lets go of the folder; idempotent."""
        self._pending.put(None)
        self._thread.join()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _drop(self, reason: str) -> None:
        """Counts an answer that is left out; under the guard."""
        self.num_dropped += 1
        log.warning("an answer was not recorded", folder=str(self._folder), reason=reason, num_dropped=self.num_dropped)

    def _write_all(self) -> None:
        # Torch keeps a number for each thread, and others would wait for these.
        torch.set_num_threads(1)
        while (piece := self._pending.get()) is not None:
            try:
                self._write(save(self._tensors(piece)))
            except OSError as error:
                # Disks fill up and folders are removed; no answer depends on it.
                with self._guard:
                    self._drop(str(error))
            with self._guard:
                self._pending_bytes -= piece.features.nbytes

    def _tensors(self, piece: RecordedRows) -> dict[str, Tensor]:
        features = piece.features.cpu().index_select(1, self._columns)
        features = torch.cat([features, features.new_zeros(len(piece.token_ids) - len(features), features.shape[1])])
        taps, normed = features[:, : self._num_features], features[:, self._num_features :]
        return {
            "token_ids": torch.tensor([piece.token_ids], dtype=torch.int64),
            "is_answer": torch.tensor([piece.is_answer]),
            "temperature": torch.tensor([piece.temperature]),
            "taps": taps[None].contiguous(),
            "normed": normed[None].contiguous(),
        }

    def _write(self, data: bytes) -> None:
        """Writes a file in the place of the oldest ones; raises OSError."""
        if len(data) > self._max_bytes:
            raise OSError(f"one answer takes {len(data)} bytes, more than all may")
        # Looked at each time, because the operator may remove any of them.
        sizes = {path: path.stat().st_size for path in shards(self._folder)}
        total = sum(sizes.values()) + len(data)
        for path, size in sizes.items():
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        _write_whole(self._folder / f"{SHARD}{self._next:03}{SUFFIX}", data)
        self._next += 1


def shards(folder: Path) -> list[Path]:
    """Files of recorded answers, the oldest first."""
    return sorted(folder.glob(f"{SHARD}*{SUFFIX}"), key=number_of)


def versions(folder: Path) -> list[Path]:
    """Folders of a head's versions that were published, the oldest first."""
    found = (path for path in folder.glob(f"{VERSION}*") if path.name.removeprefix(VERSION).isdecimal())
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """The number in the name of such a file or version."""
    return int(path.name.removeprefix(SHARD).removeprefix(VERSION).removesuffix(SUFFIX))


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and moves it there; its owner alone may read it."""
    beside = path.with_name(path.name + UNFINISHED)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    beside.replace(path)


def _claim(folder: Path, facts: dict[str, Any]) -> None:
    """Says whose answers the folder holds; raises InvalidRequest about another target's."""
    path = folder / FACTS
    if not path.exists():
        _write_whole(path, (json.dumps(facts) + "\n").encode())
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if found != facts:
        limit = f"empty, or have answers of {facts['model']} with the taps {facts['taps']}, as {FACTS} there would say"
        raise InvalidRequest("--record", str(folder), limit)
