"""No gateway serves beyond its own machine unless its settings say who may come in."""

import pytest

from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest


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
