"""Values that no parameter may have, through real servers: refused by name before anything is spent on them."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.requests.bad_requests import FAULTLESS, FAULTS, INT32, Fault, good_request, paths
from support.requests.garbage import PYTHON_TEXT
from support.stack import RunningStack, running_stack

from outrider.errors import InvalidRequest, OutriderError, PromptTooLong
from outrider.model_service.leases import LeaseTable
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb

MANY = settings(derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
NUMBER = re.compile(r"\d+")
MAX_SHOWN = 80


@dataclass
class Attacked:
    """A stack on a loop of its own, and the sessions that its services have ever held."""

    runner: asyncio.Runner
    stack: RunningStack
    held: list[bytes]

    def answer(self, request: pb.GenerateRequest) -> list[int]:
        """The tokens of a request."""

        async def ask() -> list[int]:
            events = [event async for event in self.stack.call(request)]
            return [token.token_id for event in events for token in event.round.tokens]

        return self.runner.run(ask())

    def refusal(self, request: pb.GenerateRequest) -> OutriderError:
        """Why there are none."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            self.answer(request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return error_from(raised.value)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    """A stack of the embedded pair."""
    held: list[bytes] = []
    add = LeaseTable.add

    def counted(table: LeaseTable[object], session_id: bytes, session: object) -> None:
        held.append(session_id)
        add(table, session_id, session)

    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeaseTable, "add", counted)
        running = running_stack()
        stack = runner.run(running.__aenter__())
        yield Attacked(runner, stack, held)
        runner.run(running.__aexit__(None, None, None))


def check_refusal(refused: OutriderError, fault: Fault) -> None:
    """Message and details name the field, the value and the limit, in a sentence that a user can read."""
    assert isinstance(refused, InvalidRequest)
    told, message = refused.metadata, refused.message
    shown = repr(fault.value)
    shown = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."
    assert (told["field"], told["value"]) == (fault.field, shown)
    assert message.startswith(f"{fault.field} ")
    assert shown in message
    assert set(NUMBER.findall(told["limit"])) <= set(NUMBER.findall(message))
    assert told["limit"]
    assert not PYTHON_TEXT.search(message.replace(shown, ""))


@pytest.mark.slow
@pytest.mark.parametrize("path", FAULTS)
@given(data=st.data())
@MANY
def test_a_fault_is_refused_by_name(attacked: Attacked, path: str, data: st.DataObject) -> None:
    """With field, value and limit; no service hears of it."""
    fault = data.draw(FAULTS[path])
    num_held = len(attacked.held)
    check_refusal(attacked.refusal(fault.request), fault)
    assert len(attacked.held) == num_held


@given(max_tokens=st.integers(5000, INT32[1]))
@MANY
def test_more_than_fits_is_refused_by_name(attacked: Attacked, max_tokens: int) -> None:
    """The limit is that of the model, and prompt and output share it."""
    request = good_request()
    request.max_tokens = max_tokens
    refused = attacked.refusal(request)
    context_len = attacked.runner.run(attacked.stack.info(attacked.stack.target)).context_len
    assert isinstance(refused, PromptTooLong)
    assert refused.metadata["max_tokens"] == str(max_tokens)
    assert f"max_tokens {max_tokens} do not fit into the context of {context_len} tokens" in refused.message


@pytest.mark.slow
@given(faults=st.tuples(*FAULTS.values()))
@settings(MANY, max_examples=5)
def test_good_requests_work_among_faults(attacked: Attacked, faults: tuple[Fault, ...]) -> None:
    """While one fault of each field is refused, a good request says what it says alone, and nothing stays."""
    expected = attacked.answer(good_request())
    assert len(expected) == good_request().max_tokens

    async def among_faults() -> list[object]:
        bad = [attacked.stack.call(fault.request) for fault in faults]
        calls = [attacked.stack.call(good_request()) for _ in range(4)]
        refused = await asyncio.gather(*(call.read() for call in bad), return_exceptions=True)
        assert all(isinstance(each, grpc.aio.AioRpcError) for each in refused)
        return [[token.token_id async for event in call for token in event.round.tokens] for call in calls]

    assert attacked.runner.run(among_faults()) == [expected] * 4
    attacked.runner.run(attacked.stack.quiet())
    # Each good request has a session in either service, so that the count above shows it.
    assert len(attacked.held) >= 2 * 5


def test_every_field_is_attacked() -> None:
    """Or takes every value there is."""
    assert paths() == set(FAULTS) | FAULTLESS


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_every_seed_is_a_good_one(attacked: Attacked, seed: int) -> None:
    """As far as 64 bits go."""
    request = good_request()
    request.seed = seed
    assert attacked.answer(request)
