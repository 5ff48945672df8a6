"""A draft that lies about every field of every message, beside streams that do no harm: a part of `make test-fuzz`."""

import asyncio
from multiprocessing import get_context

import pytest
from attack.liar import LIES, lie_for
from attack.streams import IS_LONG, OPENINGS, Streams
from support.basics import eventually
from support.stack import DRAFT, TARGET

from outrider.cli.local_stack import Addresses, Stack, gateway_launch, metrics_address, model_launch
from outrider.cli.running import note
from outrider.cli.up import memory_bytes
from outrider.client import AsyncClient, Speculation
from outrider.process.children import Supervisor
from outrider.process.metrics import scraped
from outrider.token_tree import TreeShape

# Every lie takes some three seconds; `make test-slow` has one of 25, and all that is wrong with the call itself.
TOLD = [number for number, (lie, _) in enumerate(LIES) if IS_LONG or lie is None or number % 25 == 0]
PATIENCE_S = 60.0
# Of the gateway, over what it holds when all have spoken once.
MEMORY_MB = 64
ASKED = (
    Speculation(),
    Speculation(draft_count=4),
    Speculation(draft_count=6, shape=TreeShape(max_depth=4), return_rounds=True),
    # Refused where the draft does not offer it, as it says of itself.
    Speculation(draft_count=4, drafter="model"),
)


@pytest.mark.slow
async def test_no_lie_of_a_draft_is_felt_by_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and those who name the liar hear what they hear without it, the gateway's memory stays, faults count."""
    monkeypatch.setenv("OUTRIDER_LEASE_SECONDS", "1")
    log: list[str] = []
    orders, theirs = get_context("spawn").Pipe()
    async with Supervisor(log.append, lambda name, line: log.append(f"{name}: {line}")) as supervisor:
        stack = Stack(TARGET, DRAFT, rest_port=0)
        target, draft = await supervisor.start(*(model_launch(role, stack) for role in ("target", "draft")))
        liar = get_context("spawn").Process(target=lie_for, args=(draft, theirs), daemon=True)
        liar.start()
        [gateway] = await supervisor.start(gateway_launch(stack, target, await asyncio.to_thread(orders.recv)))
        places = supervisor.addresses("gateway")
        addresses = Addresses(gateway, target, draft, places["rest"])
        async with Streams(addresses) as streams, AsyncClient(gateway) as client:

            async def said(speculation: Speculation) -> list[int]:
                stream = client.generate(
                    OPENINGS[0], seed=1, max_tokens=16, temperature=0.8, ignore_eos=True, speculation=speculation
                )
                return [token.token_id for token in (await stream.result()).samples[0].tokens]

            plain = await said(Speculation(enabled=False))
            before = memory_bytes(supervisor.pid("gateway")) or 0

            async def counts(number: int) -> tuple[int, int]:
                """Has the draft lie, where it does not yet: handshakes since, and messages with the lie."""
                orders.send(number)
                return await asyncio.to_thread(orders.recv)  # type: ignore[no-any-return]

            async def tell(number: int) -> None:
                """Has the draft lie, and asks until that was heard; the gateway has to find it again first."""
                lie, manner = LIES[number]
                is_greeting = lie is not None and lie.path[0].containing_type.name == "GetModelInfoResponse"

                async def is_found() -> bool:
                    return (await counts(number))[0] > 0

                async def is_heard() -> bool:
                    for found in await asyncio.gather(*map(said, ASKED[:-1] if is_greeting else ASKED)):
                        assert found == plain, lie or manner
                    return (await counts(number))[1] > 0

                await eventually(is_found, PATIENCE_S)
                await eventually(is_heard, PATIENCE_S)

            async with streams.running():
                for number in TOLD:
                    await tell(number)
            after = memory_bytes(supervisor.pid("gateway")) or 0
            figures = await asyncio.to_thread(scraped, metrics_address(places), ["outrider_service_faults_total"], 60.0)
        orders.send(None)
        await asyncio.to_thread(liar.join)
    faults = sum(float(line.split()[-1]) for line in figures[0].decode().splitlines() if "draft" in line)
    note(f"{len(TOLD)} lies were heard, {faults:.0f} faults counted; {(after - before) / 1e6:.0f} MB more.")
    assert faults > 0
    assert not [line for line in log if '"level": "error"' in line or '"level": "critical"' in line]
    assert after < before + (MEMORY_MB << 20)
