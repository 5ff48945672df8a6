"""How many rows of each feed a step computes: all of those that run, then prompts, first come, first served.

Prompts that share a device evenly all finish late; one after the other, the mean time to a first token is half as long.
While others run, a step has as many rows of prompts as make it about half as long again (chunked prefill beside
decoding, Agrawal et al., 2024, Sarathi-Serve, arXiv 2403.02310). How many these are is measured: some on a CPU,
hundreds where reading the weights outweighs computing. It decides which rows go together, and never what a row
computes.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from statistics import median

from outrider.engine.batching import Feed
from outrider.engine.cache import BLOCK_SIZE
from outrider.engine.session import Session
from outrider.estimates.row_costs import NUM_SAMPLES, Line, RecentMedian

# Of prompts in every step but for those that measure the others, so that reading comes to an end whatever is measured.
MIN_PROMPT_ROWS = 4
# How long a step with rows of prompts may take, in steps without.
MAX_SLOWDOWN = 1.5
# For whose rows it pays to wait for a forward more; two prompts of one template begin alike for some ten tokens.
COMMON_TOKENS = 64
# Of so many steps one has no rows of prompts, while others run, and shows how long such a step takes now.
PROBE_STEPS = 16
# A session that waits for its draft, or for its client, has no part in some steps, and is running all the same.
GRACE_STEPS = 64
LEAST_S = 1e-6
# What is left of a step without prompts after another, how far off one of them counts at most, and squared rows for
# which it is believed at first that more rows take no longer.
SHARES_MEMORY, MOST_SURPRISE, ROWS_WEIGHT = 0.98, 2.0, 8.0


def share_rows(
    feeds: Sequence[Feed], max_rows: int, max_prefix_rows: int, max_prompt_rows: int | None = None
) -> list[int]:
    """Rows that each feed gets of a forward of max_rows: all it needs, or a part of its committed tokens, or none.

    Feeds that are no prompts go first, and with them a few rows of the first prompt, the one that waited longest before
    the others; so none starves. Of max_prompt_rows the owners of prompts have equal shares, and of a share, and of what
    is left of others, the prompt that arrived first gets all that it can use; of several that came at once the first
    feed. A tree is never divided from the last committed token, whose logits it continues. At most max_prefix_rows are
    granted of which feeds want the logits besides, because logits are large.
    """
    needs = [feed.num_rows for feed in feeds]
    prefixes = [feed.num_prefix(need) if feed.wants_prefix else 0 for feed, need in zip(feeds, needs, strict=True)]
    prompts = [index for index, feed in enumerate(feeds) if feed.is_prompt]
    left, prefix_left = max_rows, max_prefix_rows
    prompt_left = max_rows if max_prompt_rows is None else min(max_prompt_rows, max_rows)
    if sum(needs) <= left and sum(prefixes) <= prefix_left and sum(needs[index] for index in prompts) <= prompt_left:
        return needs
    grants = [0] * len(feeds)

    def grant(index: int, num_more: int) -> int:
        """Grants up to so many rows more; returns how many."""
        nonlocal left, prefix_left, prompt_left
        feed, granted = feeds[index], grants[index]
        total = granted + min(num_more, left, prompt_left if feed.is_prompt else left)
        room = feed.num_prefix(granted) + prefix_left
        total = total if prefixes[index] <= room else min(total, room)
        undivided = feed.num_committed - 1 if feed.num_proposed else feed.num_committed
        num_more = max((needs[index] if total >= needs[index] else min(total, undivided)) - granted, 0)
        grants[index] += num_more
        left -= num_more
        prompt_left -= num_more if feed.is_prompt else 0
        prefix_left -= feed.num_prefix(grants[index]) - feed.num_prefix(granted)
        return num_more

    queues: dict[object, list[int]] = {}
    for index in sorted(prompts, key=lambda index: feeds[index].session.arrival):
        queues.setdefault(feeds[index].session.owner, []).append(index)
    heads = [queue[0] for queue in queues.values()]
    steps = [index for index, feed in enumerate(feeds) if not feed.is_prompt]
    waiting = {index: feeds[index].session for index in (*steps, *heads)}
    for index in sorted(waiting, key=lambda index: max(waiting[index].last_forward, waiting[index].arrival)):
        grant(index, MIN_PROMPT_ROWS if feeds[index].is_prompt else needs[index])
    share = (prompt_left + sum(grants[index] for index in heads)) // max(len(queues), 1)
    for limit in (share, max_rows):
        for queue in queues.values():
            for index in queue:
                grant(index, limit - sum(grants[each] for each in queue))
    return grants


class ReadOnce:
    """Sessions that are about to read the same tokens: one reads, and the others take what it has cached of them.

    For the sessions of one step, in the order in which they are asked about.
    """

    def __init__(self) -> None:
        self._begun: set[Hashable] = set()

    def waits(self, session: Session) -> bool:
        """Whether one of those that have begun reads what it would; before, it takes what others have published."""
        if len(session) - session.cached_len > BLOCK_SIZE:
            session.take_prefix()
        return session.coming(COMMON_TOKENS) in self._begun

    def begin(self, session: Session) -> None:
        """It has a part in the step."""
        coming = session.coming(COMMON_TOKENS)
        if coming is not None:
            self._begun.add(coming)


class PlainSteps:
    """Seconds of steps without rows of prompts, by how many rows they have: not all sessions have a part in each.

    What the latest took decides, whatever rows these had, so that a new load is followed at once; how much longer a
    step with more rows takes is learnt from all, and slowly, so that one that a busy machine made slow says little.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=NUM_SAMPLES)
        self._shares = Line(SHARES_MEMORY)  # of the scale, which all of them have in common

    @property
    def known(self) -> bool:
        return bool(self._latest)

    def add(self, rows: int, seconds: float) -> None:
        """Adds what a step with so many rows, and none of prompts, took."""
        # By a coarse clock it may have taken none.
        seconds = max(seconds, LEAST_S)
        share = 1.0
        if self._latest:
            expected = self._share(rows)
            share = min(max(seconds / self._scale(), expected / MOST_SURPRISE), MOST_SURPRISE * expected)
        self._shares.add(rows, share)
        self._latest.append((rows, seconds))

    def at(self, rows: int) -> float:
        """Expected seconds of a step; some must be known."""
        return self._scale() * self._share(rows)

    def _scale(self) -> float:
        return median([seconds / self._share(rows) for rows, seconds in self._latest])

    def _share(self, rows: int) -> float:
        mean_rows, mean = self._shares.means
        return max(mean + self._shares.slope(0.0, ROWS_WEIGHT) * (rows - mean_rows), mean / MOST_SURPRISE)


