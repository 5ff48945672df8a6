"""What comes before the imports at the start of a process, and the collector, which leaves these alone."""

import gc
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from outrider.process import imports
from outrider.process.imports import EXPERIMENTS, INLINE_POLLING, poll_inline, uncollected

# gRPC reads its experiments with the first connection.
CONNECTION = dedent("""
    from outrider.process.imports import poll_inline
    poll_inline()

    import asyncio
    import os
    import grpc

    async def connect():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        await server.stop(None)
        print(os.environ["GRPC_EXPERIMENTS"])

    asyncio.run(connect())
""")


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_looks_at_nothing_that_was_imported(fails: bool) -> None:
    """It rests meanwhile, and afterwards works again on what is new, also when an import fails."""
    try:
        with uncollected():
            assert not gc.isenabled()
            kept = [[]]
            if fails:
                raise ImportError("planted")
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())
    gc.unfreeze()
    assert any(each is kept for each in gc.get_objects())


def test_the_collector_rests_to_the_end_of_the_outermost() -> None:
    """Programs import each other, also in tests, where it rests already."""
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(("named", "complaint"), [(None, []), ("-nonsense", ["nonsense"])])
def test_the_installed_grpc_knows_what_it_is_told(named: str | None, complaint: list[str]) -> None:
    """Of a name that it does not know it says so on stderr, where it may have other things to say, too."""
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    if named is not None:
        environment[EXPERIMENTS] = named
    ran = subprocess.run(
        [sys.executable, "-c", CONNECTION], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout.strip() == (named or INLINE_POLLING)
    assert re.findall("Unknown experiment: (.*)", ran.stderr) == complaint


@pytest.mark.parametrize(("release", "named"), [("1.85.1", "operator's"), ("1.86.0", None)])
def test_neither_an_operator_nor_another_release_is_told(
    monkeypatch: pytest.MonkeyPatch, release: str, named: str | None
) -> None:
    # Both, so that the variable is again what it was.
    monkeypatch.setenv(EXPERIMENTS, named or "")
    if named is None:
        monkeypatch.delenv(EXPERIMENTS)
    monkeypatch.setattr(imports, "version", lambda _name: release)
    poll_inline()
    assert os.environ.get(EXPERIMENTS) == named
