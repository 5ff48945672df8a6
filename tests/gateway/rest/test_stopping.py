"""A gateway that stops lets those who run end, and sends those who wait elsewhere, on either surface."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import eventually
from support.services.markov_services import Mischief, markov_stack, request

from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest, NotReady
from outrider.rpc.channels import open_channel

BODY = {"model": "markov", "prompt": "fox sea", "seed": 7, "max_tokens": 200}


async def test_who_waits_is_sent_elsewhere_and_who_runs_ends(words: str) -> None:
    """With a status and a time to come again, streaming or not; no client is cut off without a word."""
    async with markov_stack(words, rest_listen="127.0.0.1:0", max_requests=1, max_queue=8) as stack:
        admission = stack.gateway.frontend.admission
        async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}", timeout=60) as http:

            async def post(**fields: object) -> httpx.Response:
                return await http.post("/v1/completions", json={**BODY, **fields})

            first = admission.entry()
            await first.__aenter__()
            running = asyncio.create_task(post())
            await eventually(lambda: admission.waiting == 1)
            waiting = [asyncio.create_task(post(stream=stream)) for stream in (False, True)]
            call = asyncio.create_task(stack.run(request()))
            await eventually(lambda: admission.waiting == 4)
            await first.__aexit__(None, None, None)
            # It has its place now, and the others do not.
            await eventually(lambda: admission.waiting == 3)
            await stack.gateway.stop(20)
            answer = await running
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 200)
            for refused in await asyncio.gather(*waiting):
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "not_ready"
            with pytest.raises(NotReady, match="stopping"):
                await call


@pytest.mark.slow
async def test_whose_time_is_over_is_told_so(words: str) -> None:
    """Before connections are cut: a status and a time to come again where there is no head yet, else a last event."""
    async with markov_stack(words, rest_listen="127.0.0.1:0") as stack:
        stack.target.mischief = dict.fromkeys(range(10, 1000), Mischief.FROZEN)
        async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}", timeout=60) as http:

            async def post(**fields: object) -> httpx.Response:
                return await http.post("/v1/completions", json={**BODY, "ignore_eos": True, **fields})

            running = [asyncio.create_task(post(stream=stream)) for stream in (False, True)]
            call = asyncio.create_task(stack.run(request(200)))
            await eventually(lambda: stack.target.answers >= 12)
            await stack.gateway.stop(2)
            whole, stream = await asyncio.gather(*running)
            assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
            assert whole.json()["error"]["code"] == "not_ready"
            *_, last, end = stream.text.split("\n\n")
            assert (json.loads(last.removeprefix("data: "))["error"]["code"], end) == ("not_ready", "")
            with pytest.raises(NotReady, match="the time of its last requests is over"):
                await call


async def health(address: str) -> int:
    """What a gateway's health service says."""
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(answer.status)


async def test_the_ports_stay_open_until_those_who_run_have_ended(words: str) -> None:
    """A client that comes reads why and when to come again, on a connection that is not kept; probes say the same."""
    async with markov_stack(words, rest_listen="127.0.0.1:0", lame_duck_seconds=0.01) as stack:
        gateway = stack.gateway
        async with httpx.AsyncClient(base_url=f"http://{gateway.rest_address}", timeout=60) as http:
            async with gateway.frontend.admission.entry():
                stopping = asyncio.create_task(gateway.stop(600))

                async def is_refused() -> bool:
                    return (await http.post("/v1/completions", json=BODY)).status_code == 503

                await eventually(is_refused)
                for reply in (await http.post("/v1/completions", json=BODY), await http.get("/ready")):
                    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                    assert reply.headers["connection"] == "close"
                    assert reply.json()["error"]["code"] == "not_ready"
                assert (await http.get("/live")).status_code == 200
                with pytest.raises(NotReady, match="stopping"):
                    await stack.run(request())
                assert await health(gateway.address) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert not stopping.done()
            await stopping
            with pytest.raises(httpx.ConnectError):
                await http.get("/live")


async def test_a_lame_duck_takes_requests_while_it_says_that_it_stops(words: str) -> None:
    """So balancers send no more clients before any is turned away."""
    async with markov_stack(words, rest_listen="127.0.0.1:0", lame_duck_seconds=600, drain_seconds=600) as stack:
        gateway = stack.gateway
        async with httpx.AsyncClient(base_url=f"http://{gateway.rest_address}", timeout=60) as http:
            stopping = asyncio.create_task(gateway.stop(600))
            await eventually(lambda: gateway.frontend.admission.is_leaving)
            assert (await http.get("/ready")).status_code == 503
            assert await health(gateway.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            reply = await http.post("/v1/completions", json=BODY)
            assert (reply.status_code, reply.headers["connection"]) == (200, "close")
            await stack.run(request())
        stopping.cancel()


def test_a_lame_duck_is_part_of_the_drain() -> None:
    """What would outlast it is refused at the start."""
    settings = GatewaySettings("a:1", "model", drain_seconds=5, lame_duck_seconds=5)
    with pytest.raises(InvalidRequest, match="lame_duck_seconds is 6, but must be at most drain_seconds, 5"):
        replace(settings, lame_duck_seconds=6)
