"""Where the services of a role are: at addresses that an option has, that a name leads to, or that a file lists.

Names are looked up and files read again and again while the gateway runs. An address that has come gets a link; one
that has gone gets no new sessions, and its link closes when those that it carries have ended. Nothing is cut because of
an answer, and what is empty, wrong or missing is none: everything stays as it was, and the log says so once.
"""

import asyncio
import errno
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from gateway.sessions.peer import ServicePeer
from gateway.sessions.replicas import Replicas
from outrider.errors import InvalidRequest
from outrider.process.options import ServicePlace
from outrider.process.upkeep import Upkeep
from outrider.rpc.wire import check_address

# Between two looks. gRPC itself looks a name up only when a connection has failed, and makes one to one address.
NAME_LOOK_S, FILE_LOOK_S = 5.0, 1.0
MAX_FILE_BYTES = 1 << 20
MAX_ADDRESSES = 1024  # of one place; each is a connection
FILE_LIMIT = "file:PATH of a file with addresses HOST:PORT, one a line or as a JSON list"

log = structlog.get_logger()

LookUp = Callable[[str, int], Sequence[str]]
"""Gives all addresses HOST:PORT of a name, with a port, and blocks; raises OSError and UnicodeError."""


class Refresh(NamedTuple):
    """What an answer makes of the addresses of a place."""

    addresses: tuple[str, ...]
    joined: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def refreshed(known: Sequence[str], answer: Iterable[str], *, is_ordered: bool) -> Refresh:
    """Decides what becomes of known addresses; an empty answer changes nothing.

    Where an answer has an order, this is theirs. Where it has none, those that are known stay in front, so that the
    first one, which says what the model is called, is not another one with each answer.
    """
    found = tuple(dict.fromkeys(answer))
    if not found:
        return Refresh(tuple(known))
    joined = tuple(each for each in found if each not in known)
    gone = tuple(each for each in known if each not in found)
    kept = tuple(each for each in known if each in found)
    return Refresh(found if is_ordered else (*kept, *sorted(joined)), joined, gone)


def look_up(name: str, port: int) -> Sequence[str]:
    """All IPv4 and IPv6 addresses that the system has for a name."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}" for family, *_, place in found
    ]


def places_of(field: str, entries: Iterable[str]) -> list[ServicePlace]:
    """Places that the entries of an option name; raises InvalidRequest about one that is none, or an unusable file."""
    places = [ServicePlace.of(field, each) for each in dict.fromkeys(entries)]
    for each in places:
        if each.path:
            read_addresses(field, each)
    return places


def read_addresses(field: str, place: ServicePlace) -> Sequence[str]:
    """Addresses of a file, none where it has only comments; raises InvalidRequest about one that cannot be used."""
    path = Path(place.path)
    try:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "it is missing, or no regular file")
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES} bytes")
        return parsed_addresses(content.decode("utf-8-sig"))
    except OSError as error:
        fault = str(error.strerror)
    except UnicodeDecodeError:
        fault = "it is not UTF-8"
    except InvalidRequest as error:
        fault = error.message
    raise InvalidRequest(field, place.words, f"{FILE_LIMIT}: {fault}")


def parsed_addresses(text: str) -> Sequence[str]:
    """Addresses of a text; raises InvalidRequest about an entry that is none."""
    entries = None
    # So does an address of IPv6.
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            entries = json.loads(text)
    if entries is None:
        entries = [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]
    return [check_address("entry", each if isinstance(each, str) else json.dumps(each)) for each in entries]


class Discovery:
    """Keeps the links of one role to the services at its places."""

    def __init__(
        self,
        replicas: Replicas,
        places: Sequence[ServicePlace],
        open_link: Callable[[str, str], ServicePeer],
        look_up: LookUp = look_up,
    ) -> None:
        """`open_link` is given an address, and the name that brought it, empty where none did."""
        self._replicas = replicas
        self._open_link = open_link
        self._look_up = look_up
        # Not the loop's, for whose threads a process waits at its end: a look-up without an answer takes a minute.
        self._threads = ThreadPoolExecutor(max(1, len(places)), "addresses")
        self._faults: dict[ServicePlace, str] = {}
        self._known: dict[ServicePlace, tuple[str, ...]] = {}
        self._change({each: () if each.is_changing else (each.words,) for each in places})

    def start(self, upkeep: Upkeep) -> None:
        """Follows what changes, if anything does, until the replicas are closed."""
        changing = [each for each in self._known if each.is_changing]
        if changing:
            words = ",".join(each.words for each in changing)
            self._replicas.follow(upkeep.keep(f"{self._replicas.role} addresses of {words}", self._follow_all))

    async def look(self, place: ServicePlace) -> None:
        """Looks at a place once, and lets the links follow."""
        answer, fault = await self._answer(place)
        if fault and fault != self._faults.get(place):
            log.warning("addresses stay as they are", service=self._replicas.role, place=place.words, reason=fault)
        self._faults[place] = fault
        change = refreshed(self._known[place], answer, is_ordered=bool(place.path))
        if change.addresses != self._known[place]:
            joined, gone = [*change.joined], [*change.gone]
            log.info("addresses changed", service=self._replicas.role, place=place.words, joined=joined, gone=gone)
            self._change({**self._known, place: change.addresses})
        self._replicas.see_off()

    async def _answer(self, place: ServicePlace) -> tuple[Sequence[str], str]:
        """Addresses at a place, and why there are none where there are none."""
        ask = partial(self._look_up, place.name, place.port)
        if place.path:
            ask = partial(read_addresses, self._replicas.role, place)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except InvalidRequest as error:
            return (), error.message
        except (OSError, UnicodeError) as error:
            return (), getattr(error, "strerror", None) or str(error)
        if len(answer) > MAX_ADDRESSES:
            return (), f"there are {len(answer)} addresses, and at most {MAX_ADDRESSES} can be used"
        return answer, "" if answer else "there is no address"

    def _change(self, known: dict[ServicePlace, tuple[str, ...]]) -> None:
        places: dict[str, ServicePlace] = {}
        for place, addresses in known.items():
            for address in addresses:
                places.setdefault(address, place)
        self._replicas.brought_by = {address: place.words for address, place in places.items() if place.is_changing}
        links = {peer.address: peer for peer in self._replicas.links}
        self._replicas.change([links.get(each) or self._open_link(each, place.name) for each, place in places.items()])
        self._known = known

    async def _follow(self, place: ServicePlace) -> None:
        while True:
            await self.look(place)
            await asyncio.sleep(FILE_LOOK_S if place.path else NAME_LOOK_S)

    async def _follow_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for place in self._known:
                if place.is_changing:
                    group.create_task(self._follow(place))
