"""Serve deployments whose replicas each hold one ordinary process of a service: Ray places, restarts and scales them.

No request goes through Ray, and neither gateway nor services know of it. This runs where Ray is installed, which need
not be where Outrider is: a holder starts a command, and asks its process for figures as Prometheus does.
"""

import asyncio
import fcntl
import json
import math
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext
from ray.util import get_node_ip_address

SCRAPE_S = 2.0
# Not by the proxy that the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
FIGURES = {"backlog_seconds", "cache_share", "busy_share"}
BACKLOG, CACHE, BUSY = "outrider_backlog_seconds", "outrider_kv_cache_usage_perc", "outrider_device_busy_seconds_total"


class Held(BaseModel, extra="forbid"):
    """What each replica of a deployment holds."""

    command: list[str] = Field(min_length=1)
    """A service, as `python -m target_service`; its addresses are added."""
    ports: list[int] = Field(min_length=1)
    """Each process listens on one of them that no other holder on its node has, so no more replicas fit on a node."""
    host: str = "127.0.0.1"
    environment: dict[str, str] = {}
    """Variables of the process, beside those of its replica."""
    addresses: str = ""
    """File in which gateways find the address of each process that serves, by --target file:PATH; empty for none."""


def lock_port(ports: list[int]) -> tuple[int, int]:
    """A port and the descriptor of its lock, held while a process has the descriptor. Raises RuntimeError for none."""
    for port in ports:
        lock = os.open(Path(tempfile.gettempdir()) / f"outrider-port-{port}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return port, lock
    raise RuntimeError(f"another holder on this node has each of the ports {ports}")


def list_address(file: str, address: str, *, serves: bool) -> None:
    """Takes an address into a file of addresses, or out of it; readers find the file before or the one after."""
    if not file:
        return
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = Path(file).read_text(encoding="utf-8").splitlines() if Path(file).exists() else []
        found = [each for each in known if each != address] + [address] * serves
        Path(f"{file}.new").write_text("".join(f"{each}\n" for each in found), encoding="utf-8")
        Path(f"{file}.new").replace(file)


class Holder:
    """One process: it serves when the replica has started, and has drained when the replica has ended in order.

    However the replica ends, so does the process, with its stdin. A replica whose process has ended is unhealthy, and
    Serve puts another one in its place.
    """

    def __init__(self, held: Held) -> None:
        """Returns when the process serves, which takes as long as a model loads. Raises RuntimeError when it ends."""
        port, lock = lock_port(held.ports)
        where = ("--listen", f"{held.host}:{port}", "--metrics-listen", "127.0.0.1:0", "--stop-with-stdin")
        # A process that outlives its replica for the time of its drain still has the port, and so the lock.
        self._process = subprocess.Popen(
            [*held.command, *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **held.environment},
            pass_fds=(lock,),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{held.command} ended with {self._process.wait()} before it served")
        self._metrics: str = json.loads(line)["metrics"]
        host = get_node_ip_address() if held.host == "0.0.0.0" else held.host
        self._list = partial(list_address, held.addresses, f"{host}:{port}")
        self._list(serves=True)
        self._busy_s, self._asked_s = 0.0, time.monotonic()

    def check_health(self) -> None:
        """Raises RuntimeError when the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the process ended with {self._process.returncode}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Seconds of backlog, share of the cache, and share of the time since the last call in which it computed."""
        figures = await asyncio.to_thread(self._scrape)
        busy_s, self._busy_s = figures[BUSY] - self._busy_s, figures[BUSY]
        now_s = time.monotonic()
        passed_s, self._asked_s = now_s - self._asked_s, now_s
        return {"backlog_seconds": figures[BACKLOG], "cache_share": figures[CACHE], "busy_share": busy_s / passed_s}

    def _scrape(self) -> Mapping[str, float]:
        query = "&".join(f"name[]={name}" for name in (BACKLOG, CACHE, BUSY))
        with OPENER.open(f"http://{self._metrics}/metrics?{query}", timeout=SCRAPE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {sample.name: sample.value for family in families for sample in family.samples}

    async def __del__(self) -> None:
        """Takes the address out of the file, and drains the process; after graceful_shutdown_timeout_s Ray ends both.

        A replica that is killed leaves it there, to its successor on that port.
        """
        await asyncio.to_thread(self._list, serves=False)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        await asyncio.to_thread(self._process.wait)


class ReplicasByLoad:
    """A policy: as many replicas as bring every figure of record_autoscaling_stats to its goal, on the mean of all.

    At most twice as many as there are, and one less than wanted before; Serve adds its delays and bounds.
    """

    def __init__(self, **goals: float) -> None:
        """Goals of figures by their names. Raises ValueError for another name, and for a goal that is not above 0."""
        if not goals or not goals.keys() <= FIGURES or min(goals.values()) <= 0:
            raise ValueError(f"policy_kwargs must be goals above 0 of some of {sorted(FIGURES)}, not {goals}")
        self._goals = goals

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be: as many as were wanted before, until figures have come."""
        found = {name: (ctx.aggregated_metrics or {}).get(name, {}).values() for name in self._goals}
        if not all(found.values()):
            return ctx.target_num_replicas, {}
        running = ctx.current_num_replicas
        wanted = max(
            math.ceil(running * sum(found[name]) / len(found[name]) / goal) for name, goal in self._goals.items()
        )
        return max(min(wanted, 2 * running), ctx.target_num_replicas - 1), {}


def app(held: Held) -> Application:
    """An application of one deployment, Holder; serve.yaml has its arguments."""
    return serve.deployment(Holder).bind(held)
