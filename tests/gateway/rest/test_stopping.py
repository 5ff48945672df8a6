"""A gateway that stops lets those who run end, and sends those who wait elsewhere, on either surface."""

import asyncio

import httpx
import pytest
from support.basics import eventually
from support.markov_services import markov_stack, request

from outrider.errors import NotReady

BODY = {"model": "markov", "prompt": "fox sea", "seed": 7, "max_tokens": 200}


async def test_who_waits_is_sent_elsewhere_and_who_runs_ends(words: str) -> None:
    """With a status and a time to come again, streaming or not; nobody is cut off without a word."""
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
