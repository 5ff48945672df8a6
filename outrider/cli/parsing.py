"""From the texts of options to values. Refuses what no message could carry; every other limit is the gateway's."""

from collections.abc import Callable, Iterable

import typer

from outrider.errors import InvalidRequest

AUTO = "auto"
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def text(param: typer.CallbackParam, value: str | None) -> str | None:
    """A callback that raises InvalidRequest about bytes that are no UTF-8."""
    try:
        (value or "").encode()
    except UnicodeError:
        raise InvalidRequest(param.opts[0], (value or "").encode(errors="surrogateescape"), "valid UTF-8") from None
    return value


def texts(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    """The same for an option that may be given several times."""
    for value in values or ():
        text(param, value)
    return values


def each(check: Callable[[typer.CallbackParam, int], object]) -> Callable[..., list[int] | None]:
    """A callback that checks every value of an option that may be given several times."""

    def check_all(param: typer.CallbackParam, values: list[int] | None) -> list[int] | None:
        for value in values or ():
            check(param, value)
        return values

    return check_all


def parse_draft_count(value: str | None) -> int | None:
    """A count, or None where the gateway chooses; raises InvalidRequest about any other text."""
    if value is None or value == AUTO:
        return None
    # Python's own parser refuses numbers of many digits, with an error of its own.
    if not value.isascii() or not value.isdecimal() or len(value) > 10 or int(value) > INT32_MAX:
        raise InvalidRequest("--draft-count", value, f"a number of tokens, or {AUTO}")
    return int(value)


def parse_biases(values: Iterable[str]) -> dict[int, float]:
    """Biases by token id; raises InvalidRequest about a text that is not ID=BIAS, and about a token that has two."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, bias = _parse_bias(value)
        if token_id in biases:
            raise InvalidRequest("--logit-bias", value, "the only one of its token")
        biases[token_id] = bias
    return biases


def _parse_bias(value: str) -> tuple[int, float]:
    token_id, _, bias = value.partition("=")
    try:
        parsed = int(token_id), float(bias)
    except ValueError:
        parsed = -1, 0.0
    if not 0 <= parsed[0] <= INT32_MAX:
        raise InvalidRequest("--logit-bias", value, "ID=BIAS, a token id and a number")
    return parsed
