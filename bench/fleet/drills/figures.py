"""What a drill has shown, counted from the answers of its streams. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TypeAlias

from bench.fleet.drills.streams import DrillAnswer
from outrider.cli.bench.load.summary import percentile

WINDOW_S, STEP_S = 1.0, 0.25  # of the figures by time
DIP_S = 5.0  # in which a fall is one for what happened, and no chance of the streams
LEAST_GAPS = 4  # of a stream, of which fewer have no usual round
FAIR = 0.8  # of an equal share of the sessions
BACK = 0.95  # of what is expected
TARGETS = 4
NEWCOMER = f"target {TARGETS + 1}"


class Drill(StrEnum):
    """What happens to a service under load, to a target unless a draft is named."""

    KILLED = "killed"
    STOPPED = "stopped"
    CUT_OFF = "cut-off"
    DRAINED = "drained"
    JOINED = "joined"
    DRAFT_KILLED = "draft-killed"
    DRAFTS_JOINED = "drafts-joined"
    ROLLED = "rolled"

    @property
    def is_loss(self) -> bool:
        """Whether a target is lost."""
        return self in {Drill.KILLED, Drill.STOPPED, Drill.CUT_OFF, Drill.DRAINED}

    @property
    def hurt(self) -> Sequence[str]:
        """Services that are to be replaced afterwards, the first of which it happens to first."""
        if self is Drill.ROLLED:
            return [f"target {number + 1}" for number in range(TARGETS)]
        return ["target 1"] if self.is_loss else ["draft 1"] if self is Drill.DRAFT_KILLED else []


Extremes: TypeAlias = tuple[float, float, float]
"""p50, p99 and the most of some values; zeros where there are none."""


def extremes(values: Iterable[float]) -> Extremes:
    found = list(values) or [0.0]
    return percentile(found, 0.5), percentile(found, 0.99), max(found)


@dataclass(frozen=True, slots=True)
class DrillRun:
    """A drill and all that was seen of it."""

    drill: Drill
    answers: Sequence[DrillAnswer]
    at_s: float
    """When it happened, by the clock of the answers."""
    before_s: float
    """For how long before that the streams are looked at, in their usual state."""
    after_s: float
    cpus: float
    """Share of all CPUs that our processes used before that."""
    load_average: float
    reopened: Sequence[str]
    """Where sessions went that had been at another target."""
    sessions: Sequence[tuple[float, Mapping[str, float]]] = ()
    """Sessions of each target at some moments since then."""

    @property
    def failed(self) -> list[str]:
        """Errors of the requests that failed."""
        return [each.error for each in self.answers if each.error]

    def differing(self, plain: Mapping[int, Sequence[int]]) -> list[int]:
        """Numbers of the requests whose tokens are not those of plain decoding, as far as they came."""
        return [each.number for each in self.answers if plain[each.number][: len(each.token_ids)] != each.token_ids]

    @property
    def pauses_s(self) -> list[float]:
        """The longest pause of each stream whose session was opened again."""
        return [max(found) for each in self.answers if (found := each.pauses(self.at_s))]

    @property
    def hurt_rounds(self) -> list[float]:
        """These pauses as numbers of the stream's usual rounds."""
        return [
            max(found) / usual
            for each in self.answers
            if (found := each.pauses(self.at_s)) and (usual := self._usual_s(each))
        ]

    def longest_rounds(self, from_s: float) -> list[float]:
        """The longest gap of each stream that was not hurt over its usual one, from a moment on, as long as before."""
        until_s = from_s + self.before_s
        return [
            max(gaps) / usual
            for each in self.answers
            if each.runs_at(from_s) and not each.pauses(self.at_s)
            if (gaps := each.gaps(from_s, until_s)) and (usual := self._usual_s(each))
        ]

    def _usual_s(self, answer: DrillAnswer) -> float:
        gaps = answer.gaps(0.0, float("inf"))
        return median(gaps) if len(gaps) >= LEAST_GAPS else 0.0

    @property
    def began_s(self) -> float:
        """Since when the streams are looked at."""
        return self.at_s - self.before_s

    @property
    def ended_s(self) -> float:
        return self.at_s + self.after_s

    def rate(self, from_s: float, until_s: float) -> float:
        """Tokens a second of all streams."""
        rounds = (each for answer in self.answers for each in answer.rounds if from_s < each.at_s <= until_s)
        return sum(each.tokens for each in rounds) / (until_s - from_s)

    def tokens_a_round(self, from_s: float, until_s: float) -> float:
        """Tokens of a round after the first of each answer; 0 where there are none."""
        counts = [each.tokens for answer in self.answers for each in answer.rounds[1:] if from_s < each.at_s <= until_s]
        return sum(counts) / max(len(counts), 1)

    def fallbacks(self) -> Counter[str]:
        """Rounds without guesses that should have had some, by reason, since it happened."""
        rounds = (each for answer in self.answers for each in answer.rounds if each.at_s > self.at_s)
        return Counter(each.fallback for each in rounds if each.fallback)

    def least(self, figure: Callable[[float, float], float]) -> float:
        """The least of a figure in any second since it happened."""
        return min(each for _, each in self._series(figure))

    def back_s(self, figure: Callable[[float, float], float], level: float) -> float | None:
        """From when on a second has BACK of a level, after the first one within DIP_S that has not; None: never."""
        series = self._series(figure)
        low = next((at_s for at_s, each in series if at_s < DIP_S and each < BACK * level), None)
        if low is None:
            return 0.0
        return next((at_s for at_s, each in series if at_s > low and each >= BACK * level), None)

    def _series(self, figure: Callable[[float, float], float]) -> list[tuple[float, float]]:
        num_steps = int((self.after_s - WINDOW_S) / STEP_S)
        starts = [STEP_S * step for step in range(num_steps + 1)]
        return [(each, figure(self.at_s + each, self.at_s + each + WINDOW_S)) for each in starts]

    def first_tokens_s(self, from_s: float, until_s: float) -> Extremes:
        """Seconds to the first token of requests that were asked within a time."""
        asked = [each for each in self.answers if each.rounds and from_s < each.asked_s <= until_s]
        return extremes(each.rounds[0].at_s - each.asked_s for each in asked)

    @property
    def renewed(self) -> list[tuple[int, float]]:
        """Requests that were asked while 0, 1, ... of the targets had been replaced by some of other weights, and the
        share of them that these answered.
        """
        step_s, found = self.after_s / TARGETS, []
        hashes = [each.model_hash for each in self.answers if each.model_hash]
        for number in range(TARGETS + 1):
            from_s = self.at_s + step_s * (number - 1) if number else self.began_s
            until_s = self.at_s + step_s * number
            asked = [each.model_hash for each in self.answers if from_s < each.asked_s <= until_s and each.model_hash]
            others = sum(each != hashes[0] for each in asked)
            found.append((len(asked), others / max(len(asked), 1)))
        return found

    @property
    def spread(self) -> float:
        """Most of the reopened sessions at one target over the mean of those that are left; 0 where there are none."""
        return max(Counter(self.reopened).values(), default=0) * (TARGETS - 1) / max(len(self.reopened), 1)

    @property
    def shares(self) -> list[tuple[float, float]]:
        """The newcomer's sessions over an equal share, by the seconds since it came."""
        return [
            (at_s, len(found) * found.get(NEWCOMER, 0.0) / max(sum(found.values()), 1.0))
            for at_s, found in self.sessions
        ]

    @property
    def fair_s(self) -> float | None:
        """When the newcomer first had a fair share; None where it never had."""
        return next((at_s for at_s, share in self.shares if share >= FAIR), None)
