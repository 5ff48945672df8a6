"""Settings of the gateway, and which web sites' pages may make it work.

A browser sends what any page asks it to, from inside the user's network, and names the page's site in `origin`. Two
kinds of pages are let through: those that an operator named, and the gateway's own. A page is the gateway's own only
under a name that no other site can point here: otherwise a site whose name is made to lead here after it was loaded
(DNS rebinding) would count as one. Programs that are no browsers send no origin, and are not asked. What such a site
reads comes without an origin, as a program's does: there the name alone decides.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated
from urllib.parse import urlsplit

from gateway.lookup.memory import LEAST_TOKENS, MAX_BYTES_PER_TOKEN
from gateway.tools.formats import AUTO, FORMATS, OFF
from outrider.errors import InvalidRequest, OutriderError
from outrider.model_files.generation_defaults import WORDS, OperatorDefaults
from outrider.process.children import MAX_WORKERS
from outrider.process.options import Limit, Setting, above, addresses, listed, within, without_password
from outrider.process.run import ProcessSettings
from outrider.rpc.messages.tree import MAX_BRANCHES
from outrider.rpc.tls import TlsFiles, files_of
from outrider.rpc.wire import is_loopback

HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?P<authority>(?P<name>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(:\d+)?)")
# As browsers send it: names that are not ASCII are in Punycode there, and ports that a scheme has anyway are left out.
SENT_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d+)?")
# What browsers call the origin of a page that has none, such as a file; and any.
BARE_ORIGINS = ("null", "*")
# Names that lead here because they say so (addresses), or because the machine or its network does. WHATWG's URLs take
# what is made of digits and dots for an address, so no domain has such a name.
LOCAL_NAME = re.compile(r"[^.]*|[0-9.]+|\[.*\]|.*\.(localhost|local|internal|svc)")
SERVER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
HOST_HEADER = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(:\d*)?")

# Scheme and path of a store's address.
STORE = re.compile(r"rediss?:(/[0-9]{0,4})?")
STORE_WORDS = "redis://HOST:PORT/NUMBER or rediss://, with USER:PASSWORD@ where it asks for them, or empty"

# What becomes of unknown fields.
REFUSE, IGNORE = "refuse", "ignore"


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
            if origin not in BARE_ORIGINS and not SENT_ORIGIN.fullmatch(origin):
                limit = "like https://example.com, in small letters and without a path, a pattern or a usual port, or *"
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
            if self._is_ours(page["name"]):
                return
            option = f"--allowed-hosts {page['name']}"
        shown = origin[:200]
        advice = f"its operator can allow them with {option[:230]}"
        message = f"origin is {shown!r}, whose pages may not ask this gateway; {advice}"
        raise SiteRefused(message, field="origin", value=shown)

    def check_host(self, host: str) -> None:
        """Raises SiteRefused unless the name in the header of that name, absent or not, is one of the gateway's."""
        found = HOST_HEADER.fullmatch(host.lower())
        name = found["name"].removesuffix(".") if found else host
        if found is None or not self._is_ours(name):
            shown = host[:200]
            advice = f"its operator can allow it with --allowed-hosts {name[:200]}"
            raise SiteRefused(
                f"host is {shown!r}, by which this is not to be read; {advice}", field="host", value=shown
            )

    def _is_ours(self, name: str) -> bool:
        return bool(LOCAL_NAME.fullmatch(name)) or any(fnmatchcase(name, allowed) for allowed in self.hosts)


OWN_PAGE = Sites()


def _one_of(*words: str) -> Limit:
    def check(flag: str, word: str) -> None:
        if word not in words:
            raise InvalidRequest(flag, word, limit)

    limit = f"one of {', '.join(words)}"
    return Limit(limit, check)


def _check_store(flag: str, url: str) -> None:
    """Raises InvalidRequest, whose sentence has no password, about what is no address of a store."""
    try:
        found = urlsplit(url)
        is_one = STORE.fullmatch(f"{found.scheme}:{found.path}") and found.hostname and found.port != 0
    except ValueError:
        is_one = False
    if url and (not is_one or found.query or found.fragment):
        raise InvalidRequest(flag, without_password(url), STORE_WORDS)


def _check_name(flag: str, name: str) -> None:
    if name and not SERVER_NAME.fullmatch(name):
        raise InvalidRequest(flag, name, HOST_NAME.words)


HOST_NAME = Limit("the name of a host, without a port, or empty", _check_name)


