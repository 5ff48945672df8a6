"""No gateway serves beyond its own machine unless its settings say who may come in."""

import sys

import pytest

from gateway.server import ExtraMissing, start
from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest
from outrider.process.options import secrets_of, words_of


def settings(**changes: object) -> GatewaySettings:
    """What an operator set."""
    return GatewaySettings("a:1", "model", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:1", "localhost:1", "[::1]:1"])
def test_this_machine_alone_needs_no_word(listen: str) -> None:
    """By default no surface is open to others."""
    assert settings().no_auth is False
    settings(listen=listen, rest_listen=listen, metrics_listen=listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "192.168.1.5:1", "gateway:1", "localhost.example:1"])
@pytest.mark.parametrize("option", ["listen", "rest_listen", "metrics_listen"])
def test_beyond_this_machine_somebody_has_to_say_who_comes_in(option: str, listen: str) -> None:
    """The sentence names both ways; with either of them all is well."""
    with pytest.raises(InvalidRequest) as refused:
        settings(**{option: listen})
    for word in (f"--{option.replace('_', '-')} is '{listen}'", "--api-keys FILE", "--no-auth"):
        assert word in refused.value.message
    settings(**{option: listen}, no_auth=True)
    settings(**{option: listen}, api_keys="keys.toml")


def test_keys_for_nobody_are_a_mistake() -> None:
    """An operator who names keys and lets everybody in means one of them."""
    with pytest.raises(InvalidRequest, match="--no-auth is True, but must be left out with --api-keys"):
        settings(api_keys="keys.toml", no_auth=True)


@pytest.mark.parametrize(
    "url", ["redis://host", "redis://host:6379", "rediss://:a%2Fb@host:6379/0", "redis://[::1]:1/15"]
)
def test_a_store_has_a_url(url: str) -> None:
    """Of Redis, with or without TLS, password, port and number."""
    assert settings(api_keys="keys.toml", key_store=url).key_store == url


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://host",
        "redis://",
        "redis://host:0",
        "redis://host:70000",
        "redis://host/name",
        "redis://host/0/1",
        "redis://host?socket_timeout=9",
        "redis://host#0",
        "redis://[::1",
        "unix:///run/redis",
    ],
)
def test_what_is_no_url_of_a_store_is_refused(url: str) -> None:
    """By the option's name and the value, of which user and password are left out."""
    for given, shown in ((url, url), (url.replace("//", "//bob:hidden@"), url.replace("//", "//***@"))):
        with pytest.raises(InvalidRequest) as refused:
            settings(api_keys="keys.toml", key_store=given)
        assert refused.value.message.startswith(f"--key-store is {shown!r}, but must be redis://HOST:PORT/NUMBER")
        assert "hidden" not in f"{refused.value.message} {refused.value.metadata}"


def test_a_store_without_keys_is_refused() -> None:
    """It would have no effect."""
    with pytest.raises(
        InvalidRequest, match=r"--key-store is 'redis://\*\*\*@host', but must be given with --api-keys"
    ):
        settings(key_store="redis://:hidden@host")


def test_a_store_is_on_no_command_line_of_a_worker() -> None:
    """Its URL has a password, and all users of a machine see command lines: it goes by the environment."""
    made = settings(api_keys="keys.toml", key_store="redis://:hidden@host")
    assert "hidden" not in " ".join(words_of(made))
    assert secrets_of(made) == {"OUTRIDER_KEY_STORE": "redis://:hidden@host"}


async def test_a_gateway_that_cannot_ask_a_store_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where redis is not installed."""
    monkeypatch.delitem(sys.modules, "gateway.keys.store", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'outrider\[redis\]'"):
        await start(settings(api_keys="keys.toml", key_store="redis://:hidden@host"))
