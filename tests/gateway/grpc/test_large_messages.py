"""Messages that become far more than they are: a gateway as a process, with the memory that it has at most."""

import asyncio
from collections import Counter
from contextlib import suppress

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct, Value
from support.requests.heavy_messages import GENERATE, heavy_messages
from support.requests.silent_calls import CALL, PREFACE
from support.services.gateway_process import gateway_process

from outrider.rpc.channels import open_channel
from outrider.rpc.guard import MAX_FIELDS, num_fields
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

# gRPC's own are beside it, and the message while it is parsed.
BUDGET_MIB, BESIDE_MIB = 256, 192
AT_A_TIME = 60
NUM_SILENT = 200


async def code_of(channel: grpc.aio.Channel, path: str, message: bytes) -> str:
    """Status of a call that sends a message and reads all that comes."""
    call = channel.unary_stream(path)(message, timeout=120)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return str((await call.code()).name)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_messages_take_more_memory_than_they_may(tokenizer: str) -> None:
    """Sixty at once of any kind, each on a connection of its own; ordinary requests are answered meanwhile."""

    async def code_at(address: str, path: str, message: bytes) -> str:
        async with open_channel(address) as channel:
            return await code_of(channel, path, message)

    right = pb.GenerateRequest(text="fox sea", max_tokens=4).SerializeToString()
    async with gateway_process(tokenizer, "--request-memory-mib", str(BUDGET_MIB)) as gateway:
        assert await code_at(gateway.address, GENERATE, right) == "OK"
        before, kinds = gateway.peak_bytes, [*heavy_messages().values()]
        sent = asyncio.gather(*(code_at(gateway.address, *kinds[number % len(kinds)]) for number in range(AT_A_TIME)))
        # Who asks for health needs no key.
        health = asyncio.gather(
            *(
                code_at(gateway.address, "/grpc.health.v1.Health/Check", b"\x0a\x80\x80\x80\x01" + b"x" * (2 << 20))
                for _ in range(AT_A_TIME)
            )
        )
        assert [await code_at(gateway.address, GENERATE, right) for _ in range(5)] == ["OK"] * 5
        codes = Counter([*await sent, *await health])
        assert not {*codes} - {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND"}, codes
        assert gateway.peak_bytes - before < (BUDGET_MIB + BESIDE_MIB) << 20
        for name, (path, message) in heavy_messages().items():
            assert await code_at(gateway.address, path, message) == "INVALID_ARGUMENT", name
    assert not [line for line in gateway.lines if '"level": "error"' in line]


@pytest.mark.slow
async def test_calls_without_a_message_keep_nobody_out(tokenizer: str) -> None:
    """Two hundred connections that begin a call and say no more; requests are answered, of new connections too."""
    host = "127.0.0.1"
    async with gateway_process(tokenizer, "--request-memory-mib", str(BUDGET_MIB)) as gateway:
        port = int(gateway.address.rpartition(":")[2])
        right = pb.GenerateRequest(text="fox sea", max_tokens=4).SerializeToString()
        async with open_channel(gateway.address) as known:
            assert await code_of(known, GENERATE, right) == "OK"
            writers = []
            for _ in range(NUM_SILENT):
                _, writer = await asyncio.open_connection(host, port)
                writer.write(PREFACE + CALL)
                writers.append(writer)
            for _ in range(5):
                async with open_channel(gateway.address) as fresh:
                    assert await code_of(known, GENERATE, right) == "OK"
                    assert await code_of(fresh, GENERATE, right) == "OK"
            for writer in writers:
                writer.close()
    assert not [line for line in gateway.lines if '"level": "error"' in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.GenerateRequest(text="a", stop=["b", "c"], seed=7), 4),
        (pb.GenerateRequest(token_ids=types_pb2.TokenIds(token_ids=[1, 300, 5])), 2),
        (pb.GenerateRequest(sampling=types_pb2.SamplingParameters(temperature=0.5, logit_bias={1: 1.0, 2: 2.0})), 8),
        (pb.ChatRequest(template_variables=Struct(fields={"a": Value(number_value=1)})), 5),
    ],
)
def test_fields_are_counted_with_those_of_messages_within(message: pb.GenerateRequest, expected: int) -> None:
    """Of maps as well, and no further than to one too many; what is cut off has no more."""
    data = message.SerializeToString()
    assert num_fields(data, message.DESCRIPTOR) == expected
    for end in range(len(data)):
        assert num_fields(data[:end], message.DESCRIPTOR) <= expected
    assert num_fields(data * 100_000, message.DESCRIPTOR) == MAX_FIELDS + 1
