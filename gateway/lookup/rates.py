"""How often guesses without a model are accepted, by what they stand on; shared by all requests of a gateway."""

from enum import IntEnum

SHORTEST = (3, 4, 8, 16, 32)  # match of each bucket
PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 8.0  # in tested guesses
MEMORY = 0.98  # of what was learnt, is left behind a further test
HIGHEST = 0.995


class Kind(IntEnum):
    """Where a guess was found."""

    OWN = 0
    TENANT = 1
    DATASTORE = 2
    PREDICTION = 3
    TABLE = 4


NAMES = {
    Kind.OWN: "lookup",
    Kind.TENANT: "lookup",
    Kind.DATASTORE: "datastore",
    Kind.PREDICTION: "prediction",
    Kind.TABLE: "table",
}
BUCKET_OF = tuple(sum(length >= shortest for shortest in SHORTEST[1:]) for length in range(SHORTEST[-1] + 1))
NUM_BUCKETS = len(SHORTEST)
# A place in a prediction that the answer has followed, and a table, are what they are however long it has been so.
PREDICTION_GROUND, TABLE_GROUND = Kind.PREDICTION * NUM_BUCKETS, Kind.TABLE * NUM_BUCKETS


def ground_of(kind: Kind, match_len: int) -> int:
    """What a guess behind so many matching tokens stands on, as a number: its rate is `LookupRates.means` of it."""
    if kind >= Kind.PREDICTION:
        return kind * NUM_BUCKETS
    return kind * NUM_BUCKETS + BUCKET_OF[min(match_len, SHORTEST[-1])]


def name_of(ground: int) -> str:
    """The source that a guess is shown with: lookup, datastore, prediction or table."""
    return NAMES[Kind(ground // NUM_BUCKETS)]


class LookupRates:
    """Shares of guesses that were accepted, recent ones first, by source and by length of the match.

    `means` has the share for each ground, drawn towards a prior while little is known.
    """

    def __init__(self) -> None:
        num_grounds = len(Kind) * NUM_BUCKETS
        self.means = [PRIORS[ground % NUM_BUCKETS] for ground in range(num_grounds)]
        self.means[PREDICTION_GROUND] = 0.8
        self._priors = tuple(self.means)
        self._tested = [0.0] * num_grounds
        self._accepted = [0.0] * num_grounds

    def observe(self, ground: int, share: float, *, accepted: bool) -> None:
        """Adds a test of guesses on one ground that had this share of its votes, in (0, 1]."""
        self._tested[ground] = MEMORY * self._tested[ground] + share
        self._accepted[ground] = MEMORY * self._accepted[ground] + accepted
        weighed = self._accepted[ground] + PRIOR_WEIGHT * self._priors[ground]
        self.means[ground] = min(weighed / (self._tested[ground] + PRIOR_WEIGHT), HIGHEST)
