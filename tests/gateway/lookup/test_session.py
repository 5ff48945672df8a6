"""What a request looks up, from the first token of its prompt to its end."""

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from gateway.lookup.memory import LEAST_TOKENS, MAX_BYTES_PER_TOKEN, Memories
from gateway.lookup.rates import GROUNDS, PREDICTION_GROUND, Kind, LookupRates
from gateway.lookup.session import SLICE, LookupSession
from gateway.lookup.votes import NOTHING, Look

# A request of its own in a process of its own: prints the rows that it looks up on its way.
FRESH = """
import json, sys
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession
prompt, rounds = json.loads(sys.argv[1])
session = LookupSession(prompt, rates=LookupRates())
looked = []
for token_ids in rounds:
    session.extend(token_ids)
    tree = session.look(12, 6).tree
    looked.append([tree.token_ids, tree.parents, tree.values])
print(json.dumps(looked))
"""


def random_text(length: int, seed: int, alphabet: int = 6) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(alphabet) for _ in range(length)]


def session_of(
    prompt: list[int], rates: LookupRates | None = None, prediction: list[int] | None = None
) -> LookupSession:
    return LookupSession(prompt, prediction=prediction or (), rates=rates or LookupRates())


def shown(look: Look) -> list[list[int] | list[float]]:
    tree = look.tree
    return [list(tree.token_ids), list(tree.parents), list(tree.values)]


@dataclass
class Decoding:
    """A request whose answer is known: rounds of what is looked up, as long as it is right, and one token more."""

    session: LookupSession
    answer: list[int]
    num_rounds: int = 0
    wrong: list[int] = field(default_factory=list)

    def run(self, max_rows: int = 8) -> None:
        place = 0
        while place < len(self.answer):
            look = self.session.look(max_rows, max_rows)
            committed = self.answer[place : place + len(look.tree.follow(self.answer[place:])) + 1]
            self.session.observe(look, committed)
            self.wrong += [each for each in look.tree.token_ids if each not in self.answer]
            self.session.extend(committed)
            place += len(committed)
            self.num_rounds += 1


def test_a_copy_takes_few_rounds() -> None:
    """An answer that is in the prompt is guessed from its fourth token on."""
    text = random_text(400, 1, alphabet=1000)
    decoding = Decoding(session_of(text), text[100:300])
    decoding.run()
    assert decoding.num_rounds <= 3 + 197 / 9 + 1


def test_abc_has_no_draft() -> None:
    """The end of a text is not a place where it occurred before."""
    session = session_of([])
    assert session.look(8, 8) == NOTHING
    for token_id in (1, 2, 3):
        session.extend([token_id])
        assert session.look(8, 8) == NOTHING


def test_a_text_that_repeats_itself_goes_on() -> None:
    """Beyond what was said of it, and also with token 0."""
    assert session_of([0] * 4).look(6, 6, chain=True).tree.token_ids == (0,) * 6
    assert session_of([4, 0, 5] * 2).look(7, 7, chain=True).tree.token_ids == (4, 0, 5, 4, 0, 5, 4)


def test_the_index_is_that_of_the_log() -> None:
    """After rounds of accepted and rejected guesses a session looks up what a new one over the same tokens does."""
    prompt, answer = random_text(200, 2), random_text(300, 3)
    session = session_of(prompt)
    decoding = Decoding(session, answer)
    decoding.run()
    assert decoding.num_rounds > 50
    rates = LookupRates()
    rates.means[:] = session._rates.means
    again = session_of([*prompt, *answer], rates)
    for token_id in random_text(50, 4):
        assert shown(session.look(12, 6)) == shown(again.look(12, 6))
        session.extend([token_id])
        again.extend([token_id])


def test_rejected_guesses_are_never_learnt() -> None:
    """A token that was only ever guessed is never guessed afterwards."""
    session = session_of([1, 2, 3, 50, 51, 1, 2, 3])
    look = session.look(2, 2)
    assert look.tree.token_ids == (50, 51)
    session.observe(look, [60])
    session.extend([60, 1, 2, 3])
    assert session.look(1, 1).tree.token_ids == (60,)
    other = session_of([3, 50])
    assert other.look(8, 8) == NOTHING


@pytest.mark.slow
def test_a_second_request_is_like_the_first_of_a_process() -> None:
    """Nothing of a request that has ended is in the guesses of the next one, which shares no memory with it."""
    first = session_of(random_text(300, 5))
    Decoding(first, random_text(200, 6)).run()
    first.close()
    prompt, answer = random_text(200, 7), random_text(120, 8)
    rounds = [answer[start : start + 3] for start in range(0, len(answer), 3)]
    second, looked = session_of(prompt), []
    for token_ids in rounds:
        second.extend(token_ids)
        looked.append(shown(second.look(12, 6)))
    arguments = (sys.executable, "-c", FRESH, json.dumps([prompt, rounds]))
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ended.stdout) == looked
    assert sum(len(tokens) for tokens, _, _ in looked) > 100


async def test_others_have_their_turn_while_a_prompt_is_read() -> None:
    """Every slice ends with one; what was committed meanwhile is read in order."""
    prompt = random_text(5 * SLICE + 7, 9, alphabet=20)
    session, turns = session_of(prompt), 0
    reading = asyncio.create_task(session.read())
    session.extend([1, 2])
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 6
    session.extend([3])
    at_once = session_of([*prompt, 1, 2, 3])
    assert shown(session.look(12, 6)) == shown(at_once.look(12, 6)) != shown(NOTHING)


