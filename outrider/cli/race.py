"""A race: the same message answered with and without speculation by turns, from the same seed, and what that showed."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from outrider.cli.chat.conversation import ChatTurn
from outrider.cli.options import RequestOptions
from outrider.cli.other_work import cpu_times, others_said
from outrider.cli.running import note
from outrider.cli.views import View, choose_view
from outrider.client import AsyncClient, GenerationOptions, Result, Round, Speculation
from outrider.parameters import Rule
from outrider.process.streams import finish_streams

# A race has no option for it: others see what was typed.
KEY_VARIABLE = "OUTRIDER_API_KEY"
# With speculation or without, a turn being two neighbours: what makes the machine slow for a moment hits both.
SLICES = (True, False, False, True, True, False)
AGAIN = "Both answers again, by turns, to see whether the machine is busy."
# Plain answers of the same tokens differ by less, and no round is cheaper than a plain one but for noise.
STEADY, TOLERANCE = 1.3, 1.1


@dataclass(frozen=True, slots=True)
class RaceQuestion:
    """Question of a race: a message, or a text to continue."""

    text: str
    options: GenerationOptions
    is_chat: bool = True
    api_key: str | None = field(default=None, repr=False)
    """Key for a gateway that asks for one."""


# Much of the answer is in the question: there guesses pay on processors, and a small assistant makes no mistake.
QUESTION = RaceQuestion(
    "Put this recipe into numbered steps: Mix 200 grams of flour with two eggs and half a litre of milk. Add a pinch "
    "of salt. Let the dough rest for twenty minutes. Melt a little butter in a pan and bake the pancakes on both sides "
    "until they are golden. Serve them with sugar and lemon.",
    GenerationOptions(max_tokens=192, seed=3, temperature=0.0),
)
STORY = RaceQuestion(
    "Once upon a time there was a", GenerationOptions(max_tokens=128, seed=3, temperature=0.7), is_chat=False
)


async def race(address: str, question: RaceQuestion) -> None:
    """Streams the answer with speculation and without, repeats both by turns, and says what differed.

    Raises what the gateway answered, and PeerLost when there is no answer.
    """
    lanes: dict[bool, list[ChatTurn]] = {True: [], False: []}
    before = cpu_times()
    async with AsyncClient(address, api_key=question.api_key) as client:
        for number, speculates in enumerate(SLICES):
            shows = number < len(lanes)
            if shows:
                note(f"{'With' if speculates else 'Without'} speculation: {question.text}")
            elif number == len(lanes):
                note(AGAIN)
            # Each reads its prompt itself: with a salt of its own it does not find what the other one cached.
            changes = GenerationOptions(cache_salt=secrets.token_hex(8), speculation=Speculation(enabled=speculates))
            options = GenerationOptions(**{**question.options, **changes})
            turn, view = ChatTurn(question.text, options["seed"] or 0), choose_view(as_json=False) if shows else View()
            view.begin("" if question.is_chat else question.text, RequestOptions(no_speculation=not speculates))
            said = [{"role": "user", "content": question.text}]
            stream = client.chat(said, **options) if question.is_chat else client.generate(question.text, **options)
            async with stream:
                async for event in stream:
                    turn.add(event)
                    if isinstance(event, Round):
                        view.show(event)
                    else:
                        view.finish(event)
            view.end()
            finish_streams()
            lanes[speculates].append(turn)
    note(verdict(lanes[True], lanes[False], others_said(before, cpu_times())))


def verdict(fast: Sequence[ChatTurn], plain: Sequence[ChatTurn], others: str = "") -> str:
    """Whether the token ids are the same, and how long both took, by turns; a stopped race has no result.

    `others` is what other processes took of the machine, if that counts. Then, and where times contradict each other,
    there is no figure of speed.
    """
    # One that was stopped may have no neighbour.
    results = ([each.result for each in lane] for lane in (fast, plain))
    pairs = list(zip_longest(*results))
    ended = [(one, other) for one, other in pairs if one is not None and other is not None]
    if len(ended) < len(pairs):
        return "No result: all answers must end by themselves to be compared."
    speed = speed_said(ended, others)
    first, plain_first = ended[0]
    if all(one.speculation.draft_tokens == 0 for one, _ in ended):
        speed += " Neither answer had any guesses, so what differs in time is the machine's."
    rule = first.acceptance.rule
    differences = (_difference(_token_ids(one), _token_ids(other)) for one, other in zip(fast, plain, strict=True))
    place = next(filter(None, differences), None)
    if place is None:
        head = "Identical token for token" if rule is Rule.MATCH else "The same this time"
        return f"{head}: {plain_first.completion_tokens} tokens. {speed}"
    if rule is not Rule.MATCH:
        reason = f"The rule {rule} does not promise the same tokens; only match does."
    elif len({numerics for pair in ended for each in pair for numerics in each.numerics_ids}) > 1:
        reason = "The answers were computed in different ways; then only the distribution is promised."
    else:
        reason = "Under match on the same numerics this must not happen: please report it."
    return f"Differs at token {place}. {reason} {speed}"


def speed_said(ended: Sequence[tuple[Result, Result]], others: str) -> str:
    """How many times as fast the first of each pair was than the second, or why that cannot be said; and how many
    tokens a pass of the target brought, all passes counted: the prompt's, and plain ones too.
    """
    tokens = sum(one.completion_tokens for one, _ in ended)
    # That of the prompt is no round.
    passes = sum(1 + one.speculation.rounds for one, _ in ended)
    ratio = median(other.total_us / one.total_us for one, other in ended)
    times_s = [sorted(each.total_us / 1e6 for each in lane) for lane in zip(*ended, strict=True)]
    own_s, other_s = (median(each) for each in times_s)
    a_pass = f"A pass of the target brought {tokens / passes:.2f} tokens."
    slowest, fastest = times_s[1][-1], times_s[1][0]
    if others:
        doubt = others
    elif slowest > STEADY * fastest:
        doubt = f"the same answer without speculation took {fastest:.2f} s and {slowest:.2f} s"
    elif ratio > TOLERANCE * tokens / passes:
        doubt = f"{ratio:.2f} times as fast is more than these passes can bring"
    else:
        turns = f", the median of {len(ended)} turns" if len(ended) > 1 else ""
        speed = f"{ratio:.2f} times as fast{turns}: {own_s:.2f} s with speculation, {other_s:.2f} s without."
        return f"{speed} {a_pass}"
    return f"The machine was busy, so there is no figure of speed: {doubt}. {a_pass}"


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place, counted from 1, at which two answers differ."""
    pairs = enumerate(zip_longest(ours, theirs), start=1)
    return next((place for place, (one, other) in pairs if one != other), None)


def _token_ids(turn: ChatTurn) -> list[int]:
    return [token.token_id for event in turn.rounds for token in event.tokens]
