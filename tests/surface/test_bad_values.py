"""Values that no field may have, over REST: refused by name, with status 400, before a service hears of them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.requests.garbage import PYTHON_TEXT
from support.rest.bad_bodies import GOOD, HARMLESS, HARMLESS_EVERYWHERE, ONLY, UNSUPPORTED, faults, with_fault
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, rest_stack

from outrider.model_service.leases import LeaseTable

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Those of every day; all others are for the full tests.
USUAL = {"temperature", "logit_bias", "speculation.rule", "unknown_field", "messages", "prompt", "seed"}
CASES = [
    pytest.param(path, field, marks=[] if field in USUAL else pytest.mark.surface)
    for path in GOOD
    for field in faults(path)
]
# What a message may name instead of the field itself.
SAME = {name: {"max_tokens", "prompt", "messages"} for name in ("max_tokens", "max_completion_tokens")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[tuple[RestStack, list[bytes]]]:
    """A stack, and the sessions that its services have ever held."""
    held: list[bytes] = []
    add = LeaseTable.add

    def counted(table: LeaseTable[object], session_id: bytes, session: object) -> None:
        held.append(session_id)
        add(table, session_id, session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeaseTable, "add", counted)
        async with rest_stack() as rest:
            yield rest, held


async def post(rest: RestStack, path: str, body: bytes) -> httpx.Response:
    """Sends bytes as JSON."""
    return await rest.http.post(path, content=body, headers={"content-type": "application/json"})


def check_refusal(reply: httpx.Response, field: str) -> dict[str, Any]:
    """OpenAI's shape, with the field's name where clients look for it and in a sentence that a user can read."""
    assert reply.status_code == (404 if is_missing_model(reply, field) else 400), reply.text
    assert reply.headers["content-type"] == "application/json"
    content = reply.json()
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    names = {field, field.partition(".")[0], *SAME.get(field, ())}
    assert (error["param"] or "").replace("[", ".").split(".")[0] in {name.partition(".")[0] for name in names}, error
    assert any(name.rpartition(".")[2] in error["message"] for name in names), error
    assert len(error["message"]) < 1000
    assert not PYTHON_TEXT.search(error["message"]), error
    return error


def is_missing_model(reply: httpx.Response, field: str) -> bool:
    """A name of no model is well-formed."""
    return field == "model" and reply.status_code == 404


@pytest.mark.parametrize(("path", "field"), CASES)
async def test_fault_is_refused_by_name(attacked: tuple[RestStack, list[bytes]], path: str, field: str) -> None:
    """Streamed or not, and no service hears of it."""
    rest, held = attacked
    before = len(held)
    for value in faults(path)[field]:
        try:
            check_refusal(await post(rest, path, with_fault(path, field, value)), field)
        except BaseException as error:
            error.add_note(f"{path}: {field} = {value[:80]}")
            raise
    assert len(held) == before


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("field", UNSUPPORTED)
async def test_what_is_not_served_is_refused(attacked: tuple[RestStack, list[bytes]], path: str, field: str) -> None:
    """By name, never ignored."""
    rest, held = attacked
    before = len(held)
    reply = await post(rest, path, with_fault(path, field, UNSUPPORTED[field]))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert error["code"] in {"unsupported_parameter", "unknown_parameter", "invalid_value"}
    assert len(held) == before


@pytest.mark.parametrize("path", GOOD)
async def test_nulls_and_harmless_fields_change_nothing(attacked: tuple[RestStack, list[bytes]], path: str) -> None:
    """Clients send null for what they do not set, and fields that only a provider's books need."""
    rest, held = attacked
    before = len(held)
    expected = (await rest.ask(path, **GOOD[path]))["choices"]
    assert len(held) > before
    nulls = {name: None for name in faults(path) if "." not in name and name not in {*GOOD[path], *NO_NULL}}
    assert (await rest.ask(path, **{**GOOD[path], **nulls}))["choices"] == expected
    harmless = HARMLESS if path == CHAT else HARMLESS_EVERYWHERE
    assert (await rest.ask(path, **{**GOOD[path], **harmless}))["choices"] == expected


NO_NULL = {"unknown_field", "prompt", "messages", "model"}


@pytest.mark.parametrize("path", GOOD)
async def test_every_field_is_attacked(attacked: tuple[RestStack, list[bytes]], path: str) -> None:
    """Each that the interface's own document names."""
    rest, _ = attacked
    document = (await rest.http.get("/openapi.json")).json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]
    named = set(schema["properties"])
    assert named <= set(faults(path)) | set(UNSUPPORTED) | set(HARMLESS), named
    assert {name for name in faults(path) if "." not in name} - set(ONLY[path]) - {"unknown_field"} <= named


async def test_only_streams_have_stream_options(attacked: tuple[RestStack, list[bytes]]) -> None:
    """As OpenAI has it, so that nothing is ignored."""
    rest, _ = attacked
    for path in (CHAT, COMPLETIONS):
        body = json.dumps({**GOOD[path], "stream_options": {"include_usage": True}}).encode()
        check_refusal(await post(rest, path, body), "stream_options")


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
async def test_every_seed_is_a_good_one(attacked: tuple[RestStack, list[bytes]], seed: int) -> None:
    """As far as 64 bits go."""
    rest, _ = attacked
    for path in GOOD:
        assert (await rest.ask(path, **{**GOOD[path], "seed": seed}))["choices"]
