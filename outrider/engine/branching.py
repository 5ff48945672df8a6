"""Branches: chains of guesses for what may come of a verification that is still under way.

The chain that is verified is the trunk. Its verification ends with k accepted guesses and a token of the target's own,
and for the likeliest such outcomes the draft goes on before it knows which one it is (SSD, Kumar et al., 2026, arXiv
2603.03251, which gives each k a number of tokens by a formula). Here every outcome has a value, the chance that it is
the one: the trunk's rows before it are accepted, times the share of its token among those that may follow there. The
shares are calibrated by what came of earlier guesses, so the outcomes of most value are the best ones for any k.

Pure: knows no model, no noise and no session.
"""

from collections.abc import Iterable, Sequence

from outrider.engine.growth import MIN_VALUE, ROOT, Child, Node
from outrider.parameters import DraftDistribution
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
        # What may follow each node that is computed, the likeliest first; the guess after it; what has become a node.
        self._ranked: dict[int, list[Child]] = {}
        self._guesses: dict[int, Child] = {}
        self._known: dict[tuple[int, int], int] = {}
        # Nodes of each branch, the target's own token first; None until the trunk is there.
        self._branches: list[list[int]] | None = None

    @property
    def is_trunk_done(self) -> bool:
        """Whether the trunk cannot become longer."""
        last = self.trunk[-1]
        is_long = len(self.trunk) > min(self._trunk_len, self._room)
        return is_long or self.nodes[last].is_leaf or (last in self._ranked and last not in self._guesses)

    @property
    def are_branches_done(self) -> bool:
        """Whether no branch can become longer."""
        return self._branches is not None and not any(map(self._can_grow, self._branches))

    @property
    def roots(self) -> frozenset[int]:
        """The nodes of the outcomes that have branches."""
        return frozenset(branch[0] for branch in self._branches or ())

    def base_depth(self, number: int) -> int:
        """How many tokens after the root are committed where the guess after a node is asked for."""
        depth = 0
        while number not in self.trunk:
            number, depth = self.nodes[number].parent, self.nodes[number].depth
        return depth

    def frontier(self) -> list[int]:
        """The nodes that are to be computed next, whose children are wanted; none when there is nothing to be done."""
        end = self.trunk[-1]
        if not self.is_trunk_done or self._is_open(end):
            return [end]
        if self._branches is None:
            # The outcomes of most value, as branches without guesses. What ends the request needs none.
            outcomes = []
            for number, after in zip(self.trunk, (*self.trunk[1:], None), strict=True):
                value, ranked = self.nodes[number].value, self._ranked.get(number, [])
                if after is not None:
                    # The others share what is left to them where the trunk's guess is not accepted.
                    guessed = self.nodes[after].token_id
                    taken = sum(each.share for each in ranked if each.token_id == guessed)
                    value *= (1 - self._guesses[number].share) / max(1 - taken, MIN_VALUE)
                    ranked = [each for each in ranked if each.token_id != guessed]
                outcomes += [(value * each.share, number, each) for each in ranked if not each.is_leaf]
            outcomes.sort(key=lambda each: -each[0])
            self._branches = []
            for _, number, child in outcomes[: self._max_branches]:
                branch = [self._node(number, child)]
                # One that was known before keeps what follows it.
                while self._can_grow(branch) and (guess := self._guesses.get(branch[-1])):
                    branch.append(self._node(branch[-1], guess))
                self._branches.append(branch)
        growing = [branch[-1] for branch in self._branches if self._can_grow(branch)]
        return growing or [branch[-1] for branch in self._branches if self._is_open(branch[-1])]

    def expand(self, number: int, children: Iterable[Child], drawn: Child | None = None) -> None:
        """Says what may follow a node, the likeliest first, and what is guessed: the first, or what was drawn.

        The share of a guess that was drawn is the chance that it is accepted.
        """
        ranked = self._ranked[number] = list(children)
        guess = drawn or next(iter(ranked), None)
        if guess is None:
            return
        self._guesses[number] = guess
        if self._branches is None:
            if number == self.trunk[-1] and not self.is_trunk_done:
                self.trunk.append(self._node(number, guess))
            return
        for branch in self._branches:
            if branch[-1] == number and len(branch) <= self._branch_len:
                branch.append(self._node(number, guess))

    def tree(self, *, with_logprobs: bool = False) -> TokenTree:
        """The trunk as a chain with the values of its guesses, and log-probabilities where they are wanted.

        Those that were drawn have their distributions.
        """
        nodes = [self.nodes[number] for number in self.trunk[1:]]
        return TokenTree(
            tuple(node.token_id for node in nodes),
            tuple(range(len(nodes))),
            _distributions(nodes),
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
                found.append(Branch(places[first.parent], first.token_id, token_ids, logprobs, _distributions(rest)))
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

    def guess_count(self, root: int) -> int:
        """How many guesses the branch has whose outcome a node is; 0 where it is none."""
        return next((len(branch) - 1 for branch in self._branches or () if branch[0] == root), 0)

    def below(
        self, root: int, trunk_len: int, branch_len: int, max_branches: int, room: int
    ) -> tuple["Branching", dict[int, int]]:
        """What is left when a node has become the root, and the new numbers of the nodes that are left.

        What lies deeper than the trunk's end is dropped: guesses there were made for the base that the trunk has.
        """
        left = Branching(trunk_len, branch_len, max_branches, room)
        numbers, top = {root: ROOT}, self.nodes[root]
        for number in range(root + 1, len(self.nodes)):
            node = self.nodes[number]
            if node.parent in numbers and node.depth - top.depth <= trunk_len:
                numbers[number] = len(left.nodes)
                left._known[numbers[node.parent], node.token_id] = len(left.nodes)
                depth, value = node.depth - top.depth, node.value / top.value
                left.nodes.append(node._replace(parent=numbers[node.parent], depth=depth, value=value))
        left._ranked = {numbers[number]: ranked for number, ranked in self._ranked.items() if number in numbers}
        left._guesses = {numbers[number]: guess for number, guess in self._guesses.items() if number in numbers}
        while not left.is_trunk_done and (guess := left._guesses.get(left.trunk[-1])):
            left.trunk.append(left._node(left.trunk[-1], guess))
        return left, numbers

    def _node(self, parent: int, child: Child) -> int:
        """The number of a child's node, which may be new."""
        number = self._known.setdefault((parent, child.token_id), len(self.nodes))
        if number == len(self.nodes):
            above = self.nodes[parent]
            value = above.value * max(child.share, MIN_VALUE)
            self.nodes.append(Node(child.token_id, parent, above.depth + 1, value, *child[2:]))
        return number

    def _can_grow(self, branch: list[int]) -> bool:
        return len(branch) <= self._branch_len and self._is_open(branch[-1])

    def _is_open(self, number: int) -> bool:
        """Whether it is not known yet what may follow a node, and something may."""
        node = self.nodes[number]
        return number not in self._ranked and not node.is_leaf and node.depth < self._room


def _distributions(nodes: Sequence[Node]) -> tuple[DraftDistribution, ...]:
    return tuple(node.distribution for node in nodes if node.distribution is not None)
