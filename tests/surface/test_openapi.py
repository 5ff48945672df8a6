"""schemathesis, unmodified, on the interface's own document: what it sends never breaks the server or the document."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.rest.rest_stack import RestStack, rest_stack

pytestmark = [pytest.mark.surface, pytest.mark.timeout(1800)]
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
# Not `positive_data_acceptance`: the document cannot say how many tokens fit into the model's context.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)
# One worker: it reads its own source while it generates, and threads of CPython 3.11 that do so break one another.
OPTIONS = (
    *("--phases", "examples,coverage,fuzzing", "--max-examples", "15", "--seed", "7", "--workers", "1"),
    *(
        "--generation-deterministic",
        "--request-timeout",
        "60",
        "--continue-on-failure",
        "--suppress-health-check",
        "all",
    ),
    *("--checks", ",".join(CHECKS)),
)
COUNTED = re.compile(r"(\d+) generated")


@pytest.fixture
async def rest() -> AsyncIterator[RestStack]:
    """A stack whose answers are short also where nothing limits them but the room that there is."""
    async with rest_stack(kv_tokens=512) as running:
        yield running


async def test_document_holds(rest: RestStack, tmp_path: Path) -> None:
    """No error of the server's, and every answer is one that the document has."""
    # Made when it is first asked for, which may take longer than schemathesis waits.
    async with httpx.AsyncClient(timeout=120) as client:
        assert (await client.get(f"http://{rest.address}/openapi.json")).status_code == 200
    command = (SCHEMATHESIS, "run", f"http://{rest.address}/openapi.json", *OPTIONS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=tmp_path)
    output, notes = await asyncio.wait_for(process.communicate(), 1500)
    assert process.returncode == 0, output.decode() + notes.decode()
    counted = COUNTED.search(output.decode())
    assert counted is not None, output.decode()
    assert int(counted[1]) > 500
    await rest.quiet()
