"""Routes about the gateway, the document about all of them, and who may read the answers."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.services.markov_services import MarkovStack, markov_stack

from gateway.rest.bodies import IGNORED_HEADER
from outrider.errors import PeerLost, VocabularyMismatch

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = "https://page.example"
LONG = "long " * 1000
ERRORS = {"400", "403", "404", "408", "413", "415", "429", "431", "500", "503", "504"}


async def test_the_served_model_is_listed(http: httpx.AsyncClient) -> None:
    """Alone and by its name; any other name is an error that names the right one."""
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["object"], each["max_model_len"]) for each in listed] == [("markov", "model", 512)]
    assert (await http.get("/v1/models/markov")).json() == listed[0]
    assert (await http.get("/v1/models/")).json()["data"] == listed
    for name in ("other", "a/b"):
        reply = await http.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert "'markov'" in reply.json()["error"]["message"]


async def test_probes_answer(http: httpx.AsyncClient, markov: MarkovStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is alive while the target is away, but not ready, and says when to look again."""
    assert (await http.get("/live")).json() == {"status": "alive"}
    assert (await http.get("/version")).json().keys() == {"version"}
    for path in ("/ready", "/health"):
        assert (await http.get(path)).json() == {
            "status": "ready",
            "target": "present",
            "draft": "present",
            "further_drafts": {},
            "hosted": [],
            "failing": [],
            "left_out": [],
        }
        assert (await http.head(path)).status_code == 200
    peer = markov.gateway.backend.target.peers[0]
    monkeypatch.setattr(peer, "_info", None)
    monkeypatch.setattr(peer, "mismatch", PeerLost("away"))
    for path in ("/ready", "/health"):
        reply = await http.get(path)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["code"] == "peer_lost"
    assert (await http.head("/live")).status_code == 200
    monkeypatch.setattr(peer, "mismatch", VocabularyMismatch("another model"))
    reply = await http.get("/ready")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")


