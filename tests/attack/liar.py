"""A draft that lies, in a process of its own, about whatever it is asked to."""

import asyncio
from collections.abc import Sequence
from multiprocessing.connection import Connection

from support.services.lying_draft import ANSWERS, MANNERS, Lie, Manner, lies, lying_draft, silent

from outrider.v1 import model_service_pb2 as model_pb

ROLLBACK = model_pb.RollbackResponse.DESCRIPTOR

LIES: Sequence[tuple[Lie | None, Manner | None]] = [
    # A draft that is late is taken back.
    *((lie, silent if answer is ROLLBACK else None) for answer in ANSWERS for lie in lies(answer)),
    *((None, manner) for manner in MANNERS),
]
"""Lies about every field of every message, and about what messages come at all."""


def lie_for(behind: str, orders: Connection) -> None:
    """Stands before a draft service; sends its own address, and then lies as each number says, until there is none.

    It answers each number by how many handshakes there have been since, and how many messages have had that lie.
    """
    asyncio.run(_lie_for(behind, orders))


async def _lie_for(behind: str, orders: Connection) -> None:
    async with lying_draft(behind) as (draft, address):
        orders.send(address)
        current = None
        while (number := await asyncio.to_thread(orders.recv)) is not None:
            if number != current:
                draft.become(*LIES[number])
                current = number
            orders.send((draft.greeted, draft.told))
