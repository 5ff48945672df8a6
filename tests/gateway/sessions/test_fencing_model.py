"""The real gateway and the real services in a world where messages and processes fail; see simulation.world.

A few hundred worlds at a time, the same every time; OUTRIDER_FENCING_EXAMPLES asks for more, and then for other ones.
"""

import os
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from simulation.invariants import Broken, Client
from simulation.loop import Deadlock, Livelock
from simulation.models import Asked
from simulation.scenarios import rough_ways, scenarios
from simulation.world import Scenario, simulate

from gateway.sessions.link import Link
from gateway.sessions.target_opening import TargetOpening
from outrider.model_service.leases import LeaseTable
from outrider.parameters import Rule
from outrider.rpc.fencing import Fence, MessageStatus, SessionView, classify
from outrider.v1 import target_service_pb2 as pb

pytestmark = pytest.mark.early

USUAL_EXAMPLES = 250
EXAMPLES = int(os.environ.get("OUTRIDER_FENCING_EXAMPLES", USUAL_EXAMPLES))
PLANTED_EXAMPLES = 400

simulation_settings = partial(
    settings,
    database=None,
    derandomize=EXAMPLES == USUAL_EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


# At its end the leases of a target are swept at the very instant at which its device is looked at.
SWEPT_WHILE_LOOKED_AT = Scenario(
    clients=(
        Client(Asked(prompt=0, seed=0, max_tokens=4), None, Rule.RATIO, starts_s=0.1, cancel_at=4),
        Client(Asked(prompt=3, temperature=0.8, seed=0, max_tokens=12), None, starts_s=0.1),
        Client(Asked(prompt=3, temperature=0.8, max_tokens=12), 1, deadline_s=5.0, dawdle_s=0.05),
        Client(Asked(prompt=2, temperature=0.8, seed=0, max_tokens=24), 0, starts_s=0.1, cancel_at=44),
    ),
    storm=0.1,
    storm_places=("target-a", "target-b", "draft"),
    seed=44908941,
    hosts=("target-a",),
    branches=4,
)
# Here so too, and the process whose leases they are gets no turn meanwhile.
SWEPT_LATER_THAN_LOOKED_AT = Scenario(
    clients=(Client(Asked(prompt=0, temperature=0.8, seed=2, max_tokens=12), 4, starts_s=0.01, cancel_at=52),),
    storm=0.3,
    storm_places=("target-a", "target-b", "draft"),
    seed=9,
    kv_tokens=64,
    hosts=("target-a", "target-b"),
)


# The usual worlds take up to forty seconds beside other tests.
@pytest.mark.timeout(240)
@simulation_settings(max_examples=EXAMPLES)
@given(scenarios)
@example(SWEPT_WHILE_LOOKED_AT)
@example(SWEPT_LATER_THAN_LOOKED_AT)
def test_no_weather_changes_a_token_or_leaves_anything_behind(scenario: Scenario) -> None:
    """Tokens are those of plain decoding, every request ends once, and no session, block or task is left."""
    simulate(scenario)


def taking_repetitions(
    fence: Fence, known: SessionView | None, num_new: int = 0, *, is_owner: bool = True
) -> MessageStatus:
    """A classifier that takes a repeated message for a new one."""
    status = classify(fence, known, num_new, is_owner=is_owner)
    return MessageStatus.CURRENT if status is MessageStatus.REPEAT else status


async def receive_in_order(self: TargetOpening, until_s: float) -> pb.VerifyResponse:
    """A gateway that takes the next message for the answer, whatever it is about."""
    response = await self.read(until_s)
    self.is_opening = False
    response.fence.base_len = len(self._log)
    return response


def end_silently(self: Link, session_id: bytes, mailbox: object, close: object) -> None:
    """A gateway that forgets a session without a word to the service."""
    self._mailboxes.pop(session_id, None)


def free_nothing(self: LeaseTable[object]) -> float:
    """A table in which no lease ends."""
    return self.lease_s


PLANTS = {
    "a session ends without a word": ("gateway.sessions.link.Link.detach", end_silently),
    "the target takes repetitions": ("target_service.sessions.classify", taking_repetitions),
    "the gateway matches by order": ("gateway.sessions.target_opening.TargetOpening.receive", receive_in_order),
    "no lease ends": ("outrider.model_service.leases.LeaseTable.sweep", free_nothing),
    "a close frees no blocks": ("outrider.engine.session.Session.free", lambda self: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that breaks its invariants does not go unnoticed for long."""
    monkeypatch.setattr(*PLANTS[plant])

    @simulation_settings(max_examples=PLANTED_EXAMPLES, phases=(Phase.generate,), report_multiple_bugs=False)
    @given(rough_ways | scenarios | rough_ways)
    def search(scenario: Scenario) -> None:
        simulate(scenario)

    with pytest.raises((Broken, Deadlock, Livelock)):
        search()