@pytest.mark.parametrize("accept", ["", "*/*", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_come_in_the_text_format(http: httpx.AsyncClient, accept: str) -> None:
    """Whatever else is asked for; some of them by name."""
    reply = await http.get("/metrics", headers={"accept": accept})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "outrider_num_requests_running" in reply.text
    names = {"name[]": ["outrider_num_requests_running", "outrider_generation_tokens_total"]}
    lines = (await http.get("/metrics", params=names)).text.splitlines()
    # The library collects by name in no order.
    assert sorted(line.split()[0] for line in lines if not line.startswith("#")) == sorted(names["name[]"])


async def test_what_nobody_serves_is_an_error_like_all(http: httpx.AsyncClient) -> None:
    """A path, and a method, whose error names the right ones."""
    for path, near in (("/v1/nothing", ""), ("/models", "/v1/models is"), ("/v1/v1/chat/completions", "/v1/chat/")):
        reply = await http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
        assert near in reply.json()["error"]["message"]
    assert (await http.delete("/v1/models")).headers["allow"] == "GET, HEAD"
    reply = await http.delete("/v1/completions")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.slow
async def test_the_document_has_every_route_and_error(http: httpx.AsyncClient) -> None:
    """And pages that would load scripts from elsewhere do not exist."""
    document = (await http.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", *ERRORS}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    paths = {"/v1/models", "/v1/models/{model}", "/live", "/ready", "/health", "/metrics", "/version"}
    assert paths <= set(document["paths"])
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert {(await http.get(path)).status_code for path in ("/docs", "/redoc")} == {404}


async def test_other_sites_read_answers_only_where_they_may(http: httpx.AsyncClient) -> None:
    """The one that was configured, also errors; no other."""
    for path in ("/v1/models", "/v1/nothing"):
        reply = await http.get(path, headers={"origin": ORIGIN})
        assert reply.headers["access-control-allow-origin"] == ORIGIN
    reply = await http.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "path",
    ["/live", "/v1/models", "/v1/models/markov", "/metrics", "/version", "/openapi.json", "/tokenizer_info", "/"],
)
async def test_who_only_asks_for_the_head_gets_it(http: httpx.AsyncClient, path: str) -> None:
    """Wherever there is something to read: the status and the headers, without a body."""
    read, head = await http.get(path), await http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == read.headers["content-type"]
    assert (await http.head("/v1/models/nobody")).status_code == 404
    assert (await http.head("/v1/completions")).status_code == 405


async def test_a_request_may_name_scheme_and_host(http: httpx.AsyncClient, markov: MarkovStack) -> None:
    """As to a proxy; its host is asked as the header's would be."""
    for host, status in ((b"10.0.0.7:80", b"200"), (b"rebound.example", b"403")):
        reader, writer = await asyncio.open_connection(*markov.gateway.rest_address.split(":"))
        writer.write(b"GET http://%b/version HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n" % host)
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_a_site_that_was_named_may_ask_for_anything(http: httpx.AsyncClient) -> None:
    """Any method, any headers, and from a public network; what comes then says itself what is wrong."""
    asked = {
        "access-control-request-method": "DELETE",
        "access-control-request-headers": "x-stainless-os, authorization, mcp-session-id",
        "access-control-request-private-network": "true",
        "access-control-request-local-network": "true",
    }
    reply = await http.options("/v1/completions", headers={"origin": ORIGIN, **asked})
    assert reply.status_code == 200
    told = {name: reply.headers[f"access-control-allow-{name}"] for name in ("origin", "methods", "headers")}
    assert told == {"origin": ORIGIN, "methods": "DELETE", "headers": asked["access-control-request-headers"]}
    networks = [reply.headers[f"access-control-allow-{name}-network"] for name in ("private", "local")]
    assert networks == ["true", "true"]
    reply = await http.delete("/v1/completions", headers={"origin": ORIGIN})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (405, ORIGIN)


async def test_where_no_site_was_named_a_refusal_says_with_which_option(words: str) -> None:
    """Before a browser's page has sent anything."""
    async with (
        markov_stack(words, rest_listen="127.0.0.1:0") as running,
        httpx.AsyncClient(base_url=f"http://{running.gateway.rest_address}") as http,
    ):
        asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
        reply = await http.options("/v1/chat/completions", headers=asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "site_not_allowed")
        assert f"--cors-origins {ORIGIN}" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/v1/completions", {"prompt": "fox", "suffix": "", "stop": "", "speculation": {"rule": "", "shape": {}}}),
        ("/v1/completions", {"prompt": "fox", "response_format": "", "logprobs": "", "temperature": ""}),
        ("/v1/completions", {"prompt": "fox", "speculation": {"shape": {"max_depth": None, "expansions": None}}}),
        ("/v1/chat/completions", {"messages": "TURNS", "tools": [], "tool_choice": "", "reasoning_effort": ""}),
        ("/v1/chat/completions", {"messages": "NAMED", "stop": [], "service_tier": "", "functions": ""}),
        ("/v1/responses", {"input": "fox", "instructions": "", "previous_response_id": "", "text": "", "tools": []}),
        ("/v1/messages", {"messages": "TURNS", "system": "", "tool_choice": "", "container": "", "thinking": ""}),
    ],
)
async def test_an_empty_field_is_an_absent_one(http: httpx.AsyncClient, path: str, empty: dict[str, Any]) -> None:
    """Null or empty, where that can mean nothing else."""
    turn = {"role": "user", "content": "fox"}
    turns = {"TURNS": [turn], "NAMED": [{**turn, "name": "", "tool_call_id": "", "tool_calls": []}]}
    body = {**empty, **({"messages": turns[empty["messages"]]} if "messages" in empty else {}), "model": ""}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    reply = await http.post(path, json={**body, limit: 2})
    assert reply.status_code == 200, reply.text
    assert IGNORED_HEADER not in reply.headers