@dataclass(frozen=True, slots=True)
class GatewaySettings(ProcessSettings):
    """Options of a gateway. The model is called as its service calls it unless served_model_name says otherwise.

    Raises InvalidRequest about a value outside its limit.
    """

    target: Annotated[str, Setting("Where the target answers; of several the best first.", addresses(several=True))]
    tokenizer: Annotated[str, Setting("Folder, GGUF file or hub id of the target's model.")]
    draft: Annotated[
        str,
        Setting(
            "Where the draft answers; several drafts as NAME=HOST:PORT. Empty: no draft service.",
            addresses(needed=False, several=True, named=True),
        ),
    ] = ""
    target_name: Annotated[
        str,
        Setting(
            "Name that targets' certificates must have. Empty: the host of the address, or the NAME of dns:NAME:PORT.",
            HOST_NAME,
        ),
    ] = ""
    draft_name: Annotated[str, Setting("The same of drafts.", HOST_NAME)] = ""
    branches: Annotated[
        int,
        Setting(
            "Outcomes of a verification that the draft prepares guesses for meanwhile; 0: it waits.",
            within(0, MAX_BRANCHES),
        ),
    ] = 0
    lookup: Annotated[
        bool, Setting("Look guesses up in prompts and answers, which needs no model and changes no token.")
    ] = True
    lookup_memory_tokens: Annotated[
        int,
        Setting("Tokens of finished requests that are looked up, for each cache_salt; 0 remembers none.", within(0)),
    ] = 1_000_000
    lookup_memory_mib: Annotated[
        int, Setting("MiB for these of all salts; those that asked least recently are forgotten.", within(1))
    ] = 256
    datastore: Annotated[str, Setting("File made by `outrider datastore build` to look up in. Empty: none.")] = ""
    listen: Annotated[str, Setting("Where to serve gRPC; port 0 takes a free one.", addresses(min_port=0))] = (
        "127.0.0.1:50050"
    )
    rest_listen: Annotated[
        str,
        Setting(
            "Where to serve REST and the page; port 0 takes a free one. Empty: nowhere.",
            addresses(min_port=0, needed=False),
        ),
    ] = "127.0.0.1:8080"
    metrics_listen: Annotated[
        str,
        Setting(
            "Where to serve metrics alone, beside REST's /metrics; port 0 takes a free one. Empty: nowhere.",
            addresses(min_port=0, needed=False),
        ),
    ] = ""
    api_keys: Annotated[
        str, Setting("File of the API keys that are let in, read again when it changes. Empty: everybody is let in.")
    ] = ""
    key_store: Annotated[
        str,
        Setting(
            "Redis in which all gateways count the limits of keys together. Empty: each counts for itself.",
            Limit(STORE_WORDS, _check_store),
            is_secret=True,
        ),
    ] = ""
    no_auth: Annotated[bool, Setting("Let everybody in, also from beyond this machine.")] = False
    workers: Annotated[
        int, Setting("Processes that serve on these addresses, each a gateway.", within(1, MAX_WORKERS))
    ] = 1
    reflection: Annotated[bool, Setting("Describe the gRPC services to whoever asks.")] = False
    target_wait_seconds: Annotated[float, Setting("How long to wait for the target at start.", within(0))] = 300.0
    draft_wait_seconds: Annotated[float, Setting("How long to wait for the draft at start.", within(0))] = 5.0
    target_stall_seconds: Annotated[
        float,
        Setting("How long a target's device may finish nothing before the target counts as hung.", within(0.1)),
    ] = 30.0
    rebuild_budget_seconds: Annotated[
        float,
        Setting("How long a request waits for a target that is away before it ends with UNAVAILABLE.", within(0)),
    ] = 30.0
    audit_fraction: Annotated[
        float,
        Setting("Share of the requests under `match` that are decoded again, plainly, and compared.", within(0, 1)),
    ] = 0.0
    tool_format: Annotated[
        str,
        Setting(
            "How the model writes calls of tools; auto: as its chat template says, off: nobody looks.",
            _one_of(AUTO, OFF, *FORMATS),
        ),
    ] = AUTO
    drop_tools: Annotated[
        bool, Setting("Over REST, leave out tools that the chat template has no place for, instead of refusing them.")
    ] = False
    unknown_fields: Annotated[
        str,
        Setting(
            f"What becomes of unknown fields over REST; {IGNORE}: the header x-outrider-ignored names them.",
            _one_of(REFUSE, IGNORE),
        ),
    ] = REFUSE
    served_model_name: Annotated[
        str, Setting("Names of the model to clients, with commas; * takes any. Empty: the target's.")
    ] = ""
    generation_defaults: Annotated[
        str,
        Setting(
            "What requests get where they say nothing, over what the model's files say, all of which none forgets.",
            Limit(WORDS, OperatorDefaults.parse),
        ),
    ] = ""
    cors_origins: Annotated[str, Setting("Origins whose pages may call REST, with commas, or *. Empty: none.")] = ""
    allowed_hosts: Annotated[
        str, Setting("Names with a dot by which browsers and scrapers call this gateway, with commas, *.DOMAIN, or *.")
    ] = ""
    max_requests: Annotated[int, Setting("Samples that run at a time, in each worker.", within(1))] = 256
    max_queue: Annotated[
        int, Setting("Requests that may wait, in each worker; more are turned away at once.", within(0))
    ] = 64
    request_memory_mib: Annotated[
        int,
        Setting(
            "MiB for requests on their way, parsed and kept, in each worker; more wait, and then are turned away.",
            within(256),
        ),
    ] = 512
    client_stall_seconds: Annotated[
        float, Setting("How long a client may read nothing before its request ends.", within(0.1))
    ] = 30.0
    lame_duck_seconds: Annotated[
        float,
        Setting(
            "Of drain_seconds, how long requests are taken while readiness says no already, so that balancers notice.",
            within(0),
        ),
    ] = 0.0
    keep_alive_seconds: Annotated[
        float, Setting("Silence on a REST stream after which a comment is sent.", above(0))
    ] = 15.0
    service_tls_ca: Annotated[
        str, Setting("Authority that must have signed the certificates of draft and target. Empty: no TLS to them.")
    ] = ""
    service_tls_cert: Annotated[
        str, Setting("This gateway's certificate to them, in PEM; read again when it is replaced. Empty: none.")
    ] = ""
    service_tls_key: Annotated[str, Setting("Its private key.")] = ""
    # No options: how long a proposal is worth waiting for is learnt between these.
    draft_deadline_min_s: float = 0.25
    draft_deadline_max_s: float = 5.0
    # No option either: of one of several workers on the same addresses, HOST:PORT of the figures of all.
    figures_of_all: str = ""
    # And where what all of them used of the keys' limits is, and which of them it is.
    usage_of_all: str = ""
    worker: int = 0
    sites: Sites = field(init=False)
    """Made of cors_origins and allowed_hosts."""
    defaults: OperatorDefaults = field(init=False)
    """Defaults that generation_defaults states."""

    def __post_init__(self) -> None:
        ProcessSettings.__post_init__(self)
        self.service_tls()
        for option, name in (("--target-name", self.target_name), ("--draft-name", self.draft_name)):
            if name and not self.service_tls_ca:
                raise InvalidRequest(option, name, "given with --service-tls-ca")
        if self.draft_name and not self.draft:
            raise InvalidRequest("--draft-name", self.draft_name, "given with --draft")
        if self.api_keys and self.no_auth:
            raise InvalidRequest("--no-auth", True, "left out with --api-keys")
        if self.key_store and not self.api_keys:
            raise InvalidRequest("--key-store", without_password(self.key_store), "given with --api-keys")
        listens = {"listen": self.listen, "rest-listen": self.rest_listen, "metrics-listen": self.metrics_listen}
        for option, address in listens.items():
            if address and not is_loopback(address) and not (self.api_keys or self.no_auth):
                words = "an address of this machine alone unless --api-keys FILE says who may come in"
                raise InvalidRequest(f"--{option}", address, f"{words}, or --no-auth that everybody may")
        num_tokens = self.lookup_memory_tokens
        if 0 < num_tokens < LEAST_TOKENS:
            raise InvalidRequest("lookup_memory_tokens", num_tokens, f"0 or at least {LEAST_TOKENS}")
        if num_tokens * MAX_BYTES_PER_TOKEN > self.lookup_memory_mib << 20:
            limit = f"enough for lookup_memory_tokens {num_tokens} at {MAX_BYTES_PER_TOKEN} bytes each"
            raise InvalidRequest("lookup_memory_mib", self.lookup_memory_mib, limit)
        if self.lame_duck_seconds > self.drain_seconds:
            limit = f"at most drain_seconds, {self.drain_seconds:g}"
            raise InvalidRequest("lame_duck_seconds", self.lame_duck_seconds, limit)
        defaults = OperatorDefaults.parse("--generation-defaults", self.generation_defaults)
        object.__setattr__(self, "defaults", defaults)
        object.__setattr__(self, "sites", Sites(listed(self.cors_origins), listed(self.allowed_hosts)))

    def service_tls(self) -> TlsFiles | None:
        """The files of TLS to the services, None for plaintext; raises InvalidRequest about unusable ones."""
        if self.service_tls_cert and not self.service_tls_ca:
            raise InvalidRequest("--service-tls-cert", self.service_tls_cert, "given with --service-tls-ca")
        files = {"ca": self.service_tls_ca, "cert": self.service_tls_cert, "key": self.service_tls_key}
        return files_of(files, {name: f"--service-tls-{name}" for name in files})
