"""Lays the rows of many sessions side by side for one forward, as a plan of tensors that the kernels read.

A row is one new token. The mask of a forward is not a matrix: every row names the list of cache slots that it sees, in
position order: the committed prefix, then its ancestors, then itself. There is one list for each leaf of a tree, and a
row uses the list of a leaf below it with its own count: a prompt, one decoding step and a chain therefore have a single
list, and prefill, decode and a tree of proposals are the same plan with other lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

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
MANY = 1 << 31
"""More chunks than there are."""


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
    """[L] int32: lists of slots in position order; what may lie past the end of one is read by no row."""
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
    below: Self | None = None
    """Where all feeds have rows below the last one: the plan of the last of each, as shared work, whose lists and
    chunks do for those above it too."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def select(self, rows: Tensor) -> Self:
        """Plan of these rows [S] int64 only."""
        names = ("token_ids", "positions", "slots", "key_starts", "key_counts")
        kept = {name: getattr(self, name).index_select(0, rows) for name in names}
        return replace(self, **kept, work=None, below=None)

    def with_lists(self, key_starts: Tensor, key_counts: Tensor, max_key_count: int) -> Self:
        """Plan of the same rows, each of which sees another part of the key slots."""
        own = replace(self, key_starts=key_starts, key_counts=key_counts, max_key_count=max_key_count)
        return replace(own, work=None, below=None)

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

    num_below: int = 0
    """Rows that the same forward may compute below the last one, of tokens that it finds.

    See FusedHead.line and ChainingDecoder.chain; all feeds of a forward have as many."""

    @property
    def num_proposed(self) -> int:
        """Number of rows after the last committed token."""
        return len(self.tree.token_ids)

    @property
    def num_reserved(self) -> int:
        """Number of slots that its forward needs after the committed tokens."""
        return self.num_proposed + self.num_below

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
    token_ids, wanted, row_slots = list[int](), list[int](), list[Slots]()
    spans, lists, branched = list[_Span](), list[Slots](), list[_Branched]()
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
            slots = session.table.slots(0, end + feed.num_below)
            token_ids += (*session.token_ids[start : end - num_new], *tree.token_ids[skipped:])
            row_slots.append(slots[start:end])
            # The slots of a chain lie in a row, and need no gathering; those of a tree's one path are one list too.
            if tree.is_chain:
                spans.append(_Span(grant, start, len(lists)))
                lists.append(slots)
            elif skipped and tree.parents[skipped + 1 :] == (*range(skipped + 1, len(tree)),):
                last = len(session.token_ids) - 1
                path = tree.path(len(tree))
                spans.append(_Span(grant, last + len(path) - num_new + 1, len(lists)))
                lists.append(np.concatenate((slots[: last + 1], slots[[last + row for row in path]], slots[end:])))
            else:
                num_committed = len(session.token_ids)
                spans.append(_Span(grant, start, 0, num_committed // CHUNK))
                branched.append(_Branched(tree, slots[:end], num_committed, skipped, range(first, first + grant)))
        num_wanted = len(wanted)
        if feed.wants_prefix:
            wanted += range(first, first + feed.num_prefix(grant))
        prefixes.append(range(num_wanted, len(wanted)))
        if is_complete:
            # The root's, unless it is computed already, and the new rows'.
            wanted += range(len(token_ids) - num_new - (not feed.num_computed), len(token_ids))
        ranges.append(range(prefixes[-1].stop, len(wanted)) if is_complete else None)
    slots = row_slots[0] if len(row_slots) == 1 else np.concatenate(row_slots)
    if not branched and not tiles:
        longs = _longs_of_lists(token_ids, spans, lists, wanted)
        return Batch(*_plan(longs, lists, slots, device), prefixes, ranges)
    rows = _Rows.of_chains(spans, lists)
    if branched:
        rows.add_trees(branched)
    longs = np.array((*token_ids, *wanted), dtype=np.int64)
    key_starts = rows.list_starts[rows.list_of]
    longs = np.concatenate((longs[: len(slots)], rows.positions, key_starts, longs[len(slots) :]))
    if not tiles:
        return Batch(*_plan(longs, rows.key_lists, slots, device), prefixes, ranges)
    plan, sent_wanted = _shared_plan(rows, longs, slots, tiles, device)
    if feeds[0].num_below and not branched and len(wanted) == len(feeds):
        plan = replace(plan, below=_below(spans, lists, feeds[0].num_below, tiles, device))
    return Batch(plan, sent_wanted, prefixes, ranges)


class _Span(NamedTuple):
    """Rows of a feed, which lie in a row, from a place in the session on."""

    num_rows: int
    start: int
    list_number: int
    """List of keys that all of them see; of a tree whatever, because it gets lists of its own."""
    num_shared: int = MANY
    """Chunks of keys that all rows may share: of a tree those of committed tokens, of a chain whatever there is."""


class _Branched(NamedTuple):
    """A tree with branches, the slots of committed tokens and of its rows, how many of these rows are computed, and
    the feed's own rows in the forward."""

    tree: TokenTree
    slots: Slots
    num_committed: int
    skipped: int
    rows: range


@dataclass(slots=True)
class _Rows:
    """Rows of a forward, and the lists of keys that they see."""

    num_each: NDArray[np.int64]
    """Number of rows of each feed that has some."""
    num_shared: NDArray[np.int64]
    """Chunks that all rows of each of these feeds may share."""
    positions: NDArray[np.int64]
    """Position of each row [R]: its place among the tokens that it continues."""
    list_of: NDArray[np.int64]
    """Number of the list of each row [R]."""
    list_starts: NDArray[np.int64]
    """Where each list begins among the keys."""
    key_lists: list[NDArray[Any]]
    """Slots of the lists, one after the other."""
    num_chains: int
    """Lists that are those of a whole feed; they come first."""

    @classmethod
    def of_chains(cls, spans: Sequence[_Span], lists: list[NDArray[Any]]) -> Self:
        """All rows as if no feed had branches."""
        num_each, begins, numbers, num_shared = np.array(spans).T
        positions = (begins - num_each.cumsum() + num_each).repeat(num_each)
        positions += np.arange(len(positions))
        starts = np.array([0, *accumulate(map(len, lists))])[: len(lists)]
        return cls(num_each, num_shared, positions, numbers.repeat(num_each), starts, lists, len(lists))

    def add_trees(self, branched: Sequence[_Branched]) -> None:
        """Adds the lists of trees: one for each leaf, the committed slots and then its path's; a row reads the first of
        those of leaves below it.

        All trees are walked at once, from the leaves up, so that it takes as many steps as the deepest has levels.
        """
        parents, depths = list[int](), list[int]()
        for each in branched:
            parents += (0, *each.tree.parents)
            depths += each.tree.depths
        facts = [(len(each.tree) + 1, each.num_committed, each.skipped, each.rows.stop) for each in branched]
        sizes, lengths, skipped, stops = np.array(facts).T
        roots, tree = sizes.cumsum() - sizes, np.arange(len(sizes)).repeat(sizes)
        number = np.arange(len(tree)) - roots[tree]
        above, depth = np.array(parents) + roots[tree], np.array(depths)
        is_new = number > skipped[tree]
        is_leaf = is_new.copy()
        is_leaf[above] = False
        (leaves,) = is_leaf.nonzero()
        # Rows from each leaf up, as long as all of them; the root stays where it is.
        paths = np.empty((depth.max(), len(leaves)), dtype=np.int64)
        paths[0] = leaves
        for level in range(1, len(paths)):
            paths[level] = above[paths[level - 1]]
        first_leaf = np.full(len(tree), len(leaves))
        # Spread out here: numpy 2.4 spreads them wrongly.
        np.minimum.at(first_leaf, paths, np.broadcast_to(np.arange(len(leaves)), paths.shape))
        # All lists of a tree are as long as that of its deepest leaf, because they are filled together.
        widths = (lengths + np.maximum.reduceat(depth, roots))[tree[leaves]]
        starts = widths.cumsum() - widths
        keys = np.empty(widths.sum(), dtype=np.int32)
        num_leaves = np.bincount(tree[leaves])
        for each, last, count in zip(branched, num_leaves.cumsum().tolist(), num_leaves.tolist(), strict=True):
            begin, width = starts[last - count], widths[last - 1]
            own = keys[begin : begin + count * width].reshape(count, width)
            own[:, : each.num_committed] = each.slots[: each.num_committed]
            # What lies past the end of a list is not read, and is a slot of the session nevertheless.
            own[:, each.num_committed :] = each.slots[0]
            self.list_of[each.rows.start : each.rows.stop] = last - count + self.num_chains
        slots = np.concatenate([each.slots[each.num_committed - 1 :] for each in branched])
        keys[starts + lengths[tree[leaves]] - 1 + depth[paths]] = slots[paths]
        (new,) = is_new.nonzero()
        places = (stops - sizes)[tree[new]] + number[new]
        self.list_of[places] = first_leaf[new] + self.num_chains
        self.positions[places] = (lengths - 1)[tree[new]] + depth[new]
        self.list_starts = np.concatenate((self.list_starts, starts + sum(map(len, self.key_lists))))
        self.key_lists.append(keys)


def _longs_of_lists(
    token_ids: Sequence[int], spans: Sequence["_Span"], lists: Sequence[NDArray[Any]], wanted: Sequence[int]
) -> NDArray[np.int64]:
    """What `_plan` takes of feeds without branches, each with a list of its own: a step of a few rows is soon over."""
    positions, key_starts, begin = list[int](), list[int](), 0
    for span, keys in zip(spans, lists, strict=True):
        positions += range(span.start, span.start + span.num_rows)
        key_starts += [begin] * span.num_rows
        begin += len(keys)
    return np.array((*token_ids, *positions, *key_starts, *wanted), dtype=np.int64)


def _plan(
    longs: NDArray[np.int64], key_lists: Sequence[NDArray[Any]], slots: Slots, device: torch.device
) -> tuple[RowPlan, Tensor]:
    """The plan of token ids [R], positions [R], starts of lists [R] and wanted rows, and these rows where it is."""
    num_rows = len(slots)
    # Those of one type travel together, because each tensor costs as much as many rows.
    ints = np.concatenate((longs[num_rows : 2 * num_rows] + 1, *key_lists), dtype=np.int32, casting="same_kind")
    token_ids, positions, key_starts, wanted = _split(send(longs, device), num_rows)
    key_counts, key_slots = send(ints, device).split_with_sizes((num_rows, len(ints) - num_rows))
    own = token_ids, positions, send(slots, device)
    return RowPlan(*own, key_slots, key_starts, key_counts, int(ints[:num_rows].max())), wanted


def _shared_plan(
    rows: _Rows, longs: NDArray[np.int64], slots: Slots, tiles: Sequence[int], device: torch.device
) -> tuple[RowPlan, Tensor]:
    """`_plan` with what rows share; all of it travels in one piece."""
    num_rows, num_keys = len(slots), sum(map(len, rows.key_lists))
    parts, num_row_chunks, tile_rows, places = shared_work(rows, longs, slots, tiles)
    numbers = np.empty(len(longs) + num_rows + sum(map(len, parts)) // 2, dtype=np.int64)
    np.concatenate((longs, slots), out=numbers[: len(longs) + num_rows])
    np.concatenate(parts, out=numbers[len(longs) + num_rows :].view(np.int32), casting="unsafe")
    every = send(numbers, device)
    sent, sent_slots, rest = every.split_with_sizes((len(longs), num_rows, len(numbers) - len(longs) - num_rows))
    token_ids, positions, key_starts, wanted = _split(sent, num_rows)
    work = rest.view(torch.int32)
    key_counts = work[places.counts : places.counts + num_rows]
    key_slots = work[places.key_slots : places.key_slots + num_keys]
    own, keys = (token_ids, positions, sent_slots), (key_slots, key_starts, key_counts)
    return RowPlan(*own, *keys, int(rows.positions.max()) + 1, work, tile_rows, num_row_chunks), wanted


def _below(
    spans: Sequence[_Span], lists: list[NDArray[Any]], num_below: int, tiles: Sequence[int], device: torch.device
) -> RowPlan:
    """See RowPlan.below. Tokens and slots are yet to be found."""
    ends = [each.start + each.num_rows - 1 + num_below for each in spans]
    rows = _Rows.of_chains([_Span(1, end, number) for number, end in enumerate(ends)], lists)
    unknown = np.zeros_like(rows.positions)
    longs = np.concatenate((unknown, rows.positions, rows.list_starts))
    plan, _ = _shared_plan(rows, longs, unknown, tiles, device)
    return plan


def _split(longs: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    return longs.split_with_sizes((num_rows, num_rows, num_rows, longs.shape[0] - 3 * num_rows))


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
    rows: _Rows, longs: NDArray[np.int64], slots: Slots, tiles: Sequence[int]
) -> tuple[list[NDArray[Any]], int, int, WorkPlaces]:
    """A plan as the kernels of a GPU read it, in parts; how many chunks all rows see together; rows of a tile.

    The parts are to become int32, and are an even number of them. `longs` begin with token ids [R] and positions [R].
    After a header come token ids, positions, slots, counts of keys and the places of the first chunks [R] among all
    rows' chunks; items, each of which says where its rows begin among the rows of items, their number, where their list
    begins among the key slots, and the chunk; the rows of items; the key slots.
    """
    num_rows, counts = len(slots), rows.positions + 1
    chunks = -(-counts // CHUNK)
    items, item_rows, tile_rows = _items(rows, chunks, tiles)
    chunk_ends = chunks.cumsum()
    columns = longs[: 2 * num_rows], slots, counts, chunk_ends - chunks
    ids, positions, own, count, first_chunks, items_begin = (WORK_HEADER + place * num_rows for place in range(6))
    rows_begin = items_begin + items.size
    keys_begin = rows_begin + len(item_rows)
    places = WorkPlaces(
        len(items), items_begin, rows_begin, count, first_chunks, keys_begin, num_rows, ids, positions, own
    )
    header = np.array([*places, *[0] * (WORK_HEADER - len(places))])
    # An even number, so that it may lie after longer numbers.
    filler = np.zeros((keys_begin + sum(map(len, rows.key_lists))) % 2, dtype=np.int64)
    parts = [header, *columns, items.ravel(), item_rows, *rows.key_lists, filler]
    return parts, int(chunk_ends[-1]), tile_rows, places


def _items(
    rows: _Rows, chunks: NDArray[np.int64], tiles: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Items [n, 4] of shared work, the rows of items, and rows of a tile, where so many chunks are in each row's list.

    All rows of a feed share the first chunks; of a tree the others are shared by those rows that read the same list.
    """
    # Groups of rows: where each begins among the rows of items, its number of rows, and the chunks that it shares.
    sizes, stops = rows.num_each, rows.num_shared
    begins, firsts, item_rows = sizes.cumsum() - sizes, 0 * stops, np.arange(len(chunks))
    if len(rows.list_starts) > rows.num_chains:
        (branched,) = (rows.list_of >= rows.num_chains).nonzero()
        branched = branched[rows.list_of[branched].argsort(kind="stable")]
        _, own_begins, own_sizes = np.unique(rows.list_of[branched], return_index=True, return_counts=True)
        begins = np.concatenate((begins, own_begins + len(chunks)))
        firsts = np.concatenate((firsts, stops.repeat(sizes)[branched[own_begins]]))
        stops = np.concatenate((stops, np.full_like(own_sizes, MANY)))
        sizes, item_rows = np.concatenate((sizes, own_sizes)), np.concatenate((item_rows, branched))
    longest = sizes[stops > firsts].max()
    tile_rows = next((each for each in tiles if each >= longest), tiles[-1])
    num_tiles = -(-sizes // tile_rows)
    group = np.arange(len(sizes)).repeat(num_tiles)
    places = (np.arange(len(group)) - (num_tiles.cumsum() - num_tiles).repeat(num_tiles)) * tile_rows
    num_tile_rows = np.minimum(sizes[group] - places, tile_rows)
    places += begins[group]
    # No row of a group sees less than one before it, as far as the group goes.
    ends = np.minimum(chunks[item_rows[places + num_tile_rows - 1]], stops[group])
    lengths = np.maximum(ends - firsts[group], 0)
    tile_items = np.array((places, num_tile_rows, rows.list_starts[rows.list_of[item_rows[places]]], firsts[group]))
    items = tile_items.T.repeat(lengths, axis=0)
    items[:, 3] += np.arange(len(items)) - (lengths.cumsum() - lengths).repeat(lengths)
    return items, item_rows, tile_rows