class ForwardPace:
    """Says how many rows of prompts a step may have, so that those who run keep their pace.

    Belongs to the device thread, and measures from `begin` to `end`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, most_steps: float = 1.0) -> None:
        """Takes a clock that counts seconds.

        Who runs may have to wait for more than these steps, as a draft's sessions do for the target's: what one may
        take is then a share of the time since the last one with rows of prompts, as if so many steps were made in it at
        most.
        """
        self._clock = clock
        self._most_steps = most_steps
        self._read_s = -math.inf  # when the last step with rows of prompts began
        self._started_s = 0.0
        self._prompts: list[bool] = []
        self._rows = MIN_PROMPT_ROWS
        self._steps_since_probe = 0
        # Seconds of steps without prompts by their rows, because not all sessions have a part in each; of others those
        # that a row of a prompt adds.
        self._plain_s, self._row_s = PlainSteps(), RecentMedian()
        self._num_step_rows = 0
        self._recent: deque[list[Session]] = deque(maxlen=GRACE_STEPS)

    def begin(self, feeds: Sequence[Feed], max_rows: int) -> int:
        """The most rows of prompts in a step of these feeds: max_rows while no other session runs.

        Else it is at least MIN_PROMPT_ROWS, or 0 where others are in the step, to learn how long it takes without.
        """
        self._prompts = [feed.is_prompt for feed in feeds]
        pairs = list(zip(feeds, self._prompts, strict=True))
        reading = {feed.session for feed, is_prompt in pairs if is_prompt}
        steps = [feed.session for feed, is_prompt in pairs if not is_prompt]
        # Beside prompts alone those who run wait for their next step.
        # The last few tokens of a prompt are read beside those who run, and are no rows of theirs.
        own_rows = [feed.num_rows - max(feed.num_committed - 1, 0) for feed, is_prompt in pairs if not is_prompt]
        self._num_step_rows = sum(own_rows) or self._num_step_rows
        self._recent.append(steps)
        self._started_s = self._clock()
        # Who has ended, or has to read again what it has lost, is not waited for.
        running = (each for sessions in self._recent for each in sessions if each.cached_len and each not in reading)
        if not reading or not any(running):
            return max_rows
        if steps and (not self._plain_s.known or self._steps_since_probe >= PROBE_STEPS):
            return 0
        if self._row_s.known:
            plain_s, row_s = self._plain_s.at(self._num_step_rows), self._row_s.mean
            round_s = (self._started_s - self._read_s) / MAX_SLOWDOWN
            allowed_s = (MAX_SLOWDOWN - 1) * max(plain_s, min(round_s, self._most_steps * plain_s))
            # Not too much at once, because the first samples may be wrong.
            most = min(2 * self._rows, max_rows)
            self._rows = max(MIN_PROMPT_ROWS, most if row_s * most <= allowed_s else int(allowed_s / row_s))
        return self._rows

    def end(self, grants: Sequence[int], num_steps: int = 1) -> float:
        """Learns from the step that was begun, or several in one call, of whose feeds so many rows were computed first.

        Returns the seconds of a step.
        """
        seconds = (self._clock() - self._started_s) / num_steps
        num_rows = sum(grant for grant, is_prompt in zip(grants, self._prompts, strict=True) if is_prompt)
        if sum(grants) == num_rows:
            # Only prompts: what a step costs without them cannot be separated from what they cost.
            return seconds
        if num_rows == 0:
            self._plain_s.add(self._num_step_rows, seconds)
            self._steps_since_probe = 0
        else:
            self._steps_since_probe += 1
            self._read_s = self._started_s
            if self._plain_s.known:
                self._row_s.add((seconds - self._plain_s.at(self._num_step_rows)) / num_rows)
        return seconds
