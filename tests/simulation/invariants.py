"""What holds in any weather. Pure: judges what clients got, by what plain decoding says and by what went wrong.

A token is what plain decoding says, none is lost or doubled, a request ends once, and gives up only when no target was
left in peace for as long as it has to look for one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from simulation.models import PROMPTS, Asked, plain_decoding

from outrider.parameters import Rule
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

CALM_S = 15.0
"""A target that was left in peace for so long leaves a request no reason to give up."""


DEFAULT = Asked()


class Broken(AssertionError):
    """An invariant does not hold."""


def hold(condition: object, otherwise: str) -> None:
    """Raises Broken unless a condition holds."""
    if not condition:
        raise Broken(otherwise)


@dataclass(frozen=True, slots=True)
class Client:
    """A request and how its client behaves. draft_count None leaves K to the gateway."""

    asked: Asked = DEFAULT
    draft_count: int | None = 4
    greedy_rule: Rule = Rule.MATCH
    """What decides at temperature 0, where all exact rules say the same; elsewhere only `match` promises tokens."""
    starts_s: float = 0.0
    cancel_at: int | None = None
    """Await point of the gateway's handler, counted from 0, at which the client leaves."""
    deadline_s: float | None = None
    """The client's own deadline."""
    dawdle_s: float = 0.0
    """How long the client takes over each message."""


@dataclass(slots=True)
class Outcome:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """base_len and number of tokens of each."""
    completion: pb.Completion | None = None
    status: str = ""
    """Name of the status that ended the call."""
    details: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0

    def take(self, message: pb.GenerateResponse) -> None:
        """Notes a message; raises Broken after the completion."""
        hold(self.completion is None, "a message came behind the completion")
        if message.HasField("completion"):
            self.completion = message.completion
            return
        token_ids = [token.token_id for token in message.round.tokens]
        self.rounds.append((message.round.facts.base_len, len(token_ids)))
        self.token_ids += token_ids


def check_tokens(client: Client, outcome: Outcome) -> None:
    """What came is the beginning of what plain decoding says, in rounds without a gap; raises Broken."""
    said, length = plain_decoding(client.asked), len(PROMPTS[client.asked.prompt])
    beginning = said[: len(outcome.token_ids)]
    hold(tuple(outcome.token_ids) == beginning, f"{outcome.token_ids} is no beginning of {said}, for {client}")
    for base_len, num_tokens in outcome.rounds:
        hold(base_len == length and num_tokens > 0, f"a round on {base_len} came at {length} tokens, for {client}")
        length += num_tokens


def check_end(client: Client, outcome: Outcome, excused: Collection[str], *, is_cut: bool) -> None:
    """The request ended with all tokens and a completion, or with an error that is excused; raises Broken.

    Only a connection that was cut may show a client an error after the completion.
    """
    if outcome.status != "OK":
        facts = f"{outcome.status} at {outcome.ended_s:.3f} s: {outcome.details}, for {client}"
        hold(outcome.completion is None or is_cut, f"an error behind the completion: {facts}")
        hold(outcome.status in excused, facts)
        return
    said, completion = plain_decoding(client.asked), outcome.completion
    hold(tuple(outcome.token_ids) == said, f"only {outcome.token_ids} of {said} came, for {client}")
    expected = types_pb2.FINISH_REASON_EOS if said[-1] == 0 else types_pb2.FINISH_REASON_LENGTH
    hold(completion is not None and completion.finish_reason == expected, f"a wrong completion: {completion}")
    hold(completion is not None and completion.usage.completion_tokens == len(said), f"a wrong count: {completion}")


def is_hopeless(
    spells: Sequence[tuple[float, float, str]], places: Collection[str], since_s: float, now_s: float
) -> bool:
    """Whether at none of the places there was a calm of CALM_S; a spell is its begin, its end and its place."""
    return all(longest_calm_s(spells, place, since_s, now_s) < CALM_S for place in places)


def longest_calm_s(spells: Sequence[tuple[float, float, str]], place: str, since_s: float, now_s: float) -> float:
    """Seconds of the longest time without a spell at a place."""
    longest_s, calm_since_s = 0.0, since_s
    for begin_s, end_s, where in sorted(spells):
        if where == place and begin_s < now_s:
            longest_s = max(longest_s, begin_s - calm_since_s)
            calm_since_s = max(calm_since_s, end_s)
    return max(longest_s, now_s - calm_since_s)
