"""Both clients against a gateway that follows a script: reading, ending early, and everything that can go wrong."""

import asyncio
import gc
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from support.command_line import ScriptedGateway, scripted_gateway

from outrider.cli.local_stack import vocabulary_of
from outrider.cli.model_facts import model_facts
from outrider.client import AsyncClient, Cancelled, Client, InvalidRequest, OutriderError, PeerLost, TimedOut

ROOT = Path(__file__).resolve().parents[3]
PIECES = ["Once", " upon a", "!"]
ResultT = TypeVar("ResultT")


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


async def blocking(address: str, use: Callable[[Client], ResultT], **settings: Any) -> ResultT:
    """Uses a blocking client in another thread, since this one carries the gateway."""

    def run() -> ResultT:
        with Client(address, **settings) as client:
            return use(client)

    return await asyncio.to_thread(run)


def outcome_of(client: Client, prompt: str, **options: Any) -> OutriderError:
    """The error that a request ends with."""
    with pytest.raises(OutriderError) as raised:
        client.generate(prompt, **options).result()
    return raised.value


async def async_outcome_of(address: str, prompt: str, **options: Any) -> OutriderError:
    """Error that a request ends with in asyncio."""
    async with AsyncClient(address) as client:
        with pytest.raises(OutriderError) as raised:
            await client.generate(prompt, **options).result()
    return raised.value


async def test_text_comes_in_pieces_and_the_answer_behind_them(gateway: ScriptedGateway) -> None:
    """What was read as text is part of the result as well; both clients say the same."""

    def read(client: Client) -> Any:
        stream = client.generate("Hello")
        return list(stream.text()), stream.result()

    pieces, answer = await blocking(gateway.address, read)
    assert (pieces, answer.text, answer.token_ids) == (PIECES, "".join(PIECES), (4, 5, 2))
    async with AsyncClient(gateway.address) as client:
        stream = client.generate("Hello")
        assert [piece async for piece in stream.text()] == PIECES
        assert await stream.result() == answer
        assert await client.chat([{"role": "user", "content": "Hello"}], seed=7).result() == answer
    assert (answer.result.seed, answer.result.cached_prompt_tokens) == (7, 1)


async def test_text_of_one_of_several_samples(gateway: ScriptedGateway) -> None:
    """The events mix, the text does not."""
    async with AsyncClient(gateway.address) as client:
        stream = client.generate("Hello", sample_count=3)
        assert [piece async for piece in stream.text(1)] == ["one", " two", "!"]
        assert [sample.result.seed for sample in (await stream.result()).samples] == [70, 71, 72]


async def end_by_leaving(client: AsyncClient) -> None:
    async with client.generate("wait") as stream:
        await anext(stream)


async def end_by_cancel(client: AsyncClient) -> None:
    stream = client.generate("wait")
    async for _ in stream:
        stream.cancel()
    with pytest.raises(Cancelled):
        await stream.result()


async def end_by_another_task(client: AsyncClient) -> None:
    stream = client.generate("wait")
    await anext(stream)
    reading = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.cancel()
    assert await reading is None


async def end_by_cancelled_task(client: AsyncClient) -> None:
    stream = client.generate("wait")
    await anext(stream)
    reading = asyncio.ensure_future(stream.result())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def end_by_dropping(client: AsyncClient) -> None:
    async for _ in client.generate("wait").text():
        break
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [end_by_leaving, end_by_cancel, end_by_another_task, end_by_cancelled_task, end_by_dropping]
)
async def test_ending_early_ends_the_call(gateway: ScriptedGateway, end: Callable[[AsyncClient], Any]) -> None:
    """However a stream is given up, the gateway learns it, and the client goes on."""
    async with AsyncClient(gateway.address) as client:
        await end(client)
        await asyncio.wait_for(gateway.cancelled.wait(), 120)
        assert (await client.generate("Hello").result()).text == "Once upon a!"


def leave(client: Client) -> None:
    with client.generate("wait") as stream:
        next(stream)


def cancel(client: Client) -> None:
    stream = client.generate("wait")
    for _ in stream:
        stream.cancel()
    with pytest.raises(Cancelled):
        stream.result()


def drop(client: Client) -> None:
    for _ in client.generate("wait").text():
        break
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("end", [leave, cancel, drop])
async def test_ending_early_without_an_event_loop(gateway: ScriptedGateway, end: Callable[[Client], None]) -> None:
    """The same for the blocking client."""
    client = Client(gateway.address)
    await asyncio.to_thread(end, client)
    await asyncio.wait_for(gateway.cancelled.wait(), 120)
    assert (await asyncio.to_thread(lambda: client.generate("Hello").result().text)) == "Once upon a!"
    client.close()


async def test_a_refusal_is_the_error_that_the_gateway_raised(gateway: ScriptedGateway) -> None:
    """Class, sentence and metadata survive the way; reading again says the same."""
    for error in (
        await blocking(gateway.address, lambda client: outcome_of(client, "refuse")),
        await async_outcome_of(gateway.address, "refuse"),
    ):
        assert type(error) is InvalidRequest
        assert error.metadata == {"field": "temperature", "value": "-1.0", "limit": "at least 0"}
    async with AsyncClient(gateway.address) as client:
        stream = client.generate("refuse")
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="temperature"):
                await stream.result()


