"""The suffix automaton of a text (Blumer et al., 1985), which knows every repeat exactly: an oracle for lookups."""

from dataclasses import dataclass, field


@dataclass
class State:
    """Texts that end at the same places; `length` is the longest one's, `link` the state of its next shorter end."""

    length: int
    link: int
    edges: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """Reads a text token by token."""

    def __init__(self) -> None:
        self._states = [State(0, -1)]
        self._last = 0

    def add(self, token_id: int) -> None:
        """Appends a token."""
        states = self._states
        states.append(State(states[self._last].length + 1, 0))
        added, at = len(states) - 1, self._last
        while at >= 0 and token_id not in states[at].edges:
            states[at].edges[token_id] = added
            at = states[at].link
        if at >= 0:
            other = states[at].edges[token_id]
            if states[other].length != states[at].length + 1:
                states.append(State(states[at].length + 1, states[other].link, dict(states[other].edges)))
                copy = len(states) - 1
                while at >= 0 and states[at].edges.get(token_id) == other:
                    states[at].edges[token_id] = copy
                    at = states[at].link
                states[other].link = copy
                other = copy
            states[added].link = other
        self._last = added

    @property
    def repeat_len(self) -> int:
        """Length of the longest end of the text that occurred before, overlaps included."""
        return self._states[max(0, self._states[self._last].link)].length
