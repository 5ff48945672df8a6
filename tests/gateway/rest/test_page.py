"""The page's files and its own API, without a browser: headers, events in order, and errors that name the field."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.basics import eventually
from support.services.markov import branching_tree
from support.services.markov_services import MarkovStack, markov_stack, request

from gateway.rest.page import HEADERS, read_files


@pytest_asyncio.fixture
async def stack(tokenizer: str) -> AsyncIterator[MarkovStack]:
    """A gateway with REST over the tiny services."""
    async with markov_stack(tokenizer, rest_listen="127.0.0.1:0") as running:
        yield running


@pytest_asyncio.fixture
async def client(stack: MarkovStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the stack's page."""
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}") as made:
        yield made


async def events(client: httpx.AsyncClient, body: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """All events of a request, as the stream names them."""
    response = await client.post("/page/generate", json=body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_events_tell_what_grpc_tells(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """`opened`, one `round` a verdict, `completion`: the same tokens, origins, counts and figures."""
    body = {"prompt": "fox sea", "seed": "9", "max_tokens": 40, "speculation": {"draft_count": 4}}
    found = await events(client, body)
    rounds, completion = await stack.run(request())
    assert [name for name, _ in found] == ["opened", *["round"] * len(rounds), "completion"]
    assert found[0][1] | {"model_hash": "", "numerics_id": "", "model": ""} == {
        "model": "",
        "model_hash": "",
        "numerics_id": "",
        "prompt_tokens": 2,
        "max_tokens": 40,
        "seed": "9",
        "rule": "match",
        "draft_count": 4,
        "sampling": {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        },
    }
    for (_, told), each in zip(found[1:-1], rounds, strict=True):
        assert [token["token_id"] for token in told["tokens"]] == [token.token_id for token in each.tokens]
        assert [told[name] for name in ("base_len", "draft_count", "accepted_count", "evaluated_count")] == [
            each.facts.base_len,
            each.facts.draft_count,
            each.facts.accepted_count,
            each.facts.evaluated_count,
        ]
    assert found[-1][1]["speculation"]["accepted_tokens"] == completion.speculation.accepted_tokens
    assert found[-1][1]["usage"]["completion_tokens"] == completion.usage.completion_tokens
    assert found[-1][1]["seed"] == "9"


async def test_who_waits_learns_the_place_in_the_queue(tokenizer: str) -> None:
    """Whenever it changes, before anything else; and why there is no answer, where the gateway stops meanwhile."""
    body = {"prompt": "fox sea", "max_tokens": 2}
    async with (
        markov_stack(tokenizer, rest_listen="127.0.0.1:0", max_requests=1, max_queue=2) as stack,
        httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}") as client,
    ):
        admission = stack.gateway.frontend.admission
        waiting = []
        async with admission.entry():
            for _ in range(2):
                waiting.append(asyncio.create_task(events(client, body)))
                await eventually(lambda: admission.waiting == len(waiting))
            full = await client.post("/page/generate", json=body)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        told = [
            [data["place"] for name, data in found if name == "waiting"] for found in await asyncio.gather(*waiting)
        ]
        assert told == [[1], [2, 1]]
        async with admission.entry():
            last = asyncio.create_task(events(client, body))
            await eventually(lambda: admission.waiting == 1)
            admission.close()
            assert [name for name, _ in await last] == ["waiting", "error"]


async def test_events_tell_trees(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """Each guess, kept or not, with its row, its parent, who guessed it and its value; and how deep they go."""
    stack.draft.branching = stack.target.numbered = True
    speculation = {"draft_count": 8, "drafter": "model", "return_rounds": True}
    body = {"prompt": "fox sea", "seed": "9", "max_tokens": 40, "probabilities": True, "speculation": speculation}
    *rounds, completion = (told for _, told in (await events(client, body))[1:])
    sides = 0
    for told in rounds:
        guesses = [*(token for token in told["tokens"] if token["row"] is not None), *told["rejected"]]
        tree = branching_tree([0] * (told["draft_count"] // 2))
        found = {each["row"]: (each["parent"], each["drafter"], each["value"]) for each in guesses}
        expected = zip(tree.parents, ["model"] * len(tree), tree.values, strict=True)
        assert found == dict(enumerate(expected, start=1))
        assert told["draft_depth"] == max(tree.depths)
        sides += any(token["row"] is not None and token["row"] % 2 for token in told["tokens"])
        own = told["tokens"][-1]
        assert own["origin"] == "accepted" or (own["row"], own["parent"], own["drafter"]) == (None, None, None)
    assert sides > 0
    figures = completion["speculation"]
    [only] = figures["drafters"]
    assert only == {"drafter": "model"} | {name: figures[name] for name in ("draft_tokens", "accepted_tokens")}
    assert completion["usage"]["accepted_prediction_tokens"] == completion["usage"]["rejected_prediction_tokens"] == 0


async def test_status_tells_the_drafters_that_may_be_named(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """Whichever of the services has them; each of them can be asked for, and no other."""
    drafters = (await client.get("/page/status")).json()["gateway"]["drafters"]
    assert "model" in drafters
    for name in drafters:
        found = await events(client, {"prompt": "fox", "max_tokens": 8, "speculation": {"drafter": name}})
        assert found[-1][0] == "completion"
    body = {"prompt": "fox", "speculation": {"drafter": "oracle"}}
    assert (await client.post("/page/generate", json=body)).json()["error"]["param"] == "speculation.drafter"


async def test_a_conversation_is_answered_as_v1_does(client: httpx.AsyncClient) -> None:
    """Messages become the same prompt, with the same answer, as those of /v1/chat/completions."""
    body = {"messages": [{"role": "user", "content": "fox sea"}], "seed": 9, "max_tokens": 12}
    opened, *rounds, completion = (told for _, told in await events(client, body))
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    said = "".join(token["text"] for told in rounds for token in told["tokens"]) + completion["text"]
    assert said == reply["choices"][0]["message"]["content"] != ""
    assert opened["prompt_tokens"] == reply["usage"]["prompt_tokens"] > 2
    status = (await client.get("/page/status")).json()
    assert status["gateway"]["has_chat_template"] is False


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
        ({"messages": [{"role": "fox", "content": "a"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "fox"}, "prompt", "invalid_value"),
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]},
            "messages.0.tool_call_id",
            "unsupported",
        ),
        ({"messages": [{"role": "user", "content": "fox " * 3000}]}, "messages", "context_length_exceeded"),
    ],
)
async def test_a_conversation_is_refused_as_v1_does(
    client: httpx.AsyncClient, body: dict[str, Any], field: str, code: str
) -> None:
    """By the names of its own fields, and there is either a prompt or a conversation."""
    response = await client.post("/page/generate", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert error["code"].startswith(code), error


async def test_seeds_of_64_bits_survive(client: httpx.AsyncClient) -> None:
    """A seed goes as text both ways, because a number of JavaScript would lose its last bits."""
    seed = str(2**63 - 1)
    found = await events(client, {"prompt": "fox", "seed": seed, "max_tokens": 2})
    assert found[0][1]["seed"] == found[-1][1]["seed"] == seed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": 1}, "prompt"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": "seven"}, "seed"),
        ({"seed": str(2**63)}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"speculation": {"draft_count": "many"}}, "speculation.draft_count"),
        ({"speculation": {"draft_count": 1000}}, "speculation.draft_count"),
        ({"speculation": {"rule": "luck"}}, "speculation.rule"),
        ({"cache_salt": "s" * 65}, "cache_salt"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
async def test_bad_values_are_refused_by_name(client: httpx.AsyncClient, changes: dict[str, Any], field: str) -> None:
    """The answer is 400 and names the field, before any event."""
    response = await client.post("/page/generate", json={"prompt": "fox", **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


async def test_bodies_that_are_no_objects_are_refused(client: httpx.AsyncClient) -> None:
    """A list is answered with 400, and a form of another site, which browsers send unasked, is not even read."""
    assert (await client.post("/page/generate", json=[1])).status_code == 400
    form = {"content-type": "text/plain"}
    assert (await client.post("/page/generate", content='{"prompt": "fox"}', headers=form)).status_code == 415


async def test_status_tells_who_is_there(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """Gateway, target, draft and K, and no address of any of them."""
    response = await client.get("/page/status")
    status = response.json()
    assert status["target"]["up"]
    assert status["draft"]["up"]
    assert 0 <= status["policy"]["draft_count"] <= status["policy"]["max_draft_count"]
    assert status["gateway"]["running"] == status["gateway"]["waiting"] == 0
    assert stack.gateway.backend.target.peers[0].address not in response.text
    assert response.headers["cache-control"] == "no-store"


async def test_status_says_what_the_policy_knows(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """Of a new session: the load, the choice with its reason, and every drafter's candidates."""
    policy = (await client.get("/page/status")).json()["policy"]
    assert (policy["choice"]["case"], policy["choice"]["drafters"]) == ("exploring", [])
    for seed in range(8):
        await events(client, {"prompt": "fox sea", "seed": seed, "max_tokens": 64})
    policy = (await client.get("/page/status")).json()["policy"]
    assert (policy["load"], policy["row_price"]) == (1, 0.0)
    assert policy["rest_tokens"] == stack.gateway.backend.policies.latest.rest
    assert policy["plain_us"] > 0
    assert policy["draft_count"] == policy["choice"]["draft_count"]
    [drafter] = policy["choice"]["drafters"]
    assert [each["draft_count"] for each in drafter["candidates"]] == list(range(1, 9))


async def test_looking_at_the_status_changes_no_choice(stack: MarkovStack, client: httpx.AsyncClient) -> None:
    """Before the first request and after some, the policy is bit by bit the same after a look."""
    for seed in range(3):
        before = pickle.dumps(stack.gateway.backend.policies.latest)
        for _ in range(2):
            assert (await client.get("/page/status")).status_code == 200
        assert pickle.dumps(stack.gateway.backend.policies.latest) == before
        await events(client, {"prompt": "fox sea", "seed": seed, "max_tokens": 64})


async def test_rounds_are_explained_on_demand(client: httpx.AsyncClient) -> None:
    """A round has its choice where the page asks, unless it is that of the round before; the prompt's pass has none."""
    body = {"prompt": "fox sea", "seed": 9, "max_tokens": 64}
    assert not any("choice" in data for _, data in await events(client, body))
    found = [data for name, data in await events(client, {**body, "explain": True}) if name == "round"]
    assert "choice" not in found[0]
    assert "choice" in found[1]
    assert all(each["choice"]["reason"].endswith(".") for each in found if "choice" in each)
    fixed = {**body, "explain": True, "speculation": {"draft_count": 2}}
    cases = [data["choice"]["case"] for name, data in await events(client, fixed) if "choice" in data]
    assert set(cases) == {"fixed"}


async def test_every_file_has_the_policy_and_a_tag(client: httpx.AsyncClient) -> None:
    """The page and all its files come with the strict headers, and not again when the browser has them."""
    paths = ["/", *(f"/static/{name}" for name in read_files())]
    assert len(paths) > 10
    for path in paths:
        response = await client.get(path)
        assert response.status_code == 200, path
        assert HEADERS.items() <= dict(response.headers).items()
        again = await client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await client.head(path)).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["none.js", "js", "js/", "js%2F..%2F..%2Frest%2Fpage.py", "..%2Fpage.py", "%2e%2e/rest/page.py", "__init__.py"],
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    """A name that is no file of the page's is not looked for anywhere."""
    assert (await client.get(f"/static/{name}")).status_code == 404


def test_no_file_has_anything_inline_or_from_elsewhere() -> None:
    """No inline script, style or handler, which the policy would stop, and no address but a namespace's."""
    for name, file in read_files().items():
        text = file.content.decode()
        assert " style=" not in text, name
        assert "innerHTML" not in text, name
        assert "<style" not in text, name
        assert " onclick=" not in text, name
        assert "https://" not in text, name
        assert text.count("http://") == text.count("http://www.w3.org/2000/svg"), name
