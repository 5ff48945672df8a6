"""Which drafters there are, and what tells them apart: whose noise they draw with, and so which rules they serve.

All guess with the service's model, so that sessions of any of them share a forward.
"""

from collections.abc import Mapping

from outrider.engine.noise import Purpose
from outrider.errors import InvalidRequest
from outrider.parameters import Rule

# Draws as the rule of a session needs it.
MODEL = "model"
# Draws with the target's own noise, so that both choose the same token wherever their laws allow it. What it draws says
# something about what the target will draw, and rules that test with coins must not have that.
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
