"""Keys at a gateway's doors: every route that there is and every method that is reflected asks for one.

What is open is listed here once; whatever else a gateway learns to serve is closed, or one of these tests fails.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from support.basics import eventually
from support.keys import bearer, key_of, samples_of, write_keys
from support.rest.rest_stack import exchange
from support.services.markov_services import MarkovStack, markov_stack, request, write_tokenizer

from gateway.generation.admission import Reservation
from gateway.keys.door import REST
from gateway.keys.tenant import Tenant
from gateway.keys.usage import OwnUsage
from gateway.rest.guard import LIMIT_HEADERS
from outrider.client import AsyncClient, Client
from outrider.errors import InvalidKey, InvalidRequest, OutriderError, RateLimited
from outrider.process.metrics import exposition
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPEN_ROUTES = {
    (method, path) for method in ("GET", "HEAD") for path in ("/live", "/ready", "/health", "/", "/static/{name:path}")
}
OPEN_SERVICE = "grpc.health.v1.Health"
WRONG = ({}, {"authorization": "Bearer wrong"}, {"x-api-key": key_of("nobody")}, {"authorization": key_of("alice")})
ORIGIN = "https://page.example"
JSON = {"content-type": "application/json"}
PATIENCE_S = 120.0
NAMES: dict[str, dict[str, int | bool]] = {
    "operator": {"metrics": True},
    "alice": {},
    "few": {"requests_per_minute": 50},
    "thrifty": {"tokens_per_minute": 60},
    "narrow": {"concurrent_samples": 7},
    "short": {"max_tokens": 5, "tokens_per_minute": 1000},
    "frugal": {"tokens_per_minute": 60},
    "leaver": {},
    "faulty": {"requests_per_minute": 5},
    "verbose": {"tokens_per_minute": 60},
    "patient": {"priority": 5},
    "urgent": {"priority": -5},
}
RIGHT = (bearer("operator"), {"x-api-key": key_of("operator")})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys: one without limits that may read the figures, and some with one limit each."""
    return Path(write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", **NAMES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MarkovStack]:
    """A gateway that asks for keys, on both surfaces."""
    options = {
        "rest_listen": "127.0.0.1:0",
        "reflection": True,
        "cors_origins": ORIGIN,
        "api_keys": str(keys),
        "max_requests": 4,
        "max_queue": 300,
    }
    words = write_tokenizer(tmp_path_factory.mktemp("words"))
    async with markov_stack(words, **options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(stack: MarkovStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key of its own."""
    url = f"http://{stack.gateway.rest_address}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def routes_of(stack: MarkovStack) -> set[tuple[str, str]]:
    """Methods and paths that the application really has."""
    assert stack.gateway.rest is not None
    app: Any = stack.gateway.rest.server.config.app
    # A router that was included stands in the list as one entry.
    routes = [
        each
        for one in app.routes
        for each in (one.original_router.routes if hasattr(one, "original_router") else [one])
    ]
    return {(method, route.path) for route in routes for method in route.methods}


async def test_every_route_asks_for_a_key(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """Those of the document and those that are not in it: 401 without a key and with a wrong one, and never with a
    right one; what is open says nothing of keys.
    """
    document = (await http.get("/openapi.json", headers=RIGHT[0])).json()
    documented = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert len(documented) > 10
    routes = routes_of(stack)
    assert {(method, path.replace("{model}", "{model:path}")) for method, path in documented} <= routes
    assert routes >= OPEN_ROUTES | {("POST", "/page/generate"), ("GET", "/openapi.json"), ("GET", "/metrics")}
    for method, route in sorted(routes):
        path = re.sub(r"\{.*?\}", "main.js", route)
        body = {"json": {}} if method == "POST" else {}
        refused = [(await http.request(method, path, headers=headers, **body)).status_code for headers in WRONG]
        let_in = [(await http.request(method, path, headers=headers, **body)).status_code for headers in RIGHT]
        is_open = (method, route) in OPEN_ROUTES
        assert (set(refused) == {401}) is not is_open, (method, route, refused)
        assert not {401, 403} & {*let_in, *(refused if is_open else ())}, (method, route, let_in)
    for operation in (document["paths"][path][method.lower()] for method, path in documented - OPEN_ROUTES):
        assert {"401", "403"} <= set(operation["responses"])
        assert operation["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "security" not in document["paths"]["/live"]["get"]


async def test_what_nobody_serves_asks_for_a_key_too(http: httpx.AsyncClient) -> None:
    """So that a stranger does not even learn what there is; and a method that opens nothing is no way around."""
    for method, path in (
        ("GET", "/nothing"),
        ("POST", "/live"),
        ("OPTIONS", "/v1/models"),
        ("GET", "/static"),
    ):
        assert (await http.request(method, path)).status_code == 401, path
    assert (await http.get("/nothing", headers=RIGHT[0])).status_code == 404
    assert (await http.get("/static/../metrics")).status_code == 401
    assert (await http.get("/static/%2e%2e/metrics")).status_code in (401, 404)


async def test_a_refusal_has_the_shape_of_the_clients_that_read_it(http: httpx.AsyncClient) -> None:
    """OpenAI's, and below /v1/messages Anthropic's; it says how to send a key, and not which one came."""
    refused = await http.post("/v1/chat/completions", json={}, headers={"x-api-key": "sk-wrong"})
    told = refused.json()["error"]
    assert (told["type"], told["param"], told["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert (refused.headers["www-authenticate"], refused.headers["x-should-retry"]) == ("Bearer", "false")
    assert "sk-wrong" not in refused.text
    assert "authorization: Bearer" in (await http.get("/v1/models")).json()["error"]["message"]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (await http.post(path, json={})).json()["error"]["type"] == "authentication_error"
        assert (await http.post(path, json={})).json()["type"] == "error"
    forbidden = await http.get("/metrics", headers=bearer("alice"))
    assert forbidden.status_code == 403
    assert forbidden.json()["error"]["code"] == "key_forbidden"
    assert "metrics = true" in forbidden.json()["error"]["message"]


async def test_a_page_of_a_named_site_reads_why_it_was_refused(http: httpx.AsyncClient) -> None:
    """Browsers ask without a key whether they may send one; the page reads the refusal, and what is left of limits."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await http.options("/v1/completions", headers={"origin": ORIGIN, **asked})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = await http.post("/v1/completions", json={}, headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert set(LIMIT_HEADERS) <= set(refused.headers["access-control-expose-headers"].split(", "))


async def reflected(channel: grpc.aio.Channel, *asked: reflection_pb2.ServerReflectionRequest) -> Any:
    """What the reflection service answers to a key."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter(asked), metadata=tuple(RIGHT[0].items()))
    return [answer async for answer in call]


def methods_of(answer: reflection_pb2.ServerReflectionResponse, service: str) -> Iterator[str]:
    """The full names of the methods of a service."""
    for content in answer.file_descriptor_response.file_descriptor_proto:
        file = FileDescriptorProto.FromString(content)
        for each in file.service:
            if f"{file.package}.{each.name}" == service:
                yield from (f"/{service}/{method.name}" for method in each.method)


async def code_of(channel: grpc.aio.Channel, method: str, metadata: dict[str, str]) -> grpc.StatusCode:
    """How a call with one empty message ends, whatever the method takes and gives.

    Who is refused before the message is read may find the stream reset while it writes, which is INTERNAL: it asks
    again.
    """
    code = grpc.StatusCode.INTERNAL
    for _ in range(5):
        call = channel.stream_stream(method)(iter([b""]), metadata=tuple(metadata.items()), timeout=60)
        try:
            # One answer is enough: those that watch never end.
            await call.read()
            call.cancel()
            return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        if code is not grpc.StatusCode.INTERNAL:
            break
    return code


async def test_every_method_asks_for_a_key(stack: MarkovStack) -> None:
    """Those of every service that is reflected, reflection itself included; only health is open."""
    async with open_channel(stack.gateway.address) as channel:
        listed = await reflected(channel, reflection_pb2.ServerReflectionRequest(list_services=""))
        services = [service.name for service in listed[0].list_services_response.service]
        asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=service) for service in services]
        answers = await reflected(channel, *asked)
        methods = [name for pair in zip(answers, services, strict=True) for name in methods_of(*pair)]
        assert {name.split("/")[1] for name in methods} == set(services)
        assert {"/outrider.v1.GenerationService/Generate", "/outrider.v1.GenerationService/Chat"} <= set(methods)
        for method in [*methods, "/outrider.v1.GenerationService/Nothing", "/nobody.Service/Method"]:
            refused = {await code_of(channel, method, headers) for headers in WRONG}
            let_in = {await code_of(channel, method, headers) for headers in RIGHT}
            if method.split("/")[1] == OPEN_SERVICE:
                assert grpc.StatusCode.UNAUTHENTICATED not in refused | let_in, method
            else:
                assert refused == {grpc.StatusCode.UNAUTHENTICATED}, method
                assert not {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED} & let_in, method
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_client_sends_its_key_and_shows_it_nowhere(stack: MarkovStack) -> None:
    """The error of a wrong one is typed; one that cannot travel is refused without being repeated."""
    address = stack.gateway.address
    async with AsyncClient(address, api_key=key_of("alice")) as client:
        assert (await client.generate("fox sea", max_tokens=4, seed=1).result()).text
    async with AsyncClient(address, api_key="sk-wrong") as client:
        with pytest.raises(InvalidKey) as refused:
            await client.generate("fox sea", max_tokens=4).result()
    assert refused.value.reason == "INVALID_API_KEY"
    assert "sk-wrong" not in f"{refused.value!r} {vars(refused.value)}"
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidKey, match="No API key came"):
            await client.chat([{"role": "user", "content": "fox"}]).result()
    with Client(address, api_key=key_of("alice")) as blocking:
        answer = await asyncio.to_thread(lambda: blocking.generate("fox sea", max_tokens=4, seed=1).result())
        assert answer.text
        assert key_of("alice") not in repr(blocking._caller.terms({}))
    for wrong in ("sk-\nsecret", "sk-sécret", ""):
        with pytest.raises(InvalidRequest, match="api_key") as raised:
            Client(address, api_key=wrong)
        assert "cret" not in f"{raised.value} {raised.value.metadata}"


async def ask(http: httpx.AsyncClient, name: str, **body: object) -> httpx.Response:
    """A completion with the key of a name."""
    asked = {"prompt": "fox sea", "max_tokens": 4, "seed": 1, "temperature": 0, "ignore_eos": True, **body}
    return await http.post("/v1/completions", json=asked, headers=bearer(name))


def still(stack: MarkovStack, name: str) -> Tenant:
    """The holder of a name's key, for whose limits time stands still: requests at once are so on any machine."""
    assert stack.gateway.door is not None
    tenant = stack.gateway.door.enter(REST, [], [key_of(name).encode()])
    tenant.usage = OwnUsage(lambda: 1000.0)
    return tenant


async def call(stack: MarkovStack, name: str) -> pb.Completion | OutriderError:
    """Asks over gRPC; returns the end of the answer, or what was raised instead."""
    try:
        asked = request(4, sampling=types_pb2.SamplingParameters(temperature=0, ignore_eos=True))
        return [each async for each in stack.generate(asked, metadata=tuple(bearer(name).items()))][-1].completion
    except grpc.aio.AioRpcError as error:
        return error_from(error)


@contextmanager
def taken_out(keys: Path, name: str) -> Iterator[None]:
    """While it is open, the file does not list a name."""
    write_keys(keys, **{each: limits for each, limits in NAMES.items() if each != name})
    try:
        yield
    finally:
        write_keys(keys, **NAMES)


@pytest.mark.slow
async def test_of_two_hundred_requests_at_once_as_many_are_served_as_may(
    stack: MarkovStack, http: httpx.AsyncClient
) -> None:
    """To the request, over both surfaces together; the others read when to come again."""
    still(stack, "few")
    calls = asyncio.gather(*(call(stack, "few") for _ in range(150)))
    answers = await asyncio.gather(*(ask(http, "few") for _ in range(50)))
    ends = await calls
    refused = [each for each in ends if isinstance(each, OutriderError)]
    assert {(type(each), each.metadata["retry_after_s"]) for each in refused} <= {(RateLimited, "2")}
    turned_away = [answer for answer in answers if answer.status_code == 429]
    assert 150 - len(refused) + [answer.status_code for answer in answers].count(200) == 50
    assert len(refused) + len(turned_away) == 150
    one = await ask(http, "few")
    assert one.status_code == 429
    assert (one.json()["error"]["type"], one.json()["error"]["code"]) == ("requests", "rate_limit_exceeded")
    for answer in (one, *turned_away):
        told = [answer.headers[name] for name in ("retry-after", *LIMIT_HEADERS[:2])]
        assert told == ["2", "50", "0"]
    assert one.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert "x-ratelimit-limit-tokens" not in one.headers


async def test_what_is_refused_counts_for_its_key(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """Once each, over both surfaces and wherever the fault is; then nothing long is read for that key any more."""
    tenant = still(stack, "faulty")
    headers = {**bearer("faulty"), **JSON}
    for path, content in (
        ("/v1/completions", b"{"),
        ("/v1/nothing", b"[]"),
        ("/v1/completions", b'{"prompt": 1}'),
        ("/v1/completions", b'{"prompt": "fox", "max_tokens": 100000}'),
    ):
        reply = await http.post(path, content=content, headers=headers)
        assert 400 <= reply.status_code < 429
    assert reply.headers["x-ratelimit-remaining-requests"] == "1"
    async with open_channel(stack.gateway.address) as channel:
        wrong = request(4, stop=["x"] * 100)
        asked = channel.unary_stream("/outrider.v1.GenerationService/Generate")
        got = await asked(wrong.SerializeToString(), metadata=tuple(bearer("faulty").items())).code()
    assert got is grpc.StatusCode.INVALID_ARGUMENT
    requests, _ = await tenant.allowances()
    assert requests is not None
    assert requests.remaining == 0
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-api-key: {key_of('faulty')}"
    )
    # Of whose body nothing ever comes.
    told = await exchange(str(stack.gateway.rest_address), f"{head}\r\ncontent-length: 100000\r\n\r\n".encode())
    assert told.startswith(b"HTTP/1.1 429 ")
    assert (await http.post("/tokenize", json={"prompt": "fox"}, headers=headers)).status_code == 200


async def test_a_refused_body_is_as_many_tokens_as_it_may_have_been(
    stack: MarkovStack, http: httpx.AsyncClient
) -> None:
    """Where a key's tokens alone are limited, what is wrong is no way around that."""
    tenant = still(stack, "verbose")
    await http.post("/v1/completions", content=b"[" * 80, headers={**bearer("verbose"), **JSON})
    _, tokens = await tenant.allowances()
    assert tokens is not None
    assert tokens.remaining == 40


async def test_tokens_of_a_key_are_never_more_than_may_be(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """Of 200 at once those run whose tokens fit, prompts included."""
    still(stack, "thrifty")
    ends = await asyncio.gather(*(call(stack, "thrifty") for _ in range(200)))
    usages = [end.usage for end in ends if not isinstance(end, OutriderError)]
    assert sum(usage.prompt_tokens + usage.completion_tokens for usage in usages) == 10 * (2 + 4) == 60
    assert {type(end) for end in ends if isinstance(end, OutriderError)} == {RateLimited}
    last = await ask(http, "thrifty")
    assert (last.status_code, last.json()["error"]["type"]) == (429, "tokens")
    assert (last.headers["x-ratelimit-remaining-tokens"], last.headers["x-ratelimit-reset-tokens"]) == ("0", "60.000s")
    assert last.headers["retry-after"] == "6"


@pytest.mark.slow
async def test_samples_of_a_key_are_never_more_than_may_be(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """Of 200 at once those that find room wait for their turn, and the others are refused. Later there is room."""
    tenant, admission = still(stack, "narrow"), stack.gateway.frontend.admission
    async with AsyncExitStack() as places:
        for _ in range(admission.places):
            await places.enter_async_context(admission.entry())
        calls = [asyncio.create_task(call(stack, "narrow")) for _ in range(200)]
        await eventually(lambda: sum(each.done() for each in calls) == 193, PATIENCE_S)
        await eventually(lambda: admission.waiting == 7, PATIENCE_S)
        assert await samples_of(tenant) == 7
    ends = await asyncio.gather(*calls)
    assert [type(end) for end in ends].count(RateLimited) == 193
    assert await samples_of(tenant) == 0
    assert (await ask(http, "narrow", n=7)).status_code == 200
    too_many = await ask(http, "narrow", n=8)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
    too_many = await ask(http, "narrow", prompt=["fox"] * 8)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
    assert "8 prompts" in too_many.json()["error"]["message"]


async def test_the_smallest_priority_of_a_key_comes_first(
    stack: MarkovStack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both surfaces: of three that wait for one place the last is the first, and the first the last."""
    admission, came = stack.gateway.frontend.admission, list[int]()
    take = admission.take

    async def noted(places: Reservation) -> None:
        await take(places)
        came.append(places.priority)

    async with AsyncExitStack() as places:
        held = [await places.enter_async_context(admission.entry()) for _ in range(admission.places)]
        monkeypatch.setattr(admission, "take", noted)
        waiting = list[asyncio.Task[Any]]()
        for asked in (call(stack, "patient"), ask(http, "alice"), call(stack, "urgent")):
            waiting.append(asyncio.create_task(asked))
            await eventually(lambda: admission.waiting == len(waiting), PATIENCE_S)
        admission.give_back(held[0])
        *_, urgent = await asyncio.gather(*waiting)
    assert came == [NAMES[name].get("priority", 0) for name in ("urgent", "alice", "patient")]
    assert urgent.usage.completion_tokens == 4


async def test_an_answer_is_no_longer_than_a_key_may_have_it(http: httpx.AsyncClient) -> None:
    """More is refused by name; who asks for nothing, or for all that there is, has as much as may be."""
    refused = await ask(http, "short", max_tokens=6)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("max_tokens is 6, but must be at most 5")
    assert (await ask(http, "short", max_tokens=None)).json()["usage"]["completion_tokens"] == 5
    asked = {"model": "outrider", "input": "fox sea", "seed": 1}
    said = await http.post("/v1/responses", json={**asked, "model": None}, headers=bearer("short"))
    assert said.json()["usage"]["output_tokens"] <= 5, said.text
    hopeless = await ask(http, "thrifty", max_tokens=500)
    assert hopeless.json()["error"]["param"] == "max_tokens"
    unsaid = await ask(http, "frugal", max_tokens=None, n=2)
    assert unsaid.status_code == 200, unsaid.text
    assert 29 <= unsaid.json()["usage"]["completion_tokens"] <= 2 * ((60 - 2) // 2)


async def test_an_answer_that_its_key_cuts_is_not_at_the_end_of_the_context(http: httpx.AsyncClient) -> None:
    """Agents would make the conversation shorter, and read the same again."""
    asked = {"model": "markov", "max_tokens": 50, "messages": [{"role": "user", "content": "fox sea"}], "seed": 1}
    message = (await http.post("/v1/messages", json=asked, headers=bearer("short"))).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 5)
    said = {"input": "fox sea", "max_output_tokens": 50, "seed": 1}
    response = (await http.post("/v1/responses", json=said, headers=bearer("short"))).json()
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_key_that_is_taken_out_opens_nothing_any_more(http: httpx.AsyncClient, keys: Path) -> None:
    """From the very next request on, also on a connection that is open already."""
    assert (await ask(http, "leaver")).status_code == 200
    with taken_out(keys, "leaver"):
        assert (await ask(http, "leaver")).status_code == 401
        assert (await ask(http, "alice")).status_code == 200
    assert (await ask(http, "leaver")).status_code == 200


async def test_a_key_that_is_taken_out_opens_nothing_over_grpc(stack: MarkovStack, keys: Path) -> None:
    """From the very next call on; a stream that has begun goes on to its end."""
    asked = request(400, sampling=types_pb2.SamplingParameters(temperature=0, ignore_eos=True))
    begun = aiter(stack.generate(asked, metadata=tuple(bearer("leaver").items())))
    assert (await anext(begun)).HasField("round")
    with taken_out(keys, "leaver"):
        assert isinstance(await call(stack, "leaver"), InvalidKey)
        assert [each async for each in begun][-1].completion.usage.completion_tokens > 100
    assert isinstance(await call(stack, "leaver"), pb.Completion)


async def test_a_body_that_comes_behind_the_end_of_its_key_begins_nothing(
    stack: MarkovStack, http: httpx.AsyncClient, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its headers were let in when the key still opened."""
    door, let_in, gone = stack.gateway.door, asyncio.Event(), asyncio.Event()
    assert door is not None
    enter = door.enter

    def entering(surface: str, authorization: list[bytes], x_api_key: list[bytes]) -> Tenant:
        tenant = enter(surface, authorization, x_api_key)
        let_in.set()
        return tenant

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "fox sea", '
        await gone.wait()
        yield b'"max_tokens": 4}'

    monkeypatch.setattr(door, "enter", entering)
    headers = {**bearer("leaver"), "content-type": "application/json"}
    asked = asyncio.create_task(http.post("/v1/completions", content=body(), headers=headers))
    await let_in.wait()
    with taken_out(keys, "leaver"):
        gone.set()
        refused = await asked
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_who_waits_for_a_place_behind_the_end_of_its_key_begins_nothing(
    stack: MarkovStack, http: httpx.AsyncClient, keys: Path
) -> None:
    """On both surfaces; its place is the next one's."""
    tenant, admission = still(stack, "leaver"), stack.gateway.frontend.admission
    async with AsyncExitStack() as places:
        for _ in range(admission.places):
            await places.enter_async_context(admission.entry())
        waiting = asyncio.gather(call(stack, "leaver"), ask(http, "leaver"), ask(http, "alice"))
        await eventually(lambda: admission.waiting == 3, PATIENCE_S)
        with taken_out(keys, "leaver"):
            await places.aclose()
            over_grpc, over_rest, other = await waiting
    assert isinstance(over_grpc, InvalidKey)
    assert (over_rest.status_code, other.status_code) == (401, 200)
    assert await samples_of(tenant) == 0


async def test_who_was_not_let_in_is_counted(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """By surface, whether no key came or an unknown one."""

    def counts() -> list[float]:
        text = exposition(stack.gateway.frontend.metrics.registry)[0].decode()
        lines = [line for line in text.splitlines() if line.startswith("outrider_key_refusals_total{")]
        figures = dict(line.rsplit(" ", 1) for line in lines)
        return [float(figures[f'outrider_key_refusals_total{{surface="{name}"}}']) for name in ("rest", "grpc")]

    before = counts()
    for name in ("nobody", "alice", "nobody"):
        await ask(http, name)
    await http.get("/v1/models")
    assert isinstance(await call(stack, "nobody"), InvalidKey)
    assert [new - old for new, old in zip(counts(), before, strict=True)] == [3, 1]


async def test_figures_and_lines_have_the_name_and_never_the_key(stack: MarkovStack, http: httpx.AsyncClient) -> None:
    """Tokens, requests and refusals by name; the line of a request says whose it was."""
    with capture_logs(processors=[merge_contextvars]) as lines:
        answer = await ask(http, "alice")
        await ask(http, "alice", max_tokens=10**6)
        await ask(http, "nobody")
    said = [line for line in lines if line["event"] in ("request ended", "request refused")]
    assert [(line["event"], line["key"]) for line in said] == [("request ended", "alice"), ("request refused", "alice")]
    text = exposition(stack.gateway.frontend.metrics.registry)[0].decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'key="alice"' in line)
    assert float(figures['outrider_key_requests_total{key="alice"}']) >= 1
    assert float(figures['outrider_key_rejections_total{key="alice"}']) >= 1
    assert (
        float(figures['outrider_key_generation_tokens_total{key="alice"}'])
        >= answer.json()["usage"]["completion_tokens"]
    )
    assert 'key="nobody"' not in text
    assert "sk-" not in text + repr(lines)
