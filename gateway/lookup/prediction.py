"""A text that the answer may be like, given with the request, and the place in it where the answer is."""

from collections.abc import Sequence

from gateway.lookup.chains import Chains, Context, Match


class PredictionCursor:
    """Follows the answer through a prediction; after a difference it finds its place by the last three tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Begins with the answer, at the first token."""
        self._chains = Chains(len(token_ids))
        self._chains.extend(token_ids)
        self._place = 0
        self._is_lost = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens of the answer, in order."""
        tokens, place = self._chains.tokens, self._place
        for token_id in token_ids:
            if self._is_lost or place == len(tokens) or tokens[place] != token_id:
                self._is_lost = True
                break
            place += 1
        self._place = place

    def find(self, context: Context) -> Match | None:
        """Continuation of the answer, whose end the context is, by the prediction; None where nothing fits."""
        tokens = self._chains.tokens
        if self._is_lost:
            # Of equally long matches the next one after the place where the answer left, or else the last before it.
            found, left = self._chains.matches(context), self._place
            best = max(found, key=lambda each: (each.length, each.place > left, -abs(each.place - left)), default=None)
            if best is None:
                return None
            self._place, self._is_lost = best.place, False
        if self._place == len(tokens):
            return None
        return Match(tokens, self._place, context.agreement(tokens, self._place))
