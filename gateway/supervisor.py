"""Several gateways on the same addresses: the process that holds the ports, keeps workers alive and has all figures.

Workers know nothing of each other but what was used of the limits of keys. The kernel spreads connections over those
that listen, by a hash of their addresses, and a port without a worker refuses them. A worker that dies takes its own
connections along, and no others.
"""

import asyncio
import fcntl
import http.client
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Self

import structlog
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.settings import GatewaySettings
from outrider.process.children import (
    HOST,
    QUIET_GRPC,
    Change,
    Launch,
    RestartPolicy,
    ServiceFailed,
    State,
    Supervisor,
)
from outrider.process.metrics import ProcessFigures, new_registry, scraped, serve_metrics
from outrider.process.options import FileUnusable, secrets_of, words_of
from outrider.rpc.channels import hold

# Beside waiting for its services: imports, the tokenizer, the servers.
START_S = 60.0
# Beside what may take the grace to end: a worker closes its links, and cuts off REST's last connections.
STOP_S = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerFigures(Collector):
    """The figures of all workers, each series with its worker; of one that does not answer only that it does not."""

    places: Sequence[str]
    """HOST:PORT of each worker's metrics."""
    starts: Mapping[int, int]
    """Number of times that each has come to serve."""

    def collect(self) -> Iterable[Metric]:
        """Families of the metrics of all workers."""
        families: dict[str, Metric] = {}
        up = GaugeMetricFamily("outrider_worker_up", "Whether a worker answers.", labels=["worker"])
        restarts = CounterMetricFamily("outrider_worker_restarts", "Workers started again.", labels=["worker"])
        with ThreadPoolExecutor(len(self.places)) as pool:
            texts = list(pool.map(_figures, self.places))
        for number, text in enumerate(texts):
            up.add_metric([str(number)], text is not None)
            restarts.add_metric([str(number)], self.starts[number] - 1)
        found = {str(number): text_string_to_metric_families(text or "") for number, text in enumerate(texts)}
        for worker, own in (*found.items(), ("supervisor", ProcessFigures().collect())):
            for family in own:
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {"worker": worker, **sample.labels}, sample.value)
        return [*families.values(), up, restarts]


def _figures(place: str) -> str | None:
    try:
        return scraped(place)[0].decode()
    except (OSError, http.client.HTTPException):
        return None


@dataclass(slots=True)
class Workers:
    """A gateway of several workers; `start` starts them."""

    addresses: dict[str, str] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    _supervisor: Supervisor = field(init=False)
    _watching: "asyncio.Task[None]" = field(init=False)
    _life: AsyncExitStack = field(init=False)

    def __post_init__(self) -> None:
        # No worker is given up: the others serve on.
        policy = RestartPolicy(hopeless=frozenset())
        self._supervisor = Supervisor(_report, _pass_on, policy, self._observe)

    @property
    def address(self) -> str:
        return self.addresses["address"]

    @property
    def further_addresses(self) -> Mapping[str, str]:
        return {what: where for what, where in self.addresses.items() if what != "address"}

    async def start(self, settings: GatewaySettings) -> Self:
        """Takes the ports and starts the workers; returns when all of them serve.

        Raises AddressTaken, FileUnusable, and ServiceFailed with sentence and exit code of the first worker that fails.
        """
        async with AsyncExitStack() as undo:
            for what, listen in (("address", settings.listen), ("rest", settings.rest_listen)):
                if listen:
                    self.addresses[what], held = hold(listen)
                    undo.enter_context(held)
            registry = new_registry()
            metrics = serve_metrics(settings.metrics_listen or f"{HOST}:0", registry)
            undo.push_async_callback(metrics.stop)
            if settings.metrics_listen:
                self.addresses["metrics"] = metrics.address
                log.info("serving metrics", address=metrics.address)
            undo.push_async_callback(self._supervisor.stop_together, 0.0)
            usage = ""
            if settings.api_keys and not settings.key_store:
                # A folder under a lock that keeps it from who tidies up temporary files.
                try:
                    usage = undo.enter_context(TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True))
                    opened = os.open(usage, os.O_RDONLY | os.O_DIRECTORY)
                    undo.callback(os.close, opened)
                    fcntl.flock(opened, fcntl.LOCK_SH)
                except OSError as error:
                    what = "Workers count together what keys have used, in a folder for temporary files"
                    advice = "Set TMPDIR to a folder that can be written."
                    raise FileUnusable(f"{what}: {error.strerror}. {advice}") from None
            launches = [self._launch(settings, number, metrics.address, usage) for number in range(settings.workers)]
            try:
                await self._supervisor.start(*launches)
            except ServiceFailed as failure:
                raise ServiceFailed(failure.said or failure.message, failure.code) from None
            places = [self._supervisor.addresses(launch.name)["metrics"] for launch in launches]
            # Not before they serve: a registry asks once what names there are.
            registry.register(WorkerFigures(places, self.starts))
            self._life = undo.pop_all()
        self._watching = asyncio.create_task(self._supervisor.watch(), name="workers")
        return self

    async def stop(self, grace_s: float) -> None:
        """Drains all workers at once, each as a gateway does; what is left of them after the grace is killed."""
        self._watching.cancel()
        await asyncio.wait({self._watching})
        await self._supervisor.stop_together(grace_s + STOP_S)
        await self._life.aclose()

    def kill(self) -> None:
        """Ends all workers at once."""
        self._supervisor.kill()

    def _launch(self, settings: GatewaySettings, number: int, figures: str, usage: str) -> Launch:
        # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
        command = (sys.executable, "-P", "-m", "gateway.worker_process", "--number", str(number))
        return Launch(
            f"worker {number}",
            (*command, "--figures", figures, "--usage", usage, *words_of(settings)),
            self.address,
            settings.target_wait_seconds + settings.draft_wait_seconds + START_S,
            {"rest": self.addresses.get("rest", ""), "metrics": f"{HOST}:0"},
            secrets_of(settings),
            # Whom gRPC refuses in a handshake it says itself.
            defaults={} if settings.tls_cert else QUIET_GRPC,
            shares_port=True,
        )

    def _observe(self, change: Change) -> None:
        if change.state is State.SERVING:
            self.starts[int(change.service.split()[-1])] += 1


def _report(sentence: str) -> None:
    # Not log.warning itself: that would be bound before logs are set up.
    log.warning(sentence)


def _pass_on(_name: str, line: str) -> None:
    sys.stderr.write(f"{line}\n")
