"""Generations as the command line's views see them, for tests of what they show."""

from dataclasses import replace

from outrider.cli.options import RequestOptions
from outrider.cli.output import View
from outrider.client import Origin, PromptToken, RejectedToken, Result, Round, RoundFacts, SpeculationFigures, Token
from outrider.parameters import TokenLogprob

ROUNDS = (
    Round((Token(5, Origin.PLAIN, "Once"),), "Once"),
    Round((Token(6, Origin.ACCEPTED, " upon"), Token(7, Origin.CORRECTION, " a")), " upon a"),
    Round((Token(8, Origin.ACCEPTED, ""), Token(9, Origin.BONUS, " é")), " é"),
)
RESULT = Result(
    rest=" time",
    finish_reason="length",
    seed=11,
    prompt_tokens=3,
    completion_tokens=5,
    speculation=SpeculationFigures(2, 4, 2, 0.5, 0.5, 2.0, 1),
    first_token_us=1_000,
    total_us=100_000,
    model_hash="ab",
    numerics_ids=("cpu-test",),
    cached_prompt_tokens=2,
    queue_us=50,
)
TEXT = "Once upon a é time"
NUMBERED = (
    Round(
        (
            Token(5, Origin.PLAIN, "Once\n", TokenLogprob(-0.25, (5, 6), (-0.25, -2.0))),
            Token(6, Origin.ACCEPTED, "\x1b", TokenLogprob(-1.5, (6, 8), (-1.5, -1.625))),
        ),
        "Once\n\x1b",
        prompt=(PromptToken(3, "Ask"), PromptToken(4, ": ", TokenLogprob(-3.0, (1, 2), (-0.5, -1.0)))),
    ),
)
REJECTED = (
    ROUNDS[0],
    replace(
        ROUNDS[1],
        rejected=(RejectedToken(70, " the", -0.5), RejectedToken(71, " fox")),
        facts=RoundFacts(draft_count=3),
    ),
    replace(ROUNDS[2], rejected=(RejectedToken(72, " \x1b"),)),
)


def shown(view: View, rounds: tuple[Round, ...] = ROUNDS, *, rejected: bool = False) -> None:
    """Lets a view see a whole generation, in which rejected guesses were asked for or not."""
    view.begin("Ask: ", RequestOptions(show_rejected=rejected or None))
    for event in rounds:
        view.show(event)
    view.finish(RESULT)
    view.end()


def show_two_samples(view: View) -> None:
    """Lets a view see two samples of the same generation."""
    view.begin("Ask: ", RequestOptions(sample_count=2))
    for index in range(2):
        for event in ROUNDS:
            view.show(replace(event, sample_index=index))
        view.finish(replace(RESULT, sample_index=index, seed=11 + index))
    view.end()
