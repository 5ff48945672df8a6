"""A draft that lies, in a process of its own, about whatever it is asked to."""

import asyncio
from collections.abc import Sequence
from multiprocessing.connection import Connection

from support.services.lying_draft import ANSWERS, MANNERS, Lie, Manner, lies, lying_draft

LIES: Sequence[tuple[Lie | None, Manner | None]] = [
    *((lie, None) for answer in ANSWERS for lie in lies(answer)),
    *((None, manner) for manner in MANNERS),
]
"""Lies about every field of every message, and about what messages come at all."""


def lie_for(behind: str, orders: Connection) -> None:
    """Stands before a draft service; prints its own address, and then lies as each number says, until there is none."""
    asyncio.run(_lie_for(behind, orders))


async def _lie_for(behind: str, orders: Connection) -> None:
    async with lying_draft(behind) as (draft, address):
        orders.send(address)
        while (number := await asyncio.to_thread(orders.recv)) is not None:
            told = draft.told
            draft.become(*LIES[number])
            orders.send(told)
