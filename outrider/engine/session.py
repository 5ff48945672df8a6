"""The tokens of one sequence and how many of them are cached.

State is lengths: the slots of positions below cached_len hold committed keys and values; those after the last token
hold the rows of the last forward's tree, which are provisional until keep, extend, replace_tail or truncate. The token
list is the truth, the cache can always be rebuilt from it.
"""

from collections.abc import Hashable, Sequence

from outrider.engine.cache import BlockTable
from outrider.errors import CacheFull, InvalidRequest
from outrider.grammar import Grammar
from outrider.token_tree import EMPTY, TokenTree


class Session:
    """Tokens of one sequence; belongs to the device thread, and is not safe to share."""

    def __init__(self, table: BlockTable, token_ids: Sequence[int], prompt_len: int, salt: bytes | None = None) -> None:
        if not token_ids:
            raise InvalidRequest("token_ids", [], "at least one token")
        if not 1 <= prompt_len <= len(token_ids):
            raise InvalidRequest("prompt_len", prompt_len, f"in [1, {len(token_ids)}]")
        self.table = table
        self.token_ids = list(token_ids)
        self.prompt_len = prompt_len
        self.salt = salt
        """Cached prefixes are shared among sessions of the same salt; None for a session that shares none."""
        self.cached_len = 0
        self.tree = EMPTY
        """The tree of the last forward whose rows still lie after the committed tokens."""
        self.revision = 0
        """Number of times that it has changed: tokens, cache or tree."""
        self.last_forward = 0
        """Number of the runner's forward that last computed a row of this session."""
        self.arrival = 0
        """Number of the last forward before the runner opened this session."""
        self.owner: object = None
        """Owner of the prompt: prompts of several owners are read by turns; see outrider.engine.sharing."""
        self.grammar: Grammar | None = None
        """What the tokens after the prompt have to follow, with what is known of it; this session's own."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def next_position(self) -> int:
        """Position at which the next forward starts: the first uncached token, or the last one when all are cached.

        A forward has to compute the last token to have its logits; its key and value are then written once more,
        with the same bits where the device is row-invariant.
        """
        return min(self.cached_len, len(self.token_ids) - 1)

    def reserve(self, num_tree_rows: int = 0, written_from: int | None = None) -> None:
        """Reserves slots for all tokens and num_tree_rows after them; those from written_from on will be written.

        By default these are the next position and all after it. Raises CacheFull and leaves the session as it was.
        """
        first = self.next_position if written_from is None else written_from
        self.table.reserve(len(self.token_ids) + num_tree_rows, first)

    def advance(self, cached_len: int, tree: TokenTree) -> None:
        """Takes the result of a forward: tokens below cached_len are cached, and tree's rows after them."""
        self.cached_len, self.tree = cached_len, tree
        self.revision += 1

    def fork(self, rows: Sequence[int] = ()) -> "Session":
        """A session of these tokens and of a path of the last forward's tree, which shares what is cached of them.

        It has blocks of its own from the first write on. Where there is no room for those that a path needs, its keys
        and values are left out, and computed again by the next forward.
        """
        twin = Session(
            self.table.fork(self.cached_len + max(rows, default=0)), self.token_ids, self.prompt_len, self.salt
        )
        twin.cached_len, twin.tree = self.cached_len, self.tree
        twin.arrival, twin.last_forward, twin.owner = self.arrival, self.last_forward, self.owner
        twin.keep_with_room(rows)
        return twin

    def keep_with_room(self, rows: Sequence[int]) -> None:
        """Keeps rows like `keep`, but without room to separate them from a fork's, their tokens are all that stays."""
        token_ids = [self.tree.token_ids[row - 1] for row in rows]
        try:
            self.keep(rows)
        except CacheFull:
            self.extend(token_ids)

    def publish(self, length: int) -> None:
        """Lets others find what is cached of the first `length` tokens, in whole blocks; call it between forwards.

        They must be committed: what is found here is believed by sessions that end at these tokens.
        """
        if self.salt is not None and length >= self.table.next_publishable:
            self.table.publish(self.salt, self.token_ids, min(length, self.cached_len))

    def take_prefix(self) -> int:
        """Counts as cached what others have published of the tokens, but for the last; returns how many more that are.

        The last token is left to the next forward, because its logits are wanted.
        """
        if self.salt is None:
            return 0
        before = self.cached_len
        self.advance(self.table.take(self.salt, self.token_ids, before), EMPTY)
        return self.cached_len - before

    def coming(self, count: int) -> Hashable:
        """What a session is about to read, at least so many tokens; equal for two that are about to read the same.

        None for one that reads fewer, or shares nothing. Those of another owner are others, whose turns are their own.
        """
        if self.salt is None or len(self.token_ids) - self.cached_len <= count:
            return None
        found = self.table.coming(self.token_ids, self.cached_len, count)
        return None if found is None else (id(self.owner), self.salt, *found)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commits tokens, to be cached by the next forward; drops the tree's rows."""
        self.token_ids.extend(token_ids)
        self.advance(self.cached_len, EMPTY)

    def replace_tail(self, base: int, token_ids: Sequence[int]) -> None:
        """Makes token_ids the tokens from position base on; what they begin with in common stays cached."""
        self._check_length("base", base)
        old_tail = self.token_ids[base:]
        common = next(
            (index for index, pair in enumerate(zip(old_tail, token_ids, strict=False)) if pair[0] != pair[1]),
            min(len(old_tail), len(token_ids)),
        )
        if common < len(old_tail):
            self.truncate(base + common)
        self.follow(token_ids[common:])

    def follow(self, token_ids: Sequence[int]) -> None:
        """Commits tokens: those that go down the session's own tree with their keys and values, the others without."""
        rows: list[int] = []
        for token_id in token_ids if self.tree else ():
            children = self.tree.children(rows[-1] if rows else 0)
            row = next((child for child in children if self.tree.token_ids[child - 1] == token_id), None)
            if row is None:
                break
            rows.append(row)
        self.keep(rows)
        self.extend(token_ids[len(rows) :])

    def truncate(self, length: int) -> None:
        """Forgets tokens, cache and tree past length; idempotent. Raises InvalidRequest outside [1, len(self)]."""
        self._check_length("length", length)
        del self.token_ids[length:]
        self.advance(min(self.cached_len, length), EMPTY)
        self.table.truncate(self.cached_len)

    def keep(self, rows: Sequence[int], below: Sequence[int] = ()) -> None:
        """Commits accepted rows of the last forward's tree, with their keys and values, and drops the other rows.

        rows is a path that begins below the root, and may be empty. `below` are rows under its end, each after its
        parent, that stay as the session's tree, in this order. Raises ValueError when rows are no path of the tree,
        and CacheFull, with nothing changed, when a fork reads the rows too and there is no room for copies.
        """
        rows = tuple(rows)
        if rows and (not 1 <= rows[-1] <= len(self.tree) or self.tree.path(rows[-1]) != rows):
            raise ValueError(f"rows {rows} are not a path from the root of {self.tree}")
        base = len(self.token_ids)
        # Row r lies r - 1 places after the base, and belongs at its depth - 1; rows of a chain lie right already.
        kept = (*rows, *below)
        moved = [place for place, row in enumerate(kept) if row - 1 != place]
        if moved:
            end = base + max(kept)
            self.table.reserve(end, base)
            slots = self.table.slots(base, end)
            self.table.cache.copy(slots[[kept[place] - 1 for place in moved]], slots[moved])
        numbers = {row: number for number, row in enumerate(rows[-1:] + tuple(below), start=not rows)}
        tree = TokenTree(
            tuple(self.tree.token_ids[row - 1] for row in below),
            tuple(numbers.get(self.tree.parents[row - 1], 0) for row in below),
        )
        self.token_ids.extend(self.tree.token_ids[row - 1] for row in rows)
        self.advance(self.cached_len + len(rows), tree)
        self.table.truncate(self.cached_len + len(below))

    def free(self) -> None:
        """Gives back all blocks; the tokens stay. Idempotent."""
        self.advance(0, EMPTY)
        self.table.free()

    def _check_length(self, name: str, length: int) -> None:
        if not 1 <= length <= len(self.token_ids):
            raise InvalidRequest(name, length, f"in [1, {len(self.token_ids)}]")
