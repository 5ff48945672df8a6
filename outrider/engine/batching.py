"""Lays the rows of many sessions side by side for one forward, as a plan of tensors that the kernels read.

A row is one new token. The mask of a forward is not a matrix: every row names the list of cache slots that it sees, in
position order: the committed prefix, then its ancestors, then itself. There is one list for each leaf of a tree, and a
row uses the list of a leaf below it with its own count: a prompt, one decoding step and a chain therefore have a single
list, and prefill, decode and a tree of proposals are the same plan with other lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cache import Slots
from outrider.engine.devices import send
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

# Uncached tokens of a session that goes on: a target's has one, a draft's those of a verdict. More is a prompt to read.
MAX_STEP_TOKENS = 8

# Columns of a list that are summed before they meet the others, where rows share work.
CHUNK = 256
WORK_HEADER = 16


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One ragged forward of R rows; tensors live on the model's device.

    Row r sees the keys and values in the slots key_slots[key_starts[r] : key_starts[r] + key_counts[r]], in this order.
    The rows of a chain share one list and differ in their counts only. Its own slot is the last that a row sees.
    """

    token_ids: Tensor
    """Token ids [R] int64."""
    positions: Tensor
    """[R] int64: length of the committed prefix plus depth in the tree."""
    slots: Tensor
    """[R] int64, all different: where the row's own key and value are stored."""
    key_slots: Tensor
    """[L] int32: lists of slots in position order."""
    key_starts: Tensor
    """[R] int64: where a row's list begins in key_slots."""
    key_counts: Tensor
    """[R] int32: how many keys the row sees, at least 1."""
    max_key_count: int
    """Upper bound of key_counts, known to the host, so that no operation has to ask the device and wait."""
    work: Tensor | None = None
    """What rows that see the same keys share, int32, where the operations read it: see `shared_work`."""
    tile_rows: int = 0
    """The most rows of an item of work."""
    num_row_chunks: int = 0
    """Chunks that all rows see, one of several rows counted for each of them."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def select(self, rows: Tensor) -> Self:
        """Plan of these rows [S] int64 only."""
        names = ("token_ids", "positions", "slots", "key_starts", "key_counts")
        kept = {name: getattr(self, name).index_select(0, rows) for name in names}
        return replace(self, **kept, work=None)

    def with_lists(self, key_starts: Tensor, key_counts: Tensor, max_key_count: int) -> Self:
        """Plan of the same rows, each of which sees another part of the key slots."""
        return replace(self, key_starts=key_starts, key_counts=key_counts, max_key_count=max_key_count, work=None)

    def windowed(self, window: int | None) -> Self:
        """Plan of the same rows, each of which sees the last `window` keys of its list, or all if that is None.

        A list ends with the row itself and has one key for each position, along a tree's path too: of a row at position
        t the positions above t - window are left.
        """
        if window is None or self.max_key_count <= window:
            return self
        hidden = (self.key_counts - window).clamp_min(0)
        return self.with_lists(self.key_starts + hidden, self.key_counts - hidden, window)


class Feed(NamedTuple):
    """Input of a session to a forward: its uncached tokens, then its tree."""

    session: Session
    tree: TokenTree = EMPTY
    wants_prefix: bool = False
    """Whether the logits of all committed tokens that are computed are wanted, and not of the last one only."""
    without_last: bool = False
    """Whether the last committed token, of at least two that are not cached, is left to a later forward."""
    num_computed: int = 0
    """Rows from the last committed token on that need not be computed: of a tree that grows it and its first rows.

    The session's own tree begins with them, and all committed tokens are cached; see ModelRunner.check."""

    @property
    def num_proposed(self) -> int:
        """Number of rows after the last committed token."""
        return len(self.tree.token_ids)

    @property
    def begun(self) -> TokenTree:
        """The tree's rows that are computed already."""
        count = self.num_computed - 1
        return TokenTree(self.tree.token_ids[:count], self.tree.parents[:count]) if count > 0 else EMPTY

    @property
    def num_committed(self) -> int:
        """Committed tokens to be computed, at least 1 unless they are computed."""
        if self.num_computed:
            return 0
        return max(len(self.session.token_ids) - self.session.cached_len, 1) - self.without_last

    @property
    def num_rows(self) -> int:
        """Number of rows to be computed."""
        return self.num_committed + self.num_proposed - max(self.num_computed - 1, 0)

    @property
    def start(self) -> int:
        """The place of the first of them among the session's slots."""
        session = self.session
        return len(session.token_ids) - 1 + self.num_computed if self.num_computed else session.next_position

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths in the tree of the rows whose logits a forward gives; the root's is 0."""
        return self.tree.depths[self.num_computed :]

    @property
    def is_prompt(self) -> bool:
        """Whether there are tokens to read first, and not only the next ones to find."""
        return self.num_committed > MAX_STEP_TOKENS

    def num_prefix(self, grant: int) -> int:
        """Number of rows among `grant` before the last committed token whose logits are wanted."""
        return min(grant, max(self.num_committed - 1, 0)) if self.wants_prefix else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan, the rows whose logits are wanted, and where each feed finds them; see ForwardResult."""

    plan: RowPlan
    wanted: Tensor
    prefixes: list[range]
    ranges: list[range | None]


def build_batch(feeds: Sequence[Feed], grants: Sequence[int], device: torch.device, tiles: Sequence[int] = ()) -> Batch:
    """The plan of a forward in which feed i has grants[i] rows, in feed order; its slots must have been reserved.

    With tiles it says which rows share work, at most so many at a time: as many as a session has, or the most.
    """
    token_ids, positions, key_starts, wanted = (list[int]() for _ in range(4))
    spans = list[Span]()
    row_slots, key_lists, num_keys = list[Slots](), list[Slots](), 0
    prefixes, ranges = list[range](), list[range | None]()
    for feed, grant in zip(feeds, grants, strict=True):
        session, first = feed.session, len(token_ids)
        is_complete = grant == feed.num_rows and not feed.without_last
        tree = feed.tree if is_complete else EMPTY
        # Rows of the tree that are computed already, and what else there is of it.
        skipped = max(feed.num_computed - 1, 0)
        num_new = len(tree) - skipped
        if grant:
            start = feed.start
            end = start + grant
            stop = end - num_new
            slots = session.table.slots(0, end)
            token_ids += (*session.token_ids[start:stop], *tree.token_ids[skipped:])
            row_slots.append(slots[start:])
            # The slots of a chain lie in a row, and need no gathering.
            if tree.is_chain:
                positions += range(start, end)
                key_starts += [num_keys] * grant
                spans.append(Span(range(first, first + grant), num_keys))
                key_lists.append(slots)
                num_keys += end
            else:
                positions += range(start, stop)
                positions += [len(session.token_ids) - 1 + depth for depth in tree.depths[skipped + 1 :]]
                key_starts += [num_keys] * (stop - start)
                lists, starts = _leaf_lists(tree, slots, len(session.token_ids), skipped)
                key_starts += [num_keys + each for each in starts]
                spans += _tree_spans(range(first, first + grant), key_starts, len(session.token_ids))
                key_lists += lists
                num_keys += sum(map(len, lists))
        num_wanted = len(wanted)
        if feed.wants_prefix:
            wanted += range(first, first + feed.num_prefix(grant))
        prefixes.append(range(num_wanted, len(wanted)))
        if is_complete:
            # The root's, unless it is computed already, and the new rows'.
            wanted += range(len(token_ids) - num_new - (not feed.num_computed), len(token_ids))
        ranges.append(range(prefixes[-1].stop, len(wanted)) if is_complete else None)
    slots = row_slots[0] if len(row_slots) == 1 else np.concatenate(row_slots)
    longs = np.array(token_ids + positions + key_starts + wanted, dtype=np.int64)
    make = partial(_shared_plan, spans, tiles) if tiles else _plan
    plan, sent_wanted = make(longs, slots, key_lists, len(wanted), device)
    return Batch(plan, sent_wanted, prefixes, ranges)


def _plan(
    longs: NDArray[np.int64], slots: Slots, key_lists: Sequence[Slots], num_wanted: int, device: torch.device
) -> tuple[RowPlan, Tensor]:
    """The plan of token ids [R], positions [R], starts of lists [R] and wanted rows, and these rows where it is."""
    num_rows = len(slots)
    counts = longs[num_rows : 2 * num_rows] + 1
    # Those of one type travel together, because each tensor costs as much as many rows.
    ints = np.concatenate((counts, *key_lists), dtype=np.int32, casting="same_kind")
    token_ids, positions, key_starts, wanted = _split(send(longs, device), num_rows, num_wanted)
    key_counts, key_slots = send(ints, device).split_with_sizes((num_rows, len(ints) - num_rows))
    rows = token_ids, positions, send(slots, device)
    return RowPlan(*rows, key_slots, key_starts, key_counts, int(counts.max())), wanted


def _shared_plan(
    spans: Sequence["Span"],
    tiles: Sequence[int],
    longs: NDArray[np.int64],
    slots: Slots,
    key_lists: Sequence[Slots],
    num_wanted: int,
    device: torch.device,
) -> tuple[RowPlan, Tensor]:
    """`_plan` with what rows share; all of it travels in one piece."""
    num_rows, num_keys = len(slots), sum(map(len, key_lists))
    counts = longs[num_rows : 2 * num_rows] + 1
    longest = max(len(span.rows) for span in spans)
    tile_rows = next((each for each in tiles if each >= longest), tiles[-1])
    array, num_row_chunks, places = shared_work(spans, longs, slots, counts, key_lists, tile_rows)
    every = send(np.concatenate((longs, slots, array.view(np.int64))), device)
    sent, sent_slots, rest = every.split_with_sizes((len(longs), num_rows, len(array) // 2))
    token_ids, positions, key_starts, wanted = _split(sent, num_rows, num_wanted)
    work = rest.view(torch.int32)
    key_counts = work[places.counts : places.counts + num_rows]
    key_slots = work[places.key_slots : places.key_slots + num_keys]
    rows = token_ids, positions, sent_slots
    keys = key_slots, key_starts, key_counts
    return RowPlan(*rows, *keys, int(counts.max()), work, tile_rows, num_row_chunks), wanted


def _split(longs: Tensor, num_rows: int, num_wanted: int) -> tuple[Tensor, ...]:
    return longs.split_with_sizes((num_rows, num_rows, num_rows, num_wanted))


class Span(NamedTuple):
    """Rows that see one list from a chunk on, up to another one or to their own ends."""

    rows: Sequence[int]
    key_start: int
    first_chunk: int = 0
    stop_chunk: int | None = None


def _tree_spans(rows: range, key_starts: Sequence[int], num_committed: int) -> list[Span]:
    """All rows of a session share the chunks of its committed tokens; the rest they share with those of their list."""
    num_shared = num_committed // CHUNK
    by_list: dict[int, list[int]] = {}
    for row in rows:
        by_list.setdefault(key_starts[row], []).append(row)
    shared = [Span(rows, key_starts[rows[0]], 0, num_shared)] if num_shared else []
    return shared + [Span(own, start, num_shared) for start, own in by_list.items()]


class WorkPlaces(NamedTuple):
    """Where the parts of shared work begin in it; the first numbers of the work are these."""

    num_items: int
    items: int
    item_rows: int
    counts: int
    row_chunks: int
    key_slots: int
    num_rows: int
    token_ids: int
    positions: int
    slots: int


def shared_work(
    spans: Sequence[Span],
    longs: NDArray[np.int64],
    slots: Slots,
    counts: NDArray[np.int64],
    key_lists: Sequence[Slots],
    tile_rows: int,
) -> tuple[NDArray[np.int32], int, WorkPlaces]:
    """A plan as the kernels of a GPU read it, int32 of an even size, and how many chunks all rows see together.

    `longs` begin with token ids [R] and positions [R]. After a header come token ids, positions, slots, counts of keys
    and the places of the first chunks [R] among all rows' chunks; items, each of which says where its rows begin among
    the rows of items, their number, where their list begins among the key slots, and the chunk; the rows of items; the
    key slots.
    """
    num_rows = len(counts)
    chunks = -(-counts // CHUNK)
    row_chunks: list[int] = chunks.tolist()
    tiles = list[tuple[int, int, int, int, int]]()
    item_rows = list[int]()
    for span in spans:
        for first in range(0, len(span.rows), tile_rows):
            rows = span.rows[first : first + tile_rows]
            # No row of a span sees less than one before it.
            stop = row_chunks[rows[-1]] if span.stop_chunk is None else min(row_chunks[rows[-1]], span.stop_chunk)
            if stop > span.first_chunk:
                tiles.append((len(item_rows), len(rows), span.key_start, span.first_chunk, stop))
                item_rows += rows
    each = np.array(tiles, dtype=np.int32)
    lengths = each[:, 4] - each[:, 3]
    ends = np.cumsum(lengths)
    items = np.repeat(each[:, :4], lengths, axis=0)
    items[:, 3] += np.arange(len(items), dtype=np.int32) - np.repeat(ends - lengths, lengths).astype(np.int32)
    chunk_ends = np.cumsum(chunks)
    columns = longs[: 2 * num_rows], slots, counts, chunk_ends - chunks
    ids, positions, own, count, first_chunks, items_begin = (WORK_HEADER + place * num_rows for place in range(6))
    rows_begin = items_begin + items.size
    keys_begin = rows_begin + len(item_rows)
    places = WorkPlaces(
        len(items), items_begin, rows_begin, count, first_chunks, keys_begin, num_rows, ids, positions, own
    )
    header = np.array([*places, *[0] * (WORK_HEADER - len(places))])
    # An even number, so that it may lie after longer numbers.
    filler = np.zeros((keys_begin + sum(map(len, key_lists))) % 2, dtype=np.int64)
    parts = [header, *columns, items.ravel(), np.array(item_rows), *key_lists, filler]
    return np.concatenate(parts, dtype=np.int32, casting="unsafe"), int(chunk_ends[-1]), places


def _leaf_lists(tree: TokenTree, slots: Slots, stop: int, skipped: int) -> tuple[list[Slots], list[int]]:
    """A list for each leaf after the first `skipped` rows: the committed slots, then its path's.

    Also where in them the list of each row after the skipped ones begins.
    """
    lists: list[Slots] = []
    row_starts, num_keys, committed = [-1] * len(tree), 0, slots[:stop]
    for leaf in tree.leaves():
        if leaf <= skipped:
            continue
        path = tree.path(leaf)
        for row in path:
            if row_starts[row - 1] < 0:
                row_starts[row - 1] = num_keys
        lists += committed, slots[[stop + row - 1 for row in path]]
        num_keys += stop + len(path)
    return lists, row_starts[skipped:]
