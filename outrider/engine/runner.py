"""One model on one device with its cache, and the one kind of forward: uncached tokens, then the rows of a tree.

Belongs to the device thread. Lengths are known to the host, and logits stay on the device: only a forward that leaves
no token to draw waits for it.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import structlog
import torch
from torch import Tensor

from outrider.engine.batching import Batch, Feed, RowPlan, build_batch
from outrider.engine.cache import BLOCK_SIZE, BlockPool, BlockTable, KVCache
from outrider.engine.devices import bind, checked_device, one_thread
from outrider.engine.heads.head import TargetParts
from outrider.engine.models.checkpoints import Checkpoint, find_checkpoint
from outrider.engine.models.config import DecoderFacts
from outrider.engine.models.decoder import MEMORY_SHARE, Decoder, TappedDecoder
from outrider.engine.models.fused import fused
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import AUTO, DTYPES, KV_DTYPES, NUMERICS, PACKED_BITS
from outrider.engine.ops import Ops, choose_ops
from outrider.engine.ops.blocks import first_rows
from outrider.engine.ops.native import MAX_HEAD_DIM, MAX_THREADS, NativeOps
from outrider.engine.session import Session
from outrider.engine.sharing import share_rows
from outrider.errors import CacheFull, Field, InvalidRequest, ModelRefused, PromptTooLong
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.token_tree import EMPTY

log = structlog.get_logger()

Compute = Callable[[RowPlan, KVCache, Tensor], Tensor]
"""Computes rows as Decoder.forward does."""

MAX_ROWS = 512
# Rows of the smallest piece of a prompt that is tried where a device is out of memory.
MIN_PIECE_ROWS = 16
# Rows of prompts from which a forward shows what reading costs where there is much to read.
MIN_READING_ROWS = 64
# Of what such a forward has shown a row to cost, is believed.
READING_MOVES = 0.25
# 64 MiB of float32, beyond those after which tokens are drawn.
MAX_PREFIX_LOGITS = 1 << 24


@dataclass(slots=True)
class ForwardCounts:
    """Counts of the forwards of one runner."""

    num_rows: int = 0
    busy_s: float = 0.0
    """Seconds for which the device was busy with them, and with the draws after them."""
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Number of forwards by their number of sessions."""
    last: tuple[float, int] = 0.0, 0
    """Seconds and rows of the last forward, of several in one call of one of them."""
    reading_row_s: float = 0.0
    """Seconds of a row where prompts are read in large pieces, lately; 0 before the first of these."""
    _begun: tuple[int, int] = 0, 0
    _num_steps: int = 1

    def add(self, num_sessions: int, num_rows: int, num_prompt_rows: int = 0) -> None:
        self.num_rows += num_rows
        self.batch_sizes[num_sessions] = self.batch_sizes.get(num_sessions, 0) + 1
        self._begun, self._num_steps = (num_rows, num_prompt_rows), 1

    def go_on(self, num_steps: int, num_sessions: int) -> None:
        """Adds forwards that the last call has made after its first, each of a row of every session."""
        self.num_rows += num_steps * num_sessions
        self.batch_sizes[num_sessions] = self.batch_sizes.get(num_sessions, 0) + num_steps
        self._num_steps += num_steps

    def end(self, seconds: float) -> None:
        """Counts the time of the forward that was added last."""
        num_rows, num_prompt_rows = self._begun
        self.busy_s += seconds
        self.last = seconds / self._num_steps, num_rows
        if num_prompt_rows >= max(MIN_READING_ROWS, num_rows / 2):
            row_s = seconds / num_rows
            self.reading_row_s += (READING_MOVES if self.reading_row_s else 1.0) * (row_s - self.reading_row_s)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits of a forward, and the rows of them that belong to each feed."""

    logits: Tensor
    """[rows, V] float32 on the device, of roots and tree rows."""
    ranges: list[range | None]
    """Rows of logits of each feed: the root (its last committed token) first, then its tree's rows in row order;
    those that were computed before are left out. None: the feed is not finished, and is to be fed again."""
    prefixes: list[range]
    """Rows of logits, for each feed that wants them, of the tokens before the root that this forward computed."""
    grants: list[int]
    """Number of rows of each feed that were computed, with those that extensions have added."""

    @property
    def num_rows(self) -> int:
        """Number of rows that were computed."""
        return sum(self.grants)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Facts that distinguish one loaded model from another."""

    model_name: str
    """Last part of the folder or hub id, or the name of a sized or simulated model."""
    model_hash: str
    dtype: str
    num_threads: int
    vocabulary_size: int
    """Ids that the tokenizer knows: one more than the largest; at most the width of the logits."""
    modelling: str = ""
    """Library that computes the model, with its version; empty for our own code."""
    kv_dtype: str = "auto"
    """Type of keys and values, where it is asked for."""


