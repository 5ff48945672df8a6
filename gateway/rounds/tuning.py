"""Constants that the choice of guesses is tuned with, each with its reason."""

from dataclasses import dataclass
from typing import NamedTuple

from outrider.estimates.acceptance import MAX_DRAFT_COUNT, MAX_TREE_ROWS


class Margin(NamedTuple):
    """How many times as fast as plain decoding guesses must look: for sessions that decode plainly to begin with them,
    and for those that have some to go on.
    """

    changing: float
    keeping: float


# Of one session on a target, whose wrong choice harms no other. A wider one would be paid wherever guesses bring less.
ALONE = Margin(changing=1.03, keeping=1.0)
# Of several, which change together: costs are known within some hundredths, they would swing, and prompts wait for
# rounds with guesses, whose gaps are longer.
SHARED = Margin(changing=1.10, keeping=1.05)


@dataclass(frozen=True, slots=True)
class PolicyTuning:
    """Tuning of planner and policy; times are rounds or tokens, because machines differ in what these take."""

    chain_counts: tuple[int, ...] = tuple(range(1, MAX_DRAFT_COUNT + 1))
    """Numbers of guesses of a chain that are looked at: the ninth is hardly ever reached."""
    tree_counts: tuple[int, ...] = (*range(1, 9), 10, 12, 16, 20, 24, MAX_TREE_ROWS)
    """Numbers of rows of a tree; of large ones not every size, because looking takes longer than it is worth."""
    first_guess: int = 4
    """Guesses of a chain while its costs are unknown: few enough to be cheap, enough to see several depths."""
    first_places: int = 2
    """Guesses of a chain of the target's own of known cost, until the last of them was tested: what is kept at places
    one and two decides most, and more of them may all be lost."""
    first_tree: tuple[int, int] = (16, 4)
    """Rows of a tree before anything is known, and how deep they may lie."""
    look_ahead_rounds: int = 32
    """Trees between two that are larger and deeper than the best: a tree says nothing of larger ones."""

    plain_budget: int = 32
    """Tokens committed unasked while plain decoding is what is wanted."""
    short_budget: int = 8
    """Unasked tokens while another choice may soon be better."""
    waiting_budget: int = 8
    """Unasked tokens while the draft is away: it may come back at any time."""
    hosted_budget: int = 64
    """Unasked tokens while the target drafts for itself: the gateway has nothing to add meanwhile."""
    looked_budget: int = 4
    """Unasked tokens for each round in which guesses of the target's own are only looked at; a stretch of them would be
    many rounds."""
    measured_budget: int = 2
    """Unasked tokens where only the cost of plain decoding is looked at: the second one had no message before it."""

    plain_rounds: int = 3
    """Plain tokens of each session before what they cost is known."""
    plain_age_rounds: int = 500
    """Rounds of each session after which plain decoding is to be seen again, and tried to be."""
    plain_patience_rounds: int = 8
    """Rounds of each session for which that is tried."""
    sure_gain: float = 1.25
    """How much faster guesses must look if plain decoding is not to be seen first: costs were measured in passing."""
    plain_probe_rounds: int = 128
    """Speculative rounds between two looks at what plain decoding costs."""
    probe_cost: float = 0.005
    """Share of the time that probes, which look for a faster draft, may cost."""
    probe_loss: float = 0.5
    """Share of a probe's rounds that counts as lost at least: so few of all rounds are probes, whatever they cost."""
    probe_tokens: tuple[int, int] = (32, 2048)
    """Plain tokens between two probes: at least so many, and for each session at most."""
    probe_rounds: int = 4
    """Rounds of a probe: a draft that has to catch up in the first one is warm in the others."""
    other_probe_rounds: int = 256
    """Speculative rounds between two looks at what another drafter costs."""
    other_pick: int = 16
    """One of so many sessions gets another of the target's drafters than the fastest, so that a change is noticed."""
    explorer_rounds: int = 4
    """Rounds after which another session goes on finding out about a drafter: texts differ."""
    least_tests: int = 16
    """Rounds of a drafter before it is believed that its guesses are not worth it, if a little luck would change that;
    so many for each of a few sessions."""
    most_explorers: int = 4
    """Sessions whose texts are tried so."""
    most_asked: int = 8
    """Sessions that try a drafter of which nothing becomes known: it may never guess anything."""

    most_lost: float = 24.0
    """Tokens that guesses may lose all sessions together before there are none for a while: luck loses fewer."""
    most_lost_each: float = 8.0
    """Further ones for each session: while they begin to guess, a few at a time, the others wait for them."""
    most_lost_round: float = 3.0
    """Tokens that a round counts as having lost at most."""
    rest_times: float = 32.0
    """Plain tokens of a rest from guesses, over those that were lost before it."""
    most_rests: int = 8
    """Times as long as the first one that a rest is at most: texts change."""

    margin_alone: Margin = ALONE
    margin_shared: Margin = SHARED
    worth_looking: float = 1.05
    """How much faster all sessions together must look with what lookups offer before any of it is taken."""
    most_wait: float = 3.0
    """Times that a forward of all sessions takes which one with rows of a lookup takes at most: the others wait for it,
    and their readers see a gap."""
    halt_gain: float = 1.1
    """How much faster a lookup must look before a stretch is ended for it: the rest of the stretch is lost."""

    table_rounds: int = 4
    """Rounds of each session for which a table of costs holds, because it takes long to compute."""
    memory_rounds: int = 500
    """Rounds of each session after which half of what rounds took at a load is forgotten: it is seldom seen again."""
    trust_rounds: int = 4
    """Rounds of each session after which half of that is believed: while a load changes, nothing lasts."""
    dear_rows: float = 1.2
    """Times what the table says that rows of lookups count as: what is wrong in it harms all sessions."""
    look_rounds: int = 16
    """Sessions up to which one of all their rounds is searched by lookups whatever rows are worth: what they offer must
    be known, but a search takes time of processors that a target on the same ones does not have."""
    offer_memory: float = 0.998
    """What is left, after another token, of what lookups have offered: it differs from text to text."""
    large_catch_up: int = 16
    """A draft that had to read more tokens than this says nothing about the cost of a step."""
    least_share: float = 0.5
    """Least share of all rows in one forward: a target that waits for groups which are almost there serves two in
    turn; more do not last."""
    branch_rows: int = 128
    """Branches of all sessions together: more rows than that cost an accelerator more than one."""
    branch_bytes: int = 1630
    """Bytes of a round's branches on both ways: with all else a round takes 2 KiB at most."""
    same_cost: float = 1.03
    """Times the shortest round that one with more branches may take: costs are known no better, and hits are sure."""
    most_share: float = 1.25
    """Share of them above which a forward has rows that are no drafter's."""
    one_group: float = 0.8
    """Share above which the target serves all in one group."""

    def margin(self, load: int) -> Margin:
        """The margin of guesses where so many sessions share a target."""
        return self.margin_shared if load > 1 else self.margin_alone


TUNING = PolicyTuning()
