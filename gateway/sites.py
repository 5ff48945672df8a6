"""Which web sites' pages may make this gateway work.

A browser sends what any page asks it to, from inside the user's network, and names the page's site in `origin`. Two
kinds of pages are let through: those that an operator named, and the gateway's own. A page is the gateway's own only
under a name that nobody else can point here: otherwise a site whose name is made to lead here after it was loaded
(DNS rebinding) would count as one. Programs that are no browsers send no origin, and are not asked.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address

from outrider.errors import InvalidRequest, OutriderError

HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?P<authority>(?P<name>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(:\d+)?)")
# What browsers call the origin of a page that has none, such as a file; and any.
BARE_ORIGINS = ("null", "*")
# Names below these are never a stranger's: they are given out within a machine or a network.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class SiteRefused(OutriderError):
    """The operator must name the site, if its pages are welcome."""

    status = "PERMISSION_DENIED"
    reason = "SITE_NOT_ALLOWED"
    exit_code = 64


@dataclass(frozen=True, slots=True)
class Sites:
    """Origins that were named, and host names under which the gateway's own page may be called; "*" is any."""

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin not in BARE_ORIGINS and not ORIGIN.fullmatch(origin):
                limit = "like https://example.com, in small letters and without a path, or *"
                raise InvalidRequest("cors_origins", origin, limit)
        for host in self.hosts:
            if not HOST.fullmatch(host):
                limit = "a name in small letters without scheme and port, *.DOMAIN or *"
                raise InvalidRequest("allowed_hosts", host, limit)

    def check(self, origin: str, host: str, fetch_site: str) -> None:
        """Raises SiteRefused unless the page may ask; the arguments are headers, origin as a browser sent it.

        `fetch_site` is what the browser itself says of the page, which counts where a proxy has changed the host.
        """
        if "*" in self.origins or origin in self.origins:
            return
        page = ORIGIN.fullmatch(origin)
        option = f"--cors-origins {origin}"
        if page is not None and (fetch_site == "same-origin" or page["authority"] == host.lower()):
            name = page["name"].strip("[]")
            if _is_local(name) or any(fnmatchcase(name, allowed) for allowed in self.hosts):
                return
            option = f"--allowed-hosts {page['name']}"
        shown = origin[:200]
        advice = f"its operator can allow them with {option[:230]}"
        message = f"origin is {shown!r}, whose pages may not ask this gateway; {advice}"
        raise SiteRefused(message, field="origin", value=shown)


def _is_local(name: str) -> bool:
    """Whether a name leads here because it says so, or because the machine or its network does."""
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(LOCAL_SUFFIXES)
    return True


OWN_PAGE = Sites()
