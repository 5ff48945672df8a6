"""What a log line holds: the traceback of an exception, and never the values of its local variables."""

import asyncio
import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from outrider.process import telemetry

ROOT = Path(__file__).resolve().parents[3]
# The secret is not in the source, which a traceback may show.
SCRIPT = """
import logging
import grpc
import structlog
from outrider.v1.types_pb2 import TreeShape as Message
from outrider.process.telemetry import configure_logs

def handle(request):
    prompt = "".join(("sword", "fish"))
    raise KeyError(f"of {len(prompt)} characters")

configure_logs("info")
try:
    handle({"text": "".join(("open ", "sesame"))})
except KeyError:
    structlog.get_logger().exception("handler failed")
    logging.getLogger("library").exception("%s failed", "library")
    # What another one sends, its reader names.
    grpc._common.deserialize(bytes(9), Message.FromString)
"""
SECRETS = ("swordfish", "open sesame")


async def logged(stderr: int) -> bytes:
    """What the script writes to a pipe, or to the given file."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, stderr=stderr, cwd=ROOT)
    _, written = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    return written or b""


async def test_json_holds_the_traceback_without_locals() -> None:
    """A log that leaves the machine says where it went wrong, and nothing of what users wrote."""
    lines = (await logged(asyncio.subprocess.PIPE)).decode().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["handler failed", "library failed"]
    for line in lines:
        assert [*json.loads(line)][:3] == ["timestamp", "level", "event"]
        [exception] = json.loads(line)["exception"]
        assert (exception["exc_type"], exception["exc_value"]) == ("KeyError", "'of 9 characters'")
        assert [frame["name"] for frame in exception["frames"]] == ["<module>", "handle"]
        assert not any(secret in line for secret in SECRETS)
    assert json.loads(lines[1])["logger"] == "library"


@pytest.mark.slow
async def test_terminal_shows_the_traceback_without_locals() -> None:
    """The same for people, whose terminals are recorded too."""
    ours, theirs = pty.openpty()
    await logged(theirs)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search(r"^\S*\d{4}-\d\d-\d\dT[\d:.]+Z\S* \[\S*error *\S*\] \S*handler failed", shown)
    assert "in handle" in shown
    assert "of 9 characters" in shown
    assert not any(secret in shown for secret in SECRETS)


def test_what_is_bound_is_on_every_line_and_comes_back() -> None:
    """An inner value hides an outer one, a request has one id whatever binds it, and afterwards nothing is left."""
    with capture_logs([merge_contextvars]) as lines:
        with telemetry.bound(session="outer"), telemetry.request_scope() as request_id:
            with telemetry.bound(session="inner", request_id="own"), telemetry.request_scope() as own:
                structlog.get_logger().info("one")
            structlog.get_logger().info("two")
        structlog.get_logger().info("three")
    said = [(line.get("session"), line.get("request_id")) for line in lines]
    assert own == "own"
    assert said == [("inner", "own"), ("outer", request_id), (None, None)]


def test_a_session_is_shown_by_its_beginning() -> None:
    """As every process shows it."""
    assert telemetry.session_prefix(bytes(range(16))) == "00010203"