async def test_time_runs_out(gateway: ScriptedGateway) -> None:
    """The client's own limit, or that of one call, in a sentence that says what to do."""
    sentence = "No whole answer within 0.05 s; allow more time with timeout_s, or ask for fewer tokens."
    error = await blocking(gateway.address, lambda client: outcome_of(client, "wait"), timeout_s=0.05)
    assert (type(error), error.message) == (TimedOut, sentence)
    error = await async_outcome_of(gateway.address, "wait", timeout_s=0.05)
    assert (type(error), error.message) == (TimedOut, sentence)


async def test_nobody_answers(gateway: ScriptedGateway) -> None:
    """One sentence with the way out; the loss of one of its services is reported as it is."""
    sentence = "Nothing answers on 127.0.0.1:1 (any more); `outrider up` starts a stack."
    error = await blocking("127.0.0.1:1", lambda client: outcome_of(client, "Hello"))
    assert (type(error), error.message) == (PeerLost, sentence)
    assert (await async_outcome_of("127.0.0.1:1", "Hello")).message == sentence
    behind = await async_outcome_of(gateway.address, "lose")
    assert (type(behind), behind.message) == (PeerLost, "UNAVAILABLE: Socket closed")


async def test_a_gateway_that_is_lost_in_the_middle() -> None:
    """What came is there, and then the same sentence."""
    async with scripted_gateway() as gateway:
        client = AsyncClient(gateway.address)
        stream = client.generate("wait")
        await anext(stream)
    with pytest.raises(PeerLost, match="Nothing answers"):
        await stream.result()
    await client.close()


async def test_a_service_that_is_no_gateway() -> None:
    """A server without the method is named as what it is not."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    error = await async_outcome_of(address, "Hello")
    assert error.message == f"address is '{address}', but must be that of a gateway"
    await server.stop(0)


async def test_a_message_that_is_none_is_no_end() -> None:
    """What cannot be read is the fault of who sent it, and no answer that ended."""

    async def answer(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield b"\xff" * 10

    async def info(_request: bytes, _context: object) -> bytes:
        return b"\xff" * 10

    methods = {
        "outrider.v1.GenerationService": {"Generate": grpc.unary_stream_rpc_method_handler(answer)},
        "outrider.v1.ModelService": {"GetModelInfo": grpc.unary_unary_rpc_method_handler(info)},
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, handlers) for name, handlers in methods.items())
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    sentence = f"What answers at {address} sent a message that is not valid"
    for error in (
        await async_outcome_of(address, "Hello"),
        await blocking(address, lambda client: outcome_of(client, "Hello")),
    ):
        assert (type(error), error.message) == (PeerLost, sentence)
    for ask in (model_facts, vocabulary_of):
        with pytest.raises(PeerLost, match=sentence):
            await ask(address)
    await server.stop(0)


async def test_metadata_travels(gateway: ScriptedGateway) -> None:
    """The client's own and the call's, with keys in lower case, and bytes where the key says so."""
    settings = {"metadata": {"Traceparent": "00-ab-cd-01"}}
    await blocking(
        gateway.address,
        lambda client: client.generate("a", metadata=[("X-Who", "me"), ("x-id-bin", b"\x00\xff")]).result(),
        **settings,
    )
    [metadata] = gateway.metadata
    assert (metadata["traceparent"], metadata["x-who"], metadata["x-id-bin"]) == ("00-ab-cd-01", "me", b"\x00\xff")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"address": "localhost"}, r"^address is 'localhost', but must be HOST:PORT"),
        ({"address": 50050}, r"^address is 50050, but must be text, HOST:PORT$"),
        ({"timeout_s": 0}, r"^timeout_s is 0, but must be a number more than 0, and at most 1000000000$"),
        ({"metadata": {"x": "é"}}, r"^metadata\.x is 'é', but must be text of printable ASCII"),
    ],
)
def test_wrong_settings_are_told_at_once(settings: dict[str, Any], sentence: str) -> None:
    """Before there is a connection; the same for both clients."""
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest, match=sentence):
            kind(**{"address": "127.0.0.1:1", **settings})


def test_the_package_says_that_it_is_typed() -> None:
    """By the marker of PEP 561, beside its code and in what is installed from a wheel."""
    assert resources.files("outrider").joinpath("py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["outrider"]


LIGHT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "transformers", "safetensors", "huggingface_hub", "tokenizers"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import outrider.client
heavy = [name for name in sys.modules if name.split(".")[0] in {"torch", "numpy"} or name.startswith("outrider.engine")]
print(heavy)
"""


@pytest.mark.slow
def test_the_client_works_without_the_engine() -> None:
    """Where only the gateway's dependencies are installed, it can be imported, and it brings nothing heavy along."""
    ended = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"
