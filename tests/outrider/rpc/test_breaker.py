"""When sessions leave a service alone, on a clock that tests move."""

from dataclasses import dataclass

from outrider.rpc.breaker import CircuitBreaker

LATE = TimeoutError()


@dataclass
class Clock:
    """Seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def opened() -> tuple[CircuitBreaker, Clock]:
    """A breaker that two failures have opened at time 0."""
    clock = Clock()
    breaker = CircuitBreaker(2, (0.5, 10.0), clock)
    breaker.failed("a", LATE)
    assert not breaker.blocks("b")
    breaker.failed("b", LATE)
    return breaker, clock


def trial(breaker: CircuitBreaker, clock: Clock, cost_s: float = 0.0) -> float:
    """Waits for the next trial, which fails; returns how long it had to wait."""
    begun_s = clock.now_s
    while breaker.blocks("trial"):
        clock.now_s += 0.25
    breaker.enter("trial")
    breaker.failed("trial", LATE, cost_s)
    return clock.now_s - begun_s


def test_failures_in_a_row_open_it() -> None:
    """Every session is blocked, and the reason is there to be named; an answer in between keeps it closed."""
    breaker, _ = opened()
    assert breaker.blocks("a")
    assert breaker.blocks("c")
    assert breaker.cause is TimeoutError
    calm = CircuitBreaker(2, (0.5, 10.0))
    for _ in range(5):
        calm.failed("a", LATE)
        calm.answered()
    assert not calm.is_open


def test_one_session_at_a_time_is_on_trial() -> None:
    """After the pause the first session that asks is let through, and the others wait for what it learns."""
    breaker, clock = opened()
    clock.now_s = 0.5
    breaker.enter("c")
    assert not breaker.blocks("c")
    assert breaker.blocks("d")
    breaker.answered()
    assert not breaker.blocks("d")
    assert not breaker.is_open


def test_pauses_double_to_the_longest() -> None:
    """A service that stays down is tried ever more seldom."""
    breaker, clock = opened()
    assert [trial(breaker, clock) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_dear_trials_are_rare() -> None:
    """Trials that cost a second each cost a twentieth of the time in the end."""
    breaker, clock = opened()
    assert [trial(breaker, clock, 1.0) for _ in range(8)][-2:] == [20, 20]


def test_sessions_that_had_asked_before_are_no_news() -> None:
    """A hundred sessions that fail at once count as one failure more than it takes."""
    breaker, clock = opened()
    for number in range(100):
        breaker.failed(number, LATE)
    assert trial(breaker, clock) == 0.5


def test_a_trial_that_is_left_lets_the_next_one_in() -> None:
    """A client that leaves in the middle of a trial does not keep the breaker open for ever."""
    breaker, clock = opened()
    clock.now_s = 0.5
    breaker.enter("c")
    breaker.left("d")
    assert breaker.blocks("d")
    breaker.left("c")
    assert breaker.blocks("d")
    clock.now_s = 1.0
    assert not breaker.blocks("d")


def test_a_flapping_service_rests_longer() -> None:
    """An answer only halves the pause; another incarnation of the service begins anew."""
    breaker, clock = opened()
    for _ in range(4):
        trial(breaker, clock)
    breaker.answered()
    for _ in range(2):
        breaker.failed("a", LATE)
    assert trial(breaker, clock) == 4
    breaker.renew()
    assert not breaker.blocks("a")
    for _ in range(2):
        breaker.failed("a", LATE)
    assert trial(breaker, clock) == 0.5
