"""A race: the same message answered with and without speculation, from the same seed, and what that showed."""

import secrets
from dataclasses import dataclass, field
from itertools import zip_longest

from outrider.cli.chat.conversation import ChatTurn
from outrider.cli.options import RequestOptions
from outrider.cli.running import note
from outrider.cli.views import choose_view
from outrider.client import AsyncClient, GenerationOptions, Round, Speculation
from outrider.parameters import Rule

# A race has no option for it: others see what was typed.
KEY_VARIABLE = "OUTRIDER_API_KEY"


@dataclass(frozen=True, slots=True)
class RaceQuestion:
    """Question of a race: a message, or a text to continue."""

    text: str
    options: GenerationOptions
    is_chat: bool = True
    api_key: str | None = field(default=None, repr=False)
    """Key for a gateway that asks for one."""


QUESTION = RaceQuestion(
    "Write a short letter to a friend who wants to learn to cook. Give five tips and say why each one helps.",
    GenerationOptions(max_tokens=192, seed=3, temperature=0.0),
)
STORY = RaceQuestion(
    "Once upon a time there was a", GenerationOptions(max_tokens=128, seed=3, temperature=0.7), is_chat=False
)


async def race(address: str, question: RaceQuestion) -> None:
    """Streams the answer with speculation, answers again without, and says what differed.

    Raises what the gateway answered, and PeerLost when there is no answer.
    """
    turns = []
    async with AsyncClient(address, api_key=question.api_key) as client:
        for speculates in (True, False):
            note(f"{'With' if speculates else 'Without'} speculation: {question.text}")
            # Each reads its prompt itself: with a salt of its own it does not find what the other one cached.
            changes = GenerationOptions(cache_salt=secrets.token_hex(8), speculation=Speculation(enabled=speculates))
            options = GenerationOptions(**{**question.options, **changes})
            turn, view = ChatTurn(question.text, options["seed"] or 0), choose_view(as_json=False)
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
            turns.append(turn)
    note(verdict(*turns))


def verdict(fast: ChatTurn, plain: ChatTurn) -> str:
    """Whether the token ids are the same, and how long both took; a stopped race has no result."""
    if fast.result is None or plain.result is None:
        return "No result: both answers must end by themselves to be compared."
    own_us, other_us = fast.result.total_us, plain.result.total_us
    speed = (
        f"{other_us / own_us:.2f} times as fast: {own_us / 1e6:.2f} s with speculation, {other_us / 1e6:.2f} s without."
    )
    if fast.result.speculation.draft_tokens == 0:
        speed += " Neither answer had any guesses, so what differs in time is the machine's."
    pairs = zip_longest(_token_ids(fast), _token_ids(plain))
    place = next((index for index, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
    rule = fast.result.acceptance.rule
    if place is None:
        head = "Identical token for token" if rule is Rule.MATCH else "The same this time"
        return f"{head}: {plain.result.completion_tokens} tokens. {speed}"
    if rule is not Rule.MATCH:
        reason = f"The rule {rule} does not promise the same tokens; only match does."
    elif len({*fast.result.numerics_ids, *plain.result.numerics_ids}) > 1:
        reason = "The answers were computed in different ways; then only the distribution is promised."
    else:
        reason = "Under match on the same numerics this must not happen: please report it."
    return f"Differs at token {place}. {reason} {speed}"


def _token_ids(turn: ChatTurn) -> list[int]:
    return [token.token_id for event in turn.rounds for token in event.tokens]
