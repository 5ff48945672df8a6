"""A session on its way to some guesses, and which drafters there are to work on it.

All drafters guess with the service's model, so that sessions of any of them share a forward. What tells them apart is
whose noise they draw with, and so which rules they serve.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.session import Session
from outrider.errors import InvalidRequest, OutriderError
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.rpc.fencing import Meter
from outrider.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, what it was drawn from where the rule needs it, and its log-probability where it is wanted."""

    token_id: int
    distribution: DraftDistribution | None = None
    logprob: float | None = None


@dataclass(slots=True, eq=False)
class DraftTask:
    """A session on its way to `draft_count` guesses, or none: then only its tokens are cached."""

    session: Session
    spec: SessionSpec
    noise: Purpose
    """TOKEN, which is shared with the target, or DRAFT; see noise_of."""
    draft_count: int
    meter: Meter
    on_done: Callable[["DraftTask"], None]
    on_failure: Callable[[OutriderError], None]
    base_len: int = field(init=False)
    """Committed tokens that the guesses build on."""
    guesses: list[Guess] = field(default_factory=list)
    done: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        self.base_len = len(self.session)

    @property
    def draw_input(self) -> DrawInput:
        """What its next forward computes, and how a token is drawn behind it."""
        return DrawInput(Feed(self.session), self.spec)

    @property
    def needs_distribution(self) -> bool:
        """Whether each guess has to come with its distribution."""
        return self.spec.acceptance.rule.needs_distributions

    @property
    def wants_logprob(self) -> bool:
        """Whether each guess has to come with the logarithm of its probability."""
        return self.spec.draft_logprobs and self.draft_count > 0

    @property
    def proposal(self) -> TokenTree:
        """The guesses so far."""
        distributions = [guess.distribution for guess in self.guesses if guess.distribution]
        logprobs = [guess.logprob for guess in self.guesses if guess.logprob is not None]
        return TokenTree.chain([guess.token_id for guess in self.guesses], distributions, logprobs)

    def take(self, guess: Guess) -> None:
        """Adds a guess where one is wanted, and ends the task behind the last.

        Nothing can follow a token that ends the request, and so no guess is wasted on it. Under a rule that tests with
        uniforms the length of a chain must not depend on what was drawn, and the target stops there by itself.
        """
        if self.draft_count:
            self.guesses.append(guess)
            self.session.extend([guess.token_id])
        ends = self.spec.eos_token_ids | self.spec.stop_token_ids
        if len(self.guesses) == self.draft_count or (guess.token_id in ends and not self.needs_distribution):
            self.finish()

    def fail(self, error: OutriderError) -> None:
        """Ends the task with an error."""
        self.done = True
        self.on_failure(error)

    def finish(self) -> None:
        """Ends the task with the guesses so far."""
        self.done = True
        self.on_done(self)


# Draws as the rule of a session needs it.
MODEL = "model"
# Draws with the target's own noise, so that both choose the same token wherever their distributions allow it. What it
# draws says something about what the target will draw, and rules that test with uniforms must not have that.
COUPLED = "coupled"
# Draws with noise of its own, whatever the rule.
SAMPLED = "sampled"

DRAFTERS: Mapping[str, frozenset[Rule]] = {
    MODEL: frozenset(Rule),
    COUPLED: frozenset(rule for rule in Rule if not rule.needs_distributions),
    SAMPLED: frozenset(Rule),
}


def choose_drafter(name: str, rule: Rule, offers: Mapping[str, frozenset[Rule]], field: str) -> str:
    """The drafter that a session gets; an empty name leaves the choice to the service.

    Raises InvalidRequest about a name that is not on offer, and about one that cannot serve the rule.
    """
    if name and name not in offers:
        raise InvalidRequest(field, name, f"one of {', '.join(offers)}, or empty")
    fitting = [offer for offer, rules in offers.items() if rule in rules]
    if name and name not in fitting:
        raise InvalidRequest(field, name, f"one that serves the rule {rule}: {', '.join(fitting)}")
    return name or fitting[0]


def noise_of(drafter: str, rule: Rule) -> Purpose:
    """TOKEN for a draft that shares the target's noise, DRAFT for one with noise of its own."""
    is_alone = drafter == SAMPLED or rule.needs_distributions
    return Purpose.DRAFT if is_alone else Purpose.TOKEN
