"""One forward and a draw after every row: whichever sessions share it, each session draws what it would draw alone."""

from dataclasses import replace

import pytest
from support.models.tiny_models import TARGET

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.token_tree import EMPTY, TokenTree

TREE = TokenTree((260, 401, 12, 555), (0, 0, 1, 3))
PLAIN = [SamplingParameters(temperature=temperature) for temperature in (0.0, 1.0, 0.8)]
CUT = [SamplingParameters(top_k=7, temperature=1.3), SamplingParameters(frequency_penalty=0.5, temperature=0.8)]


def draw_input_of(runner: ModelRunner, number: int, sampling: SamplingParameters, tree: TokenTree) -> DrawInput:
    """A session of its own, prompt and seed from the number."""
    token_ids = tuple(range(5 + number, 40 + 3 * number))
    spec = SessionSpec(token_ids, 4, sampling, 77 + number, 500, frozenset({0}), frozenset())
    return DrawInput(Feed(runner.open(token_ids, 4), tree), spec)


def test_sessions_draw_as_if_alone() -> None:
    """Requests with a temperature only, beside those with more, in any order and with trees, keep their tokens."""
    runner = ModelRunner.load(str(TARGET), num_threads=2, kv_tokens=4096)
    wishes = [
        (number, sampling, tree)
        for number, sampling in enumerate((PLAIN[0], CUT[0], PLAIN[1], CUT[1], PLAIN[2]))
        for tree in (EMPTY, TREE)
    ]
    alone = [forward_and_draw(runner, [draw_input_of(runner, *wish)])[0] for wish in wishes]
    assert [len(drawn) for drawn in alone if isinstance(drawn, list)] == [1, 5] * 5
    for chosen in (wishes, wishes[::-1], [wish for wish in wishes if wish[1] in PLAIN]):
        together = forward_and_draw(runner, [draw_input_of(runner, *wish) for wish in chosen])
        assert together == [alone[wishes.index(wish)] for wish in chosen]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (SamplingParameters(temperature=0.3), True),
        (SamplingParameters(temperature=0, top_k=3, top_p=0.5, min_p=0.5), True),
        (SamplingParameters(min_tokens=2), True),
        (SamplingParameters(min_tokens=3), False),
        (SamplingParameters(top_k=3), False),
        (SamplingParameters(top_p=0.9), False),
        (SamplingParameters(min_p=0.1), False),
        (SamplingParameters(temperature=0, logit_bias={1: 0.5}), False),
        (SamplingParameters(temperature=0, presence_penalty=0.5), False),
        (SamplingParameters(temperature=0, repetition_penalty=1.1), False),
    ],
)
def test_only_a_temperature_is_plain(wanted: SamplingParameters, expected: bool) -> None:
    """With two output tokens so far: min_tokens 2 is reached, and temperature 0 leaves nothing to cut."""
    for ends, stops in ((frozenset({0}), frozenset[int]()), (frozenset[int](), frozenset({0}))):
        spec = SessionSpec(tuple(range(6)), 4, wanted, 77, 500, ends, stops)
        assert (spec.plain_len <= 6) is expected
        assert replace(spec, banned=((7,),)).plain_len > 500
    endless = SessionSpec(tuple(range(6)), 4, wanted, 77, 500, frozenset(), frozenset())
    assert (endless.plain_len <= 6) is (expected or wanted.min_tokens == 3)
