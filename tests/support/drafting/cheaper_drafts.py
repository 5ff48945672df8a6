"""Cheaper drafts that need no model, and what a draft proposes without any."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from support.services.stepped_draft import Draft

from outrider.drafters.model_drafter import MODEL, SAMPLED, DraftTask, Guess
from outrider.drafters.shelf.cascade import Cascade, CheaperDraft, model_cascade, text_cascade
from outrider.engine.noise import Purpose
from outrider.engine.runner import ModelRunner
from outrider.parameters import SessionSpec
from outrider.token_tree import TokenTree

Guesses = Callable[[DraftTask, int], Sequence[int]]
"""Guesses for what a draft's task draws next, at most so many."""


class ToyCheaper(CheaperDraft):
    """A guesser that says what it is given."""

    def __init__(self, guesses: Guesses) -> None:
        CheaperDraft.__init__(self)
        self.say = guesses
        self.freed = 0

    def look(self, outer: DraftTask, count: int) -> int:
        self.kind = 1
        return 1

    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        self.guesses = [Guess(token_id) for token_id in self.say(outer, count)]

    def free(self) -> None:
        CheaperDraft.free(self)
        self.freed += 1


def toy_cascade(guesses: Guesses) -> Cascade:
    """A cascade of such drafts, by whose clock nothing takes any time: it guesses whatever may be right."""
    return Cascade(lambda _spec, _salt: ToyCheaper(guesses), clock=stopped)


def plain_proposal(runner: ModelRunner, spec: SessionSpec, num_guesses: int, drafter: str = MODEL) -> TokenTree:
    """What a new session of a draft without a cascade proposes."""
    draft = Draft(runner, prefix_cache=False)
    draft.open(spec, num_guesses, drafter=drafter)
    [answer] = draft.run()
    draft.table.clear()
    assert answer.content is not None
    return answer.content


@dataclass
class Oracle:
    """Knows what the draft is going to draw; `wrong_at` says at which places of a proposal it lies."""

    runner: ModelRunner
    wrong_at: Callable[[int], bool] = lambda place: False
    known: dict[object, TokenTree] = field(default_factory=dict)

    def __call__(self, outer: DraftTask, num_wanted: int) -> Sequence[int]:
        token_ids = tuple(outer.session.token_ids[: outer.base_len])
        key = token_ids, outer.spec.seed, outer.spec.acceptance.rule, outer.noise, outer.draft_count
        if key not in self.known:
            drafter = SAMPLED if outer.noise is Purpose.DRAFT else MODEL
            spec = replace(outer.spec, token_ids=token_ids)
            self.known[key] = plain_proposal(self.runner, spec, outer.draft_count, drafter)
        first, size = len(outer.guesses), self.runner.vocabulary_size
        chain = self.known[key].token_ids[first : first + num_wanted]
        return [
            (token_id + 1) % size if self.wrong_at(first + place) else token_id for place, token_id in enumerate(chain)
        ]


def cheaper_guesses(runner: ModelRunner) -> dict[str, Guesses]:
    """Every kind of guesser: always right, never, right now and then, anything, nothing."""
    return {
        "oracle": Oracle(runner),
        "adversary": Oracle(runner, lambda place: True),
        "mixed": Oracle(runner, lambda place: place % 3 == 1),
        "random": lambda outer, num: random.Random(repr(outer.session.token_ids)).choices(
            range(runner.vocabulary_size), k=num
        ),
        "empty": lambda outer, num: (),
    }


GUESSERS = ("oracle", "adversary", "mixed", "random", "empty")
CASCADES = (*GUESSERS, "lookup", "smaller", "smaller+lookup", "itself")


def stopped() -> float:
    """A clock by which nothing takes any time, so that all that may be right is guessed."""
    return 0.0


def cascade_of(name: str, runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, depth: int = 0) -> Cascade:
    if name in GUESSERS:
        return toy_cascade(cheaper_guesses(runner)[name])
    if name == "lookup":
        return text_cascade(depth, clock=stopped)
    model = twin if name == "itself" else smaller
    return model_cascade(model, 64, depth, with_text=name.endswith("lookup"), clock=stopped)
