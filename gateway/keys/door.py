"""The check of API keys: those of a file that is looked at again with every key that comes.

A file that has become unreadable or wrong keeps the keys that it had, and the log says so: half an edit must not lock
everybody out. What it no longer lists is refused from then on; requests under way go on to their end.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.keys.table import KeysRefused, find_key, parse_keys, read_file
from gateway.keys.tenant import Tenant
from gateway.keys.usage import Clock, KeyUsage, OwnUsage
from outrider.errors import InvalidKey

# Within this time a file can change again without another date: file systems count in ticks.
SETTLED_S = 0.1
SCHEME = b"bearer "
# One by each header; each is compared with all of the file.
MAX_GIVEN = 2
REST, GRPC = "rest", "grpc"

log = structlog.get_logger()


class Door:
    """Lets the holders of a file's keys in."""

    def __init__(self, path: str, clock: Clock = time.monotonic, usage: KeyUsage | None = None) -> None:
        """`usage` is where processes count together; None counts for this one alone.

        Raises KeysRefused about a file that cannot be read, or is no file of keys.
        """
        self._path, self._clock, self.usage = Path(path), clock, usage or OwnUsage()
        self._seen: tuple[int, ...] | None = None
        self._seen_s = 0.0
        self._settled: tuple[int, ...] | None = None
        self._content = read_file(self._path)
        self._keys = parse_keys(self._content, path)
        self._tenants: dict[str, Tenant] = {}
        self._complaint = ""
        self.refusals = {REST: 0, GRPC: 0}
        """Requests that were not let in, by surface."""
        if not self._keys:
            log.warning("the file of keys has none, so nobody comes in", file=path)

    def enter(self, surface: str, authorization: Iterable[bytes], x_api_key: Iterable[bytes]) -> Tenant:
        """The holder of the first known key among the values of these headers; raises InvalidKey."""
        self._look()
        bearers = [each[len(SCHEME) :] for each in authorization if each[: len(SCHEME)].lower() == SCHEME]
        given = {each.strip(): None for each in (*bearers, *x_api_key) if each.strip()}
        tried = (find_key(self._keys, each) for each in given) if len(given) <= MAX_GIVEN else ()
        key = next(filter(None, tried), None)
        if key is None:
            self.refusals[surface] += 1
            fault = "The API key is none that this gateway knows; its operator has the list"
            if not given:
                fault = "No API key came; send it as `authorization: Bearer KEY` or as `x-api-key: KEY`"
            elif len(given) > MAX_GIVEN:
                fault = f"{len(given)} different API keys came, but a request must have at most {MAX_GIVEN}"
            raise InvalidKey(fault)
        # One that has gone and come again goes on with what it had used.
        tenant = self._tenants.setdefault(key.name, Tenant(key, self.usage))
        tenant.key = key
        return tenant

    def _look(self) -> None:
        """Reads the file again where it has changed, or may have within its latest date."""
        stamp = None
        with suppress(OSError):
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
        if stamp is not None and stamp == self._settled:
            return
        now_s = self._clock()
        if stamp != self._seen:
            self._seen, self._seen_s = stamp, now_s
        try:
            content = read_file(self._path)
            # Not before it was read: what could not be read for once is tried again with the next key.
            self._settled = stamp if now_s - self._seen_s > SETTLED_S else None
            if content == self._content and not self._complaint:
                return
            keys = parse_keys(content, str(self._path))
        except KeysRefused as error:
            if error.message != self._complaint:
                self._complaint = error.message
                log.error("the file of keys is wrong, so the keys before it go on", problem=error.message)
            return
        self._complaint = ""
        self._content, self._keys = content, keys
        log.warning("the file of keys was read again", keys=len(keys))


@dataclass(slots=True)
class Entrance:
    """Entrance of one request, which finds its tenant by the headers that it came with, each time it is asked."""

    door: Door
    surface: str
    authorization: Sequence[bytes]
    x_api_key: Sequence[bytes]
    is_counted: bool = False
    """Whether it counts for its key's limits already, or is about to."""

    def tenant(self) -> Tenant:
        """The holder of its key; raises InvalidKey when that has gone meanwhile."""
        return self.door.enter(self.surface, self.authorization, self.x_api_key)

    def __call__(self) -> Tenant:
        """Tenant for the code that takes the request over, which is counted from here on."""
        self.is_counted = True
        return self.tenant()

    def refused(self, num_bytes: int) -> None:
        """Counts a request of so many bytes that was refused before anybody took it over."""
        if not self.is_counted:
            self.is_counted = True
            with suppress(InvalidKey):
                self.tenant().count_refusal(num_bytes)
