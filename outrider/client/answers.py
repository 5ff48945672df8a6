"""Whole answers, and how events become one. Knows no protobuf and no connection."""

from collections import defaultdict
from dataclasses import dataclass

from outrider.client.events import Event, PromptToken, Result, Round, Token
from outrider.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a request, and how it came about."""

    rounds: tuple[Round, ...]
    result: Result

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(each.text for each in self.rounds) + self.result.text

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The output's tokens."""
        return tuple(token for each in self.rounds for token in each.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Their ids, an end-of-sequence or stop token included."""
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """All samples of a request, in order of their index; the properties are about the first."""

    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """What the first sample says."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's token ids."""
        return self.samples[0].token_ids

    @property
    def result(self) -> Result:
        """The first sample's last event: why it ended, its seed, its figures."""
        return self.samples[0].result

    @property
    def prompt(self) -> tuple[PromptToken, ...]:
        """The prompt's tokens, where the request asked for an echo."""
        return tuple(token for each in self.samples[0].rounds for token in each.prompt)


class Transcript:
    """Keeps the events of a request, in the order in which they came."""

    def __init__(self) -> None:
        self._rounds: defaultdict[int, list[Round]] = defaultdict(list)
        self._results: dict[int, Result] = {}

    def add(self, event: Event) -> Event:
        """Keeps an event and returns it."""
        if isinstance(event, Round):
            self._rounds[event.sample_index].append(event)
        else:
            self._results[event.sample_index] = event
        return event

    @property
    def is_whole(self) -> bool:
        """Whether every sample that began has ended, and there was one."""
        return bool(self._results) and self._rounds.keys() <= self._results.keys()

    def answer(self) -> Answer:
        """The samples that came. Raises ProtocolViolation unless they are whole."""
        if not self.is_whole:
            raise ProtocolViolation("The gateway ended the call before the answer had ended.")
        samples = (Sample(tuple(self._rounds[index]), self._results[index]) for index in sorted(self._results))
        return Answer(tuple(samples))