async def test_browsers_that_ask_before_they_send_get_an_answer(http: httpx.AsyncClient) -> None:
    """The site and the methods that were named are let through; a refusal is an error like any other."""

    async def preflight(origin: str, method: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": method}
        return await http.options("/v1/completions", headers=headers)

    welcome = await preflight(ORIGIN, "POST")
    assert (welcome.status_code, welcome.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = await preflight("https://other.example", "POST")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "site_not_allowed")
    assert refused.json()["error"]["param"] == "origin"
    assert "--cors-origins https://other.example" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/page/generate"])
async def test_other_sites_pages_make_nothing_work(http: httpx.AsyncClient, path: str) -> None:
    """Their request is refused before its body is looked at; programs, which have no origin, are not asked."""
    asked = {"content": b"{", "headers": {"content-type": "application/json"}}
    assert (await http.post(path, **asked)).status_code == 400
    for origin in (ORIGIN, str(http.base_url).rstrip("/")):
        asked["headers"] |= {"origin": origin}
        assert (await http.post(path, **asked)).status_code == 400
    asked["headers"] |= {"origin": "https://other.example"}
    reply = await http.post(path, **asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "site_not_allowed")
    rebound = {"origin": "http://rebound.example:8080", "host": "rebound.example:8080", "sec-fetch-site": "same-origin"}
    asked["headers"] |= rebound
    assert "--allowed-hosts rebound.example" in (await http.post(path, **asked)).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/metrics", "/page/status", "/version", "/openapi.json"])
async def test_a_site_whose_name_was_made_to_lead_here_reads_nothing(http: httpx.AsyncClient, path: str) -> None:
    """A browser takes it for the gateway's own page; scrapers and probes come by addresses and local names."""
    reply = await http.get(path, headers={"host": "rebound.example:8080"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "site_not_allowed")
    assert "--allowed-hosts rebound.example" in reply.json()["error"]["message"]
    for host in ("10.0.0.7:8080", "gateway:8080", "host.docker.internal", "gateway.prod.svc.cluster.local:80", ""):
        assert (await http.get(path, headers={"host": host})).status_code == 200


async def test_programs_and_probes_may_use_any_name(http: httpx.AsyncClient) -> None:
    """What they read reveals nothing, and what they send has no origin."""
    named = {"host": "llm.example"}
    for path in ("/live", "/ready", "/health", "/v1/models", "/v1/models/markov", "/"):
        assert (await http.get(path, headers=named)).status_code == 200
    body = {"model": "markov", "prompt": "fox", "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body, headers=named)).status_code == 200


async def test_a_path_of_another_servers_protocol_is_not_there(http: httpx.AsyncClient) -> None:
    """A client that takes this for Ollama learns where all routes are."""
    reply = await http.post("/api/generate", json={"model": "llama3", "prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
    assert "/openapi.json has all routes" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{}, {"prompt": [LONG]}, {"messages": [{"role": LONG}]}, {"input": 1, LONG: 1}, [LONG]]
)
async def test_no_error_repeats_a_body(http: httpx.AsyncClient, body: object) -> None:
    """On every route that takes one; long values and names are cut."""
    paths = (await http.get("/openapi.json")).json()["paths"]
    for path in ["/page/generate", *(path for path, methods in paths.items() if "post" in methods)]:
        reply = await http.post(path, json=body)
        assert reply.status_code in {400, 404}
        assert len(reply.content) < 1000


async def test_every_answer_is_counted(http: httpx.AsyncClient) -> None:
    """By route and status, also one that no route gave; clients cannot make labels of their own."""

    async def counted() -> dict[tuple[str, ...], float]:
        name = "outrider_http_answers_total"
        text = (await http.get("/metrics")).text
        found = {family.name: family for family in text_string_to_metric_families(text)}["outrider_http_answers"]
        names = ("method", "route", "status")
        return {tuple(each.labels[n] for n in names): each.value for each in found.samples if each.name == name}

    before = await counted()
    await http.get("/v1/models")
    await http.get("/v1/models/nobody")
    await http.get("/nowhere/1")
    await http.request("BREW", "/nowhere/2")
    await http.post("/v1/completions", json={"model": "markov"})
    await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    expected = {
        ("GET", "/metrics", "200"): 1,
        ("GET", "/v1/models", "200"): 1,
        ("GET", "/v1/models/{model:path}", "404"): 1,
        ("GET", "other", "404"): 1,
        ("other", "other", "404"): 1,
        ("POST", "/v1/completions", "400"): 1,
        ("POST", "other", "400"): 1,
    }
    after = await counted()
    assert {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)} == expected
