"""`outrider bench`: the arguments that its child gets."""

import sys

from outrider.cli.modules import command


def test_the_child_gets_the_arguments_as_they_were_typed() -> None:
    """The module that measures reads them; -P guards imports."""
    given = ("--target=sized:200m", "--seed", "-3", "--json")
    assert command("a.module", given) == (
        sys.executable,
        "-P",
        "-m",
        "a.module",
        *given,
    )