class StepExtension:
    """Part of drafters in all forwards of a runner; by itself it changes nothing."""

    def __init__(self, runner: "ModelRunner") -> None:
        self.runner = runner

    @classmethod
    def in_forwards_of(cls, runner: "ModelRunner") -> Self:
        """The one of this class in a runner's forwards, which all drafters share that need it."""
        found = next((each for each in runner.extensions if isinstance(each, cls)), None)
        if found is None:
            found = cls(runner)
            runner.extensions.append(found)
        return found

    def extend(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        """The feeds with rows of its own after those of their trees, for which it has reserved slots.

        Sessions keep none of these rows. It must not raise for a lack of room.
        """
        return feeds

    def compute(self, feeds: Sequence[Feed], grants: Sequence[int]) -> Compute | None:
        """How to compute the rows that each feed is granted; None: as always."""
        return None

    def take(self, feeds: Sequence[Feed], logits: Tensor, ranges: list[range | None]) -> None:
        """Takes the rows that it has added out of the ranges of the feeds, which are as they were given."""


class ModelRunner:
    """Runs forwards over many sessions at once."""

    def __init__(
        self,
        model: Decoder,
        identity: ModelIdentity,
        kv_tokens: int,
        max_rows: int = MAX_ROWS,
        *,
        context_len: int | None = None,
    ) -> None:
        """Without a context_len sessions may be as long as the model reads."""
        self.identity = identity
        self.max_rows = max_rows
        self.context_len = context_len or model.config.context_len
        self.cache_reason = ""
        """Why the cache has its size, where `load` decided that."""
        config = model.config
        self.pool = BlockPool(-(-kv_tokens // BLOCK_SIZE))
        num_slots = self.pool.num_blocks * BLOCK_SIZE
        # A position has a slot.
        longest = min(self.context_len, num_slots)
        self.model: Decoder = fused(model, longest) if isinstance(model, Transformer) else model
        self.cache = KVCache(
            config.num_layers, num_slots, config.num_kv_heads, config.head_dim, model.cache_dtype, self.device
        )
        self.extensions: list[StepExtension] = []
        self.forward_counts = ForwardCounts()
        self._num_forwards = 0
        # Rows of prompts in a forward, as far as a device has memory for them.
        self._prompt_room = sys.maxsize
        self._started_s: float | None = None

    @classmethod
    def load(  # noqa: PLR0913 - what a service has options for
        cls,
        model: str | Checkpoint,
        *,
        device: str = "cpu",
        dtype: str = AUTO,
        num_threads: int = 1,
        kv_tokens: int | None = None,
        kv_memory_share: float | None = None,
        context_len: int | None = None,
        vocabulary_size: int | None = None,
        kernels: str = "auto",
        kv_dtype: str = "auto",
    ) -> Self:
        """Loads a folder, a hub id, a sized or simulated model (model_names.py), or what find_checkpoint found.

        dtype, "bfloat16", "float32", or on the CPU "int8", "int4" or one of BLOCK_DTYPES, is that of the weights in
        memory, whatever the files hold; the last keep those of a GGUF file as they are, and "auto" is the one that
        suits such a file, or bfloat16 elsewhere.
        kv_dtype, "float32" or "bfloat16", is that of keys and values on the CPU, by default float32.
        kv_tokens is the size of the cache in tokens, context_len the most tokens of a session; by default what
        Decoder.fit_cache finds, on CUDA in kv_memory_share, in (0, 1], of what is free beside the weights.
        vocabulary_size defaults to the width of the logits. Raises ModelRefused and InvalidRequest, and NotReady when
        files changed meanwhile.
        """
        torch_device = checked_device(device)
        _check_types(dtype, kv_dtype, torch_device)
        if not 1 <= num_threads <= MAX_THREADS:
            raise InvalidRequest("num_threads", num_threads, f"in [1, {MAX_THREADS}]")
        _check_memory(kv_tokens, kv_memory_share, torch_device)
        checkpoint = find_checkpoint(model) if isinstance(model, str) else model
        _check_quantised(checkpoint, dtype)
        config = checkpoint.config
        if context_len is not None and not 1 <= context_len <= config.context_len:
            reads = f"in [1, {config.context_len}], which is what {checkpoint.name} reads"
            raise InvalidRequest("context_len", context_len, reads)
        known = config.vocab_size if vocabulary_size is None else vocabulary_size
        if not 1 <= known <= config.vocab_size:
            message = f"{checkpoint.name}: the tokenizer knows {known} ids, but the model embeds {config.vocab_size}"
            raise ModelRefused(message, vocabulary_size=known, vocab_size=config.vocab_size)
        input_bits = BLOCK_DTYPES.get(checkpoint.block_dtype if dtype == AUTO else dtype, 8)
        ops = choose_ops(torch_device, num_threads, PACKED_BITS.get(dtype), kernels, input_bits)
        if dtype == AUTO:
            dtype = checkpoint.block_dtype if checkpoint.block_dtype and isinstance(ops, NativeOps) else "bfloat16"
        elif dtype in BLOCK_DTYPES and not isinstance(ops, NativeOps):
            raise InvalidRequest("dtype", dtype, "another one here: the compiled kernels are missing")
        if isinstance(ops, NativeOps) and config.head_dim > MAX_HEAD_DIM:
            message = f"{checkpoint.name} has heads of {config.head_dim}, but at most {MAX_HEAD_DIM} fit the kernels"
            raise ModelRefused(message, head_dim=config.head_dim, limit=MAX_HEAD_DIM)
        bind(torch_device)
        # Torch's own threads wait for each other at every piece of a tensor, for long where the machine has other work.
        with one_thread():
            decoder, digest = checkpoint.build(torch_device, DTYPES[dtype], ops)
        decoder.kv_dtype = KV_DTYPES[kv_dtype]
        identity = ModelIdentity(checkpoint.name, digest, dtype, num_threads, known, checkpoint.modelling, kv_dtype)
        size = decoder.fit_cache(kv_tokens, context_len, kv_memory_share or MEMORY_SHARE)
        runner = cls(decoder, identity, size.num_tokens, context_len=size.context_len)
        runner.cache_reason = size.reason
        return runner

    @property
    def parts(self) -> TargetParts:
        """Parts that a head shares with this model; raises ModelRefused for one without a state that heads can read."""
        if not isinstance(self.model, TappedDecoder):
            message = f"{self.identity.model_name} has no state that a head could read"
            raise ModelRefused(message, model=self.identity.model_name)
        embedding = first_rows(self.model.embedding, self.config.vocab_size)
        return TargetParts(embedding, self.model.head, self.config.num_layers, self.context_len)

    def tap(self, boundaries: Sequence[int]) -> None:
        """Lets every forward from now on store the residuals at these boundaries too; see KVCache.taps.

        Raises InvalidRequest for boundaries outside [0, N], and ValueError for new ones after a forward.
        """
        stray = next((each for each in boundaries if not 0 <= each <= self.config.num_layers), None)
        if stray is not None:
            raise InvalidRequest("taps", stray, f"in [0, {self.config.num_layers}]")
        # After those that there are, whose places others know.
        taps = tuple(dict.fromkeys((*self.cache.taps, *sorted(boundaries))))
        if taps == self.cache.taps:
            return
        if self._num_forwards:
            raise ValueError("what has been computed already has no such features")
        self.cache.keep_features(len(taps) * self.model.embedding.shape[1], taps)

    @property
    def config(self) -> DecoderFacts:
        return self.model.config

    @property
    def ops(self) -> Ops:
        return self.model.ops

    @property
    def torch_threads(self) -> int:
        """Threads that torch should use on the device thread (torch.set_num_threads holds for the calling thread)."""
        # Compiled kernels have their own, and torch's would only wait for each other at every small operation.
        return 1 if isinstance(self.ops, NativeOps) else self.identity.num_threads

    @property
    def device(self) -> torch.device:
        """Device of weights, cache and logits."""
        return self.model.embedding.device

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row's bits depend on nothing but the row; see outrider.engine.ops."""
        return self.model.is_row_invariant

    @property
    def numerics_id(self) -> str:
        """Name of everything that may change the last bit of a logit, for instance "cpu-bfloat16-native-v4"."""
        doubt = "variant" if "triton" in self.ops.name and not self.is_row_invariant else ""
        cached = "kv16" if self.identity.kv_dtype == "bfloat16" else ""
        dtype = NUMERICS.get(self.identity.dtype, self.identity.dtype)
        parts = (self.device.type, dtype, cached, self.identity.modelling, self.ops.name, doubt)
        return "-".join(filter(None, parts))

    @property
    def vocabulary_size(self) -> int:
        """Ids that the tokenizer knows; logits past it are padding."""
        return self.identity.vocabulary_size

    def open(self, token_ids: Sequence[int], prompt_len: int, salt: bytes | None = None) -> Session:
        """A session with nothing cached and no block taken; raises PromptTooLong and InvalidRequest.

        It shares cached prefixes with sessions of the same salt, and none without a salt.
        """
        if len(token_ids) > self.context_len:
            message = f"{len(token_ids)} tokens are more than the model's context of {self.context_len}"
            raise PromptTooLong(message, tokens=len(token_ids), context_len=self.context_len)
        self._check_ids(token_ids)
        session = Session(BlockTable(self.pool, self.cache), token_ids, prompt_len, salt)
        session.arrival = self._num_forwards
        return session

    def forward(
        self, feeds: Sequence[Feed], max_prompt_rows: int | None = None, compute: Compute | None = None
    ) -> ForwardResult:
        """Computes at most max_rows rows of the feeds; afterwards their sessions' committed tokens are cached so far.

        At most max_prompt_rows of them are rows of prompts; see outrider.engine.sharing. Where a device has no memory
        for so many, these are fewer from then on; raises torch.OutOfMemoryError when that does not help.
        A session appears once. Blocks are reserved for all feeds before anything is computed: CacheFull and
        InvalidRequest leave every session's tokens and cache as they were. To learn which session does not fit, call
        `check` and `Session.reserve` for each one first; then this raises neither.
        """
        bind(self.device)
        if len({id(feed.session) for feed in feeds}) != len(feeds):
            raise ValueError("a session may appear only once in a forward")
        for feed in feeds:
            self.check(feed)
        for feed in feeds:
            feed.session.reserve(feed.num_reserved, feed.start)
        extended = feeds
        for extension in self.extensions:
            extended = extension.extend(extended)
        max_prefix_rows = max(1, MAX_PREFIX_LOGITS // self.config.vocab_size)
        most_rows = self._prompt_room if max_prompt_rows is None else min(max_prompt_rows, self._prompt_room)
        grants = share_rows(extended, self.max_rows, max_prefix_rows, most_rows)
        if not any(grants):
            nothing = torch.empty(0, self.config.vocab_size, device=self.device)
            return ForwardResult(nothing, [None] * len(feeds), [range(0)] * len(feeds), grants)
        batch = build_batch(extended, grants, self.device, self.model.tiles)
        computes = compute or self.model.forward
        for extension in self.extensions:
            computes = extension.compute(extended, grants) or computes
        for feed in feeds:
            # The rows of an earlier tree are about to be overwritten, whatever comes of this forward.
            feed.session.advance(feed.session.cached_len, feed.begun)
        self._started_s = time.perf_counter()
        num_prompt_rows = sum(grant for feed, grant in zip(extended, grants, strict=True) if feed.is_prompt)
        logits = self._try(computes, batch, num_prompt_rows)
        if logits is None:
            # An extension computes other rows then.
            return self.forward(feeds, max_prompt_rows, compute)
        self._num_forwards += 1
        self.forward_counts.add(sum(map(bool, grants)), sum(grants), num_prompt_rows)
        for feed, grant, rows in zip(feeds, grants, batch.ranges, strict=True):
            if grant:
                session, finished = feed.session, rows is not None
                cached_len = len(session.token_ids) if finished else session.next_position + grant
                session.advance(cached_len, feed.tree if finished else EMPTY)
                session.last_forward = self._num_forwards
        if self.device.type == "cuda" and not len(batch.wanted):
            # Or chunks of a prompt would pile up on the device, in front of a session that asks for a token meanwhile.
            torch.cuda.synchronize(self.device)
        for extension in self.extensions:
            extension.take(feeds, logits, batch.ranges)
        return ForwardResult(logits, batch.ranges, batch.prefixes, grants)

    def _try(self, compute: Compute, batch: Batch, num_prompt_rows: int) -> Tensor | None:
        """Logits of a batch; None where a device has no memory for it, and prompts are read in smaller pieces from now
        on. Raises torch.OutOfMemoryError where they are small already: who asked can ask for fewer sessions at a time.
        """
        try:
            return compute(batch.plan, self.cache, batch.wanted)
        except torch.OutOfMemoryError:
            room = num_prompt_rows // 2
            if room < MIN_PIECE_ROWS:
                raise
        # Out of the handler, which would hold all that was computed so far.
        self._prompt_room = room
        fix = "leave forwards more memory, with a smaller --kv-memory-share or --kv-tokens"
        log.warning("the device is out of memory, and prompts are read in smaller pieces", rows=room, fix=fix)
        torch.cuda.empty_cache()
        return None

    def finish(self) -> None:
        """Counts the time of the last forward, after which its tokens have been drawn and read; idempotent."""
        if self._started_s is not None:
            self.forward_counts.end(self.model.finish(self._started_s))
            self._started_s = None

    def check(self, feed: Feed) -> None:
        """Raises InvalidRequest when a feed can never run: past the context, too wide, or ids that are not embedded.

        Raises ValueError where rows count as computed that are not.
        """
        session, tree = feed.session, feed.tree
        if feed.num_computed:
            rows = slice(feed.num_computed - 1)
            own = session.tree.token_ids[rows], session.tree.parents[rows]
            is_cached = session.cached_len == len(session) and not feed.without_last
            if not is_cached or own != (tree.token_ids[rows], tree.parents[rows]) or not feed.num_rows:
                raise ValueError(f"{feed.num_computed} rows of {tree} do not lie computed behind {len(session)} tokens")
        depth, room = max(tree.depths), self.context_len - len(session)
        if depth > room:
            raise InvalidRequest("tree", f"{depth} deep", f"at most {room} deep here")
        if len(tree) >= self.max_rows:
            raise InvalidRequest("tree", f"{len(tree)} rows", f"at most {self.max_rows - 1} rows")
        self._check_ids((*session.token_ids[session.next_position :], *tree.token_ids))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        # An id without a row in the embedding would stop an accelerator for all sessions, not only for this one.
        end = self.config.vocab_size
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < end:
            return
        for extreme in (min(token_ids), max(token_ids)):
            if not 0 <= extreme < end:
                raise InvalidRequest("token_ids", extreme, f"in [0, {end})")


def _check_types(dtype: str, kv_dtype: str, device: torch.device) -> None:
    """Raises InvalidRequest for types of weights, or of keys and values, that there are not on this device."""
    if dtype not in (*DTYPES, AUTO):
        raise InvalidRequest("dtype", dtype, f"one of {', '.join((*DTYPES, AUTO))}")
    if kv_dtype not in KV_DTYPES:
        raise InvalidRequest("kv_dtype", kv_dtype, f"one of {', '.join(KV_DTYPES)}")
    if device.type == "cpu":
        return
    if dtype in PACKED_BITS or dtype in BLOCK_DTYPES:
        raise InvalidRequest("dtype", dtype, f"bfloat16 or float32 on {device}: integers are for the CPU")
    if kv_dtype != "auto":
        raise InvalidRequest("kv_dtype", kv_dtype, f"auto on {device}: keys and values are there as weights are")


def _check_quantised(checkpoint: Checkpoint, dtype: str) -> None:
    """Raises ModelRefused for a type of quantised weights that this checkpoint cannot have."""
    if dtype in PACKED_BITS and checkpoint.modelling:
        message = f"{checkpoint.name}: dtype is {dtype}, but only models of our own families are quantised"
        raise ModelRefused(message, dtype=dtype)
    if dtype in BLOCK_DTYPES and not checkpoint.block_dtype:
        message = f"{checkpoint.name}: dtype is {dtype}, which is for GGUF files and MXFP4, where weights are quantised"
        raise ModelRefused(message, dtype=dtype)


def _check_memory(kv_tokens: int | None, share: float | None, device: torch.device) -> None:
    """Raises InvalidRequest about a cache without tokens, and a share of memory that is none, or means nothing here."""
    name = "kv_memory_share"
    if kv_tokens is not None and kv_tokens < 1:
        raise InvalidRequest("kv_tokens", kv_tokens, "at least 1")
    if share is None:
        return
    if not 0 < share <= 1:
        raise InvalidRequest(name, share, "above 0 and at most 1")
    if kv_tokens is not None:
        raise InvalidRequest(name, share, ("left out together with ", Field("kv_tokens")))
    if device.type == "cpu":
        raise InvalidRequest(name, share, ("left out on the CPU, whose cache has ", Field("kv_tokens")))


Allocate = Callable[[], None]


def reserve(runner: ModelRunner, feed: Feed, with_room: Callable[[Allocate], None]) -> None:
    """Makes sure that a forward cannot fail over this feed; raises CacheFull and InvalidRequest.

    `with_room` calls what it is given, and may make room and call it again when it raises CacheFull.
    """
    runner.check(feed)
    try:
        feed.session.reserve(feed.num_reserved, feed.start)
    except CacheFull:
        with_room(lambda: feed.session.reserve(feed.num_reserved, feed.start))


def reopen(
    runner: ModelRunner, session: Session | None, token_ids: Sequence[int], prompt_len: int, salt: bytes | None = None
) -> Session:
    """A session of these tokens; it takes over what the given one has cached of them, and frees the rest."""
    if session is None or session.token_ids[0] != token_ids[0] or session.salt != salt:
        if session is not None:
            session.free()
        return runner.open(token_ids, prompt_len, salt)
    session.replace_tail(1, token_ids[1:])
    session.prompt_len = prompt_len
    return session
