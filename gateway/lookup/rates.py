"""Acceptance of guesses without a model, by what they stand on; shared by all requests of a gateway."""

from enum import IntEnum

from outrider.estimates.acceptance import GuessTally

SHORTEST = (3, 4, 8, 16, 32)  # match of each bucket
PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 8.0  # in tested guesses
HIGHEST = 0.995


class Kind(IntEnum):
    """Kind of place where a guess was found."""

    OWN = 0
    TENANT = 1
    DATASTORE = 2
    PREDICTION = 3
    TABLE = 4


LONGEST = SHORTEST[-1]
NUM_BUCKETS = len(SHORTEST)
# What a guess stands on, as a number, by kind and length of the match. A place in a prediction that the answer has
# followed, and a table, are what they are however long it has been so.
GROUNDS = tuple(
    tuple(
        kind * NUM_BUCKETS + sum(kind < Kind.PREDICTION and length >= shortest for shortest in SHORTEST[1:])
        for length in range(LONGEST + 1)
    )
    for kind in Kind
)
PREDICTION_GROUND, TABLE_GROUND = GROUNDS[Kind.PREDICTION][0], GROUNDS[Kind.TABLE][0]
# What guesses on each ground are shown as.
NAMES = tuple(name for name in ("lookup", "lookup", "datastore", "prediction", "table") for _ in range(NUM_BUCKETS))


class LookupRates:
    """Shares of guesses that were accepted, recent ones first, by source and by length of the match.

    `means` has the share for each ground, drawn towards a prior while little is known.
    """

    def __init__(self) -> None:
        num_grounds = len(Kind) * NUM_BUCKETS
        self.means = [PRIORS[ground % NUM_BUCKETS] for ground in range(num_grounds)]
        self.means[PREDICTION_GROUND] = 0.8
        self._priors = tuple(self.means)
        self._tallies = [GuessTally() for _ in range(num_grounds)]

    def observe(self, ground: int, share: float, *, accepted: bool) -> None:
        """Adds a test of guesses on one ground that had this share of its votes, in (0, 1]."""
        self._tallies[ground].add(share, accepted)
        self.means[ground] = min(self._tallies[ground].share(self._priors[ground], PRIOR_WEIGHT), HIGHEST)
