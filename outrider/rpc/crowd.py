"""Connections of a server of gRPC, which itself only counts them: one that has asked for nothing makes room.

There is no way to end a connection in gRPC's own API, so it is found among the process's descriptors, by both of its
addresses, and shut down; gRPC sees its client leave. Where the system does not list descriptors, none makes room.
"""

import asyncio
import ipaddress
import os
import resource
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

import structlog

log = structlog.get_logger()

# Of the descriptors that the process may have, the connections to one port have a quarter: the rest is for the other
# ports, links, files, and those that are just being closed. More than the most would be memory for nothing.
SHARE, MOST = 4, 2048
# How often is looked whether a port is full, and while it is.
CALM_S, FULL_S = 1.0, 0.1
# A port is full from here on, and then gets so much room, in eighths of what it takes.
FULL, ROOMY = 7, 6
LOG_S = 60.0
MADE_ROOM = "connections without a request made room for others"
# Refusals for want of a key, on one connection: so many at once, then so many a second, and after so many without a
# call that was let in it is ended. Others wait, and take no time from those who have a key.
REFUSED_BURST, REFUSED_PER_S, MAX_REFUSED = 50, 20.0, 1000
MAX_PEERS = 2 * MOST

Peer = tuple[str, int]


def raise_descriptors() -> None:
    """Lets the process have as many descriptors as it may: 1,024, which is usual, are few for connections."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Some systems name a number that they do not keep.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def max_connections() -> int:
    """Number of connections that one port of this process takes."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if descriptors == resource.RLIM_INFINITY else min(MOST, descriptors // SHARE)


@dataclass(slots=True)
class OncePerMinute:
    """Logs something that may come a thousand times a second, with how often it came."""

    event: str
    _count: int = 0
    _told_s: float = -LOG_S

    def tell(self, count: int = 1, **facts: object) -> None:
        """Counts something that came so often more, and logs it at most once a minute."""
        self._count += count
        now_s = time.monotonic()
        if now_s - self._told_s >= LOG_S:
            log.warning(self.event, count=self._count, **facts)
            self._count, self._told_s = 0, now_s


@dataclass(slots=True)
class Known:
    """Calls and standing of a connection."""

    running: int = 0
    """Number of calls that run."""
    is_welcome: bool = False
    """Whether any was ever let in."""
    was_heard: bool = False
    """Whether its last message came in time; False before the first."""
    active_s: float = field(default_factory=time.monotonic)
    refused: int = 0
    """Calls for which it had no key, since the last that was let in."""
    due_s: float = 0.0


def peer_of(name: str) -> Peer | None:
    """The address of a client as gRPC writes it, ipv4:1.2.3.4:5; None of what is none."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _peer(host.strip("[]"), int(port)) if port.isdecimal() else None


def _peer(host: str, port: int) -> Peer | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), port


class Crowd:
    """Connections to a port."""

    def __init__(self) -> None:
        self.most = max_connections()
        self._known: OrderedDict[Peer, Known] = OrderedDict()
        self._cut: set[Peer] = set()
        self._log = OncePerMinute(MADE_ROOM)
        self._faults = OncePerMinute("connections could not be looked at")

    def begin(self, name: str) -> Known:
        """A call of a client has come; `end` is called when it is over."""
        known = self.known(name)
        known.running += 1
        return known

    def end(self, known: Known, *, was_let_in: bool) -> None:
        """Takes note that a call is over."""
        known.running -= 1
        known.active_s = time.monotonic()
        if was_let_in:
            known.is_welcome, known.refused = True, 0

    async def refuse(self, name: str) -> None:
        """Waits for the turn of a client that has no key to hear so."""
        known, now_s = self.known(name), time.monotonic()
        known.refused += 1
        if known.refused == MAX_REFUSED and (peer := peer_of(name)):
            self._cut.add(peer)
        known.due_s = max(known.due_s, now_s - REFUSED_BURST / REFUSED_PER_S) + 1 / REFUSED_PER_S
        if known.due_s > now_s:
            await asyncio.sleep(known.due_s - now_s)

    def known(self, name: str) -> Known:
        """What is known of a client's connection; of one without an address nothing is kept."""
        peer = peer_of(name)
        if peer is None:
            return Known()
        known = self._known.setdefault(peer, Known())
        self._known.move_to_end(peer)
        while len(self._known) > MAX_PEERS:
            oldest, its = self._known.popitem(last=False)
            if its.running:
                # Of those there are fewer.
                self._known[oldest] = its
        return known

    async def watch(self, port: int) -> None:
        """Makes room on a port, again and again, until it is cancelled."""
        while True:
            try:
                is_full = await asyncio.to_thread(self._look, port)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may find room
                is_full = False
                self._faults.tell(port=port, reason=str(error) or type(error).__name__)
            await asyncio.sleep(FULL_S if is_full else CALM_S)

    def _look(self, port: int) -> bool:
        """Ends connections that the port has no room for; returns whether it was full."""
        if sys.platform != "linux":
            return False
        cut, self._cut = self._cut, set()
        if len(os.listdir("/proc/self/fd")) < FULL * self.most // 8 and not cut:
            return False
        connections = list(_connections(port))
        full = len(connections) >= FULL * self.most // 8
        idle = []
        for peer, connection in connections:
            known = self._known.get(peer)
            if peer in cut:
                _end(connection)
            elif known is None or not known.running:
                idle.append((known is not None and known.is_welcome, known.active_s if known else 0.0, connection))
        num_ended = len(connections) - ROOMY * self.most // 8 if full else 0
        ended = sorted(idle, key=lambda each: each[:2])[:num_ended]
        for *_, connection in ended:
            _end(connection)
        for _, connection in connections:
            connection.close()
        if ended:
            self._log.tell(len(ended), port=port, most=self.most)
        return full


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """The connections of this process that came to a port, each as another descriptor of it."""
    for name in os.listdir("/proc/self/fd"):
        # It may have been closed, or be no socket, or one that is not connected.
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            try:
                ours, theirs = connection.getsockname(), connection.getpeername()
            except OSError:
                connection.close()
                raise
            peer = None
            if connection.family in (socket.AF_INET, socket.AF_INET6) and ours[1] == port:
                peer = _peer(theirs[0], theirs[1])
            if peer is None:
                connection.close()
            else:
                yield peer, connection


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
