"""Watches whether the client of an HTTP request is still there. Knows no content of requests and no generation.

The server cancels nothing when a client leaves; whoever works for one has to look (uvicorn, hypercorn and granian are
alike in that). So work is a task beside one that reads the connection.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from outrider.errors import OutriderError

ResultT = TypeVar("ResultT")


class ClientGone(OutriderError):
    """Nobody has to act: the client left before its answer was there."""

    status = "CANCELLED"
    reason = "CLIENT_GONE"
    exit_code = 75


async def departure(receive: Receive) -> None:
    """Returns when the client has left. What is left of its body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What the work returns or raises; raises ClientGone when the client leaves first, after the work was cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("The client left before its answer was there")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        # What work says while it is cancelled is for nobody any more.
        await asyncio.gather(working, leaving, return_exceptions=True)
