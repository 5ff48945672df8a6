"""Branches: chains of guesses for what may come of a verification that is still under way.

The chain that is verified is the trunk. Its verification ends with k accepted guesses and a token of the target's own,
and for the likeliest such outcomes the draft goes on before it knows which one it is (SSD, Kumar et al., 2026, arXiv
2603.03251, which gives each k a number of tokens by a formula). Here every outcome has a value, the chance that it is
the one: the trunk's rows before it are accepted, times the share of its token among those that may follow there. The
shares are calibrated by what came of earlier guesses, so the outcomes of most value are the best ones for any k.

Pure: knows no model, no noise and no session.
"""

from collections.abc import Iterable

from outrider.engine.growth import ROOT, Child, Node
from outrider.token_tree import Branch, TokenTree

OUTCOME_CHILDREN = 8
"""Tokens of one place that may be the target's own: more would hardly ever be among the likeliest outcomes."""


class Branching:
    """A trunk and its branches on their way: what is known of them, and which nodes are computed next.

    First the trunk grows, then the branches, all at once, and last the places after their ends are looked at: one of
    them is the next trunk's end.
    """

    max_children = OUTCOME_CHILDREN

    def __init__(self, trunk_len: int, branch_len: int, max_branches: int, room: int) -> None:
        """A trunk and branches of so many guesses, none of which is deeper than `room`."""
        self.nodes = [Node(-1, -1, 0, 1.0)]
        self.trunk = [ROOT]
        """The trunk's nodes, the root first."""
        self._trunk_len = trunk_len
        self._branch_len = branch_len
        self._max_branches = max_branches
        self._room = room
        # What may follow each node that is computed, the likeliest first; and of that what has become a node.
        self._ranked: dict[int, list[Child]] = {}
        self._known: dict[tuple[int, int], int] = {}
        # Nodes of each branch, the target's own token first; None until the trunk is there.
        self._branches: list[list[int]] | None = None

    @property
    def is_trunk_done(self) -> bool:
        """Whether the trunk cannot become longer."""
        last = self.trunk[-1]
        is_long = len(self.trunk) > min(self._trunk_len, self._room)
        return is_long or self.nodes[last].is_leaf or self._ranked.get(last) == []

    @property
    def are_branches_done(self) -> bool:
        """Whether no branch can become longer."""
        return self._branches is not None and not any(map(self._can_grow, self._branches))

    def frontier(self) -> list[int]:
        """The nodes that are to be computed next, whose children are wanted; none when there is nothing to be done."""
        end = self.trunk[-1]
        if not self.is_trunk_done or self._is_open(end):
            return [end]
        if self._branches is None:
            self._branches = self._begun()
        growing = [branch[-1] for branch in self._branches if self._can_grow(branch)]
        return growing or [branch[-1] for branch in self._branches if self._is_open(branch[-1])]

    def expand(self, number: int, children: Iterable[Child]) -> None:
        """Says what may follow a node, the likeliest first."""
        ranked = self._ranked[number] = list(children)
        if self._branches is None:
            if number == self.trunk[-1] and not self.is_trunk_done:
                self.trunk.append(self._node(number, ranked[0]))
            return
        for branch in self._branches:
            if branch[-1] == number and ranked and len(branch) <= self._branch_len:
                branch.append(self._node(number, ranked[0]))

    def tree(self, *, with_logprobs: bool = False) -> TokenTree:
        """The trunk as a chain with the values of its guesses, and log-probabilities where they are wanted."""
        nodes = [self.nodes[number] for number in self.trunk[1:]]
        return TokenTree(
            tuple(node.token_id for node in nodes),
            tuple(range(len(nodes))),
            logprobs=tuple(node.logprob for node in nodes) if with_logprobs else (),
            values=tuple(node.value for node in nodes),
        )

    def branches(self, *, with_logprobs: bool = False) -> list[Branch]:
        """The branches that have guesses, the likeliest outcome first."""
        places = {number: place for place, number in enumerate(self.trunk)}
        found = []
        for numbers in self._branches or ():
            first, *rest = (self.nodes[number] for number in numbers)
            if rest:
                logprobs = tuple(node.logprob for node in rest) if with_logprobs else ()
                token_ids = tuple(node.token_id for node in rest)
                found.append(Branch(places[first.parent], first.token_id, token_ids, logprobs))
        return found

    def follow(self, token_ids: Iterable[int]) -> list[int]:
        """The nodes along these tokens from the root, as far as they are known."""
        path = [ROOT]
        for token_id in token_ids:
            number = self._known.get((path[-1], token_id))
            if number is None:
                break
            path.append(number)
        return path[1:]

    def is_computed(self, number: int) -> bool:
        """Whether it is known what may follow a node."""
        return number in self._ranked

    def below(
        self, root: int, trunk_len: int, branch_len: int, max_branches: int, room: int
    ) -> tuple["Branching", dict[int, int]]:
        """What is left when a node has become the root, and the new numbers of the nodes that are left."""
        left = Branching(trunk_len, branch_len, max_branches, room)
        numbers, top = {root: ROOT}, self.nodes[root]
        for number in range(root + 1, len(self.nodes)):
            node = self.nodes[number]
            if node.parent in numbers:
                numbers[number] = len(left.nodes)
                left._known[numbers[node.parent], node.token_id] = len(left.nodes)
                depth, value = node.depth - top.depth, node.value / top.value
                left.nodes.append(node._replace(parent=numbers[node.parent], depth=depth, value=value))
        left._ranked = {numbers[number]: ranked for number, ranked in self._ranked.items() if number in numbers}
        while not left.is_trunk_done and (ranked := left._ranked.get(left.trunk[-1])):
            left.trunk.append(left._node(left.trunk[-1], ranked[0]))
        return left, numbers

    def _begun(self) -> list[list[int]]:
        """The outcomes of most value, as branches without guesses. What ends the request needs none."""
        outcomes = [
            (self.nodes[number].value * child.share, number, child)
            for number, after in zip(self.trunk, (*self.trunk[1:], None), strict=True)
            for child in self._ranked.get(number, ())
            if not child.is_leaf and self._known.get((number, child.token_id), -1) != after
        ]
        outcomes.sort(key=lambda each: -each[0])
        branches = []
        for _, number, child in outcomes[: self._max_branches]:
            branch = [self._node(number, child)]
            # One that was known before keeps what follows it.
            while self._can_grow(branch) and (ranked := self._ranked.get(branch[-1])):
                branch.append(self._node(branch[-1], ranked[0]))
            branches.append(branch)
        return branches

    def _node(self, parent: int, child: Child) -> int:
        """The number of a child's node, which may be new."""
        number = self._known.setdefault((parent, child.token_id), len(self.nodes))
        if number == len(self.nodes):
            above = self.nodes[parent]
            value = above.value * max(child.share, 1e-30)
            self.nodes.append(Node(child.token_id, parent, above.depth + 1, value, *child[2:]))
        return number

    def _can_grow(self, branch: list[int]) -> bool:
        return len(branch) <= self._branch_len and self._is_open(branch[-1])

    def _is_open(self, number: int) -> bool:
        """Whether it is not known yet what may follow a node, and something may."""
        node = self.nodes[number]
        return number not in self._ranked and not node.is_leaf and node.depth < self._room
