"""Pages of other sites do not make the gateway work, nor do those whose site's name was made to lead to it."""

from contextlib import nullcontext

import pytest

from gateway.settings import SiteRefused, Sites
from outrider.errors import InvalidRequest

SITES = Sites(("https://page.example", "null"), ("outrider.example", "*.corp.example"))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("http://[::1]:8080", "[::1]:8080"),
        ("http://localhost", "LOCALHOST"),
        ("http://gateway:8080", "gateway:8080"),
        ("http://gpu.local", "gpu.local"),
        ("https://outrider.example", "outrider.example"),
        ("https://a.b.corp.example:1", "a.b.corp.example:1"),
        ("https://page.example", "127.0.0.1:8080"),
        ("null", "127.0.0.1:8080"),
    ],
)
def test_the_own_page_and_named_ones_may_ask(origin: str, host: str) -> None:
    """By an address, by a local name, or by one that the operator gave."""
    SITES.check(origin, host, "")


@pytest.mark.parametrize(
    ("origin", "host", "fetch_site", "option"),
    [
        ("https://other.example", "127.0.0.1:8080", "", "--cors-origins https://other.example"),
        ("http://127.0.0.1:3000", "127.0.0.1:8080", "", "--cors-origins http://127.0.0.1:3000"),
        ("https://page.example:444", "127.0.0.1:8080", "cross-site", "--cors-origins https://page.example:444"),
        ("http://rebound.example:8080", "rebound.example:8080", "", "--allowed-hosts rebound.example"),
        ("http://rebound.example:8080", "rebound.example:8080", "same-origin", "--allowed-hosts rebound.example"),
        ("https://corp.example", "corp.example", "", "--allowed-hosts corp.example"),
        ("https://evilcorp.example", "evilcorp.example", "", "--allowed-hosts evilcorp.example"),
        ("http://127.0.0.1.evil.example", "127.0.0.1.evil.example", "", "--allowed-hosts 127.0.0.1.evil.example"),
        ("http://[oops", "[oops", "", "--cors-origins http://[oops"),
        ("http://user@localhost", "user@localhost", "", "--cors-origins http://user@localhost"),
        ("", "", "", "--cors-origins "),
        ("x" * 5000, "localhost", "", "x" * 200),
    ],
)
def test_any_other_page_is_refused_with_the_option_that_lets_it_in(
    origin: str, host: str, fetch_site: str, option: str
) -> None:
    """In one sentence, whatever the header holds."""
    with pytest.raises(SiteRefused) as raised:
        SITES.check(origin, host, fetch_site)
    assert option in raised.value.message
    assert len(raised.value.message) < 600


def test_a_proxy_may_change_the_host() -> None:
    """The browser's own word that the page is of the same origin counts, if the name is allowed."""
    SITES.check("https://outrider.example", "127.0.0.1:8080", "same-origin")
    with pytest.raises(SiteRefused):
        SITES.check("https://outrider.example", "127.0.0.1:8080", "same-site")


def test_a_star_lets_everything_in() -> None:
    """As an origin any page, as a host any name of the own page and no other site's."""
    Sites(("*",)).check("https://other.example", "localhost", "cross-site")
    Sites((), ("*",)).check("http://rebound.example", "rebound.example", "")
    with pytest.raises(SiteRefused):
        Sites((), ("*",)).check("https://other.example", "localhost", "")


@pytest.mark.parametrize(
    ("host", "is_welcome"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("LOCALHOST:", True),
        ("gateway:8080", True),
        ("host.docker.internal:8080", True),
        ("gateway.prod.svc:8080", True),
        ("gateway.prod.svc.cluster.local.:8080", True),
        ("", True),
        ("outrider.example", True),
        ("a.corp.example:1", True),
        ("rebound.example:8080", False),
        ("127.0.0.1.rebound.example", False),
        ("svc.rebound.example.", False),
        ("localhost:80:rebound.example", False),
        ("[::1].rebound.example", False),
        ("x." * 5000, False),
    ],
)
def test_what_tells_something_is_read_by_address_or_name_of_ours(host: str, *, is_welcome: bool) -> None:
    """Whatever else the header says is refused in one sentence."""
    with nullcontext() if is_welcome else pytest.raises(SiteRefused) as raised:
        SITES.check_host(host)
    if raised is not None:
        assert "--allowed-hosts " in raised.value.message
        assert len(raised.value.message) < 600


@pytest.mark.parametrize(
    ("origins", "hosts", "field"),
    [
        (("page.example",), (), "cors_origins"),
        (("https://page.example/",), (), "cors_origins"),
        (("HTTPS://page.example",), (), "cors_origins"),
        (("https://Page.example",), (), "cors_origins"),
        (("https://*.page.example",), (), "cors_origins"),
        (("https://page.example:443",), (), "cors_origins"),
        (("https://päge.example",), (), "cors_origins"),
        ((), ("https://page.example",), "allowed_hosts"),
        ((), ("page.example:80",), "allowed_hosts"),
        ((), ("*example",), "allowed_hosts"),
    ],
)
def test_what_could_never_match_is_refused(origins: tuple[str, ...], hosts: tuple[str, ...], field: str) -> None:
    """When the gateway starts."""
    with pytest.raises(InvalidRequest) as raised:
        Sites(origins, hosts)
    assert raised.value.metadata["field"] == field
