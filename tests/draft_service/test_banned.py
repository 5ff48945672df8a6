"""Banned sequences through the draft's sessions: none in a guess or a distribution."""

from dataclasses import replace

import pytest
from support.basics import spec_of
from support.services.stepped_draft import PROMPT, Draft, fresh_guesses

from outrider.parameters import Acceptance, Rule

WANTED = [{"temperature": 0.0}, {"temperature": 0.6}]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("wanted", WANTED)
def test_no_guess_is_banned(draft: Draft, rule: Rule, wanted: dict[str, float]) -> None:
    """A single token, a pair after the prompt's last token, and one within the guesses."""
    spec = spec_of(PROMPT, 60, seed=11, eos=(), **wanted)
    spec = replace(spec, acceptance=Acceptance(rule=rule))
    free = fresh_guesses(draft.runner, spec, 6)
    single = free[2]
    draft.open(replace(spec, banned=((PROMPT[-1], free[0]), (single,))), 6)
    [answer] = draft.run()
    assert answer.content is not None
    assert len(answer.content) == 6
    assert answer.content.token_ids[0] != free[0]
    assert single not in answer.content.token_ids
    distributions = answer.content.distributions
    assert len(distributions) == (6 if rule.needs_distributions else 0)
    assert not any(single in distribution.token_ids for distribution in distributions)
    assert not any(free[0] in distribution.token_ids for distribution in distributions[:1])
    pair = answer.content.token_ids[3:5]
    draft.open(replace(spec, banned=((PROMPT[-1], free[0]), (single,), pair)), 6, epoch=2)
    again = draft.guesses()
    assert again[:4] == answer.content.token_ids[:4]
    assert again[4] != pair[1]
