"""The processes of a simulated world: real servicers over real sessions and engines, which die, stand still and return.

Every incarnation begins with an empty table and a whole pool, as a process does. Decides nothing about when.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog
from simulation.device import InlineDevice
from simulation.loop import VirtualLoop, context_of
from simulation.models import Weights
from simulation.transport import Network, Server
from simulation.weather import Fault, Kind

from draft_service.servicer import DraftServicer
from draft_service.sessions import DraftSessions
from outrider.drafters.hosted import HostedModel
from outrider.drafters.model_drafter import DRAFTERS, ModelDrafter
from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.model_service.link import LinkServicer
from outrider.model_service.outbox import Outboxes
from outrider.model_service.server import LoadedModel, describe
from outrider.model_service.servicer import model_service
from outrider.rpc.channels import Services
from target_service import states as target_states
from target_service.servicer import TargetServicer
from target_service.sessions import TargetSessions
from target_service.verifier import Verifier

STEPS_S = (0.0, 0.0005, 0.002)
GRACE_S = 5.0

log = structlog.get_logger()


class Process:
    """A draft or target service at one address, over all its incarnations."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        dice: random.Random,
        role: str,
        address: str,
        weights: Weights,
        kv_tokens: int,
        lease_s: float,
        *,
        hosted: Weights | None = None,
    ) -> None:
        """`hosted` is a draft model in a target's process, with a cache as large as the target's."""
        self.address = address
        self.role = role
        self._loop = loop
        self._network = network
        self._dice = dice
        self._weights = weights
        self._kv_tokens = kv_tokens
        self._lease_s = lease_s
        self._hosted = hosted
        self.hosted_runner: ModelRunner | None = None
        self.cuts_s: list[float] = []
        """When its connections broke."""
        self._num_starts = 0
        self._is_up = False
        self._is_draining = False
        self._is_healed = False
        self._measured_s = 0.0
        self.runner: ModelRunner
        self.table: LeaseTable[Any]
        self.device: InlineDevice
        self.server: Server
        self.servicer: LinkServicer[Any, Any]

    @property
    def hosts(self) -> tuple[str, str]:
        """The hosts of this incarnation: its loop and its device."""
        host = f"{self.address}#{self._num_starts}"
        return host, f"{host} device"

    async def start(self) -> None:
        """A new incarnation; without an effect while there is one."""
        if self._is_up:
            return
        self._is_up = True
        self._is_draining = False
        self._num_starts += 1
        host, device_host = self.hosts
        self.runner = self._weights.runner(self._kv_tokens)
        self.table = LeaseTable[Any](self._lease_s, clock=self._loop.time)
        outboxes = Outboxes()
        self.device = InlineDevice(self._loop, device_host, self._advance(), self._step_s, _complain, outboxes.flush)
        self.server = Server(self._loop, host)
        self.servicer, models = self._servicer(outboxes)
        for add in (*self.servicer.services.values(), *models.values()):
            add(self.server)  # type: ignore[arg-type]
        await self.server.guarded()
        self._network.listen(self.address, self.server)

    async def held(self) -> tuple[int, int, int]:
        """Sessions that are held, those of them that are leased, and active tasks.

        Counted by the device, between two jobs: seen from outside, a sweep of leases at that very instant is work.
        """
        table, device = self.table, self.device
        return await device.call(lambda: (len(table), table.num_leased, device.num_active))

    def strike(self, fault: Fault) -> None:
        """Lets a fault of a process happen, and end after its duration."""
        if not self._is_up:
            return
        if fault.kind in {Kind.KILL, Kind.KILL_AFTER}:
            self.kill(fault.duration_s)
        elif fault.kind is Kind.FREEZE:
            self._loop.freeze(self.hosts)
            self._later(fault.duration_s, partial(self._loop.thaw, self.hosts))
        elif fault.kind is Kind.HANG:
            self.device.hang()
            self._later(fault.duration_s, self.device.recover)
        elif fault.kind is Kind.DRAIN:
            self.server.accepts = False
            self._is_draining = True
            self.servicer.drain(min(fault.duration_s, GRACE_S))
            self._network.go_away(self.address)
            self._later(min(fault.duration_s, GRACE_S), partial(self._kill_if, self._num_starts, fault.duration_s))
        elif fault.kind is Kind.CUT:
            self.server.accepts = False
            self._cut()
            self._later(fault.duration_s, partial(self._accept_if, self._num_starts))

    def kill(self, absent_s: float) -> None:
        """The process is gone at once, and another starts after a while."""
        self._is_up = False
        self.server.accepts = False
        self._cut()
        self.device.kill()
        self._loop.thaw(self.hosts)
        for call in list(self.server.calls):
            call.leave()
        self._later(absent_s, self._restart)

    def heal(self) -> None:
        """Whatever was wrong is over for good; a process that is away is back soon."""
        self._is_healed = True
        self._loop.thaw(self.hosts)
        self.device.recover()
        self.server.accepts = self._is_up
        if not self._is_up:
            self._restart()
        elif self._is_draining:
            # It takes no sessions any more, and never will.
            self.kill(0.0)

    def _cut(self) -> None:
        self._network.cut(self.address)
        self.cuts_s.append(self._loop.time())

    def _restart(self) -> None:
        self._loop.create_task(self.start(), context=context_of(""))

    def _kill_if(self, num_starts: int, absent_s: float) -> None:
        if self._is_up and self._num_starts == num_starts and not self._is_healed:
            self.kill(absent_s)

    def _accept_if(self, num_starts: int) -> None:
        if self._is_up and self._num_starts == num_starts:
            self.server.accepts = True

    def _later(self, delay_s: float, happen: Callable[[], object]) -> None:
        self._loop.call_later(delay_s, happen, context=context_of(""))

    def _step_s(self) -> float:
        return self._dice.choice(STEPS_S)

    def _measure_s(self) -> float:
        """The clock of a step's pace: the dice say how long a step seems to take, and so how prompts are cut."""
        self._measured_s += self._step_s()
        return self._measured_s

    def _advance(self) -> Callable[[Any], None]:
        if self.role == "target":
            return Verifier(self.runner, self.table, self._measure_s).advance
        return ModelDrafter(self.runner, self.table.with_room, clock=self._measure_s).advance

    def _servicer(self, outboxes: Outboxes) -> tuple[LinkServicer[Any, Any], Services]:
        """The service of its role, and ModelService."""
        model, device = LoadedModel(self.runner, self._weights.vocabulary), cast("DeviceWorker[Any]", self.device)
        if self.role == "target":
            window = target_states.UNACKNOWLEDGED_WINDOW
            hosted = []
            if self._hosted is not None:
                self.hosted_runner = self._hosted.runner(self._kv_tokens)
                hosted = [HostedModel(self.hosted_runner)]
            drafters = {each.name: each.rules for each in hosted}
            trees = frozenset(each.name for each in hosted if each.makes_trees)
            facts = replace(
                describe("target", model), unacknowledged_window=window, drafters=drafters, tree_drafters=trees
            )
            targets = TargetSessions(self.runner, self.table, self.device.submit, drafters=hosted)
            return TargetServicer(facts, targets, device, outboxes), model_service(facts, targets, device)
        facts = replace(describe("draft", model), drafters=DRAFTERS, branch_drafters=frozenset(DRAFTERS))
        drafts = DraftSessions(self.runner, self.table, self.device.submit)
        return DraftServicer(facts, drafts, device, outboxes), model_service(facts, drafts, device)


def _complain(error: BaseException) -> None:
    log.error("a batch failed", error=repr(error))