def test_acceptance_is_learnt_by_ground() -> None:
    """The rate of each row's ground rises or falls; after a row that was not accepted nothing was tested."""
    rates = LookupRates()
    before = list(rates.means)
    session = session_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], rates)
    look = session.look(6, 6)
    assert look.tree.token_ids == (4, 5, 6, 7, 8, 9)
    session.observe(look, [4, 5, 60])
    own = GROUNDS[Kind.OWN]
    assert rates.means[own[3]] > before[own[3]]
    # The row after 4 matching tokens was accepted, that after 5 was not, and none after 6 and more was tested.
    assert rates.means[own[4]] < before[own[4]]
    assert rates.means[own[8]] == before[own[8]]
    changed = [number for number, mean in enumerate(rates.means) if mean != before[number]]
    assert changed == [own[3], own[4]]


def test_nothing_is_learnt_of_what_has_not_been_said() -> None:
    """A single token, as plain decoding commits it, says something of the first row only; none says nothing."""
    rates = LookupRates()
    session = session_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], rates)
    look, before = session.look(6, 6), list(rates.means)
    session.observe(look, [])
    assert rates.means == before
    session.observe(look, [4])
    changed = [number for number, mean in enumerate(rates.means) if mean != before[number]]
    assert changed == [GROUNDS[Kind.OWN][3]]


def test_who_votes_about_the_rest_is_tested_on_it() -> None:
    """Where the longer match was right, the shorter one, which names another token, was not asked."""
    rates = LookupRates()
    prompt = [9, 8, 1, 2, 3, 40, 7, 1, 2, 3, 50, 9, 8, 1, 2, 3]
    look = session_of(prompt, rates).look(2, 1)
    assert look.tree.token_ids == (40, 50)
    before, own = list(rates.means), GROUNDS[Kind.OWN]
    session_of(prompt, rates).observe(look, [40])
    assert rates.means[own[3]] == before[own[3]]
    assert rates.means[own[5]] > before[own[5]]
    before = list(rates.means)
    session_of(prompt, rates).observe(look, [50])
    assert rates.means[own[3]] > before[own[3]]
    assert rates.means[own[5]] < before[own[5]]


def test_a_prediction_is_followed_from_its_first_token() -> None:
    """Before the answer has any, and as long as it agrees."""
    predicted = random_text(60, 10, alphabet=500)
    session = session_of([1, 2, 3], prediction=predicted)
    look = session.look(8, 8)
    assert list(look.tree.token_ids) == predicted[:8]
    assert set(look.sources) == {"prediction"}
    session.extend(predicted[:5])
    assert list(session.look(8, 8, chain=True).tree.token_ids) == predicted[5:13]
    session.extend(predicted[5:])
    assert session.look(8, 8) == NOTHING


@pytest.mark.parametrize(("written", "skipped"), [([900], 1), ([900, 901, 902], 0), ([], 6), ([900], 20)], ids=str)
def test_a_prediction_finds_its_place_again(written: list[int], skipped: int) -> None:
    """Three tokens after something that was replaced, added or left out."""
    predicted = random_text(60, 11, alphabet=500)
    session = session_of([1, 2, 3], prediction=predicted)
    session.extend([*predicted[:10], *written])
    rest = predicted[10 + skipped :]
    session.extend(rest[:2])
    if written:
        assert session.look(4, 4) == NOTHING
    session.extend(rest[2:3])
    assert list(session.look(4, 4).tree.token_ids) == rest[3:7]
    session.extend(rest[3:5])
    assert list(session.look(4, 4).tree.token_ids) == rest[5:9]


def test_of_two_equal_places_the_prediction_takes_the_nearest() -> None:
    """A phrase that it has twice is taken for the one after the difference."""
    predicted = [1, 2, 3, 4, 70, 71, 72, 5, 6, 70, 71, 72, 8, 9]
    for answer, expected in (([1, 2, 3, 60, 70, 71, 72], 5), ([1, 2, 3, 4, 70, 71, 72, 5, 6, 61, 70, 71, 72], 8)):
        session = session_of([0], prediction=predicted)
        session.extend(answer)
        assert session.look(1, 1).tree.token_ids == (expected,)


def test_predictions_have_a_rate_of_their_own() -> None:
    """And a wrong prediction costs those of lookups nothing."""
    rates = LookupRates()
    before = list(rates.means)
    session = session_of([1, 2, 3], rates, prediction=[5, 6, 7])
    for _ in range(20):
        session.observe(session.look(3, 3), [60])
    changed = [number for number, mean in enumerate(rates.means) if mean != before[number]]
    assert changed == [PREDICTION_GROUND]
    assert rates.means[PREDICTION_GROUND] < 0.4


def test_a_finished_request_helps_the_next_of_its_tenant() -> None:
    """Prompt and answer, from the close on, once; without a memory nothing is kept."""
    kept = Memories(LEAST_TOKENS, MAX_BYTES_PER_TOKEN * LEAST_TOKENS)
    rates = LookupRates()

    def ask(salt: str) -> tuple[LookupSession, Look]:
        session = LookupSession([5, 6, 7], memory=kept.of(salt), rates=rates)
        return session, session.look(4, 4)

    session, look = ask("a")
    assert look == NOTHING
    session.extend([8, 9])
    assert ask("a")[1] == NOTHING
    session.close()
    session.close()
    assert ask("a")[1].tree.token_ids == (8, 9)
    assert set(ask("a")[1].sources) == {"lookup"}
    assert len(kept.of("a")) == 6
    assert ask("b")[1] == ask("")[1] == NOTHING
    without = LookupSession([5, 6, 7, 4, 4, 4], rates=rates)
    without.extend([4])
    without.close()
    assert len(kept.of("a")) == 6
