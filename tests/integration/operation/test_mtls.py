"""A stack whose processes show each other certificates: the same tokens, and certificates replaced under load."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from support.basics import eventually
from support.certificates import (
    DAY,
    issue,
    pem_of,
    replace_files,
    shown_at,
    shown_by,
    trusting,
)
from support.stack import PATIENT, TARGET, RunningStack, running_stack, token_ids

from gateway.server import start
from gateway.sessions.peer import ServicePeer
from gateway.settings import GatewaySettings
from outrider.cli.bench.common import REPOSITORY
from outrider.cli.doctor.checks import check_gateway
from outrider.cli.doctor.report import Status
from outrider.client import AsyncClient, Speculation
from outrider.errors import PeerLost
from outrider.process.children import QUIET_GRPC
from outrider.rpc.tls import TlsFailed, TlsFiles

PROMPTS = ("Once upon a time there was a", "The fox said to the wolf,", "In the old mill there lived")
FIELDS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8}
PATIENCE_S = 60.0
GATEWAY = {**PATIENT, "rest_listen": "127.0.0.1:0"}
NAMES = ("gateway", "target", "draft", "client")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates that the stack uses, which tests replace."""
    return issue(tmp_path_factory.mktemp("certificates"), *NAMES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(folder: Path) -> AsyncIterator[RunningStack]:
    async with running_stack(gateway=GATEWAY, certificates=folder) as running:
        yield running


async def said(stack: RunningStack) -> list[tuple[int, ...]]:
    """What is answered to all prompts at once."""
    asked = (stack.generate(text=prompt, seed=seed, draft_count=4, **FIELDS) for seed, prompt in enumerate(PROMPTS))
    return token_ids(await asyncio.gather(*asked))


@pytest.mark.slow
async def test_the_tokens_are_those_without_certificates(stack: RunningStack) -> None:
    """With a draft that guesses on the other side of a link of its own."""
    secured = await said(stack)
    async with running_stack(gateway=PATIENT) as plain:
        assert await said(plain) == secured
    answer = await stack.client.generate(PROMPTS[0], seed=0, speculation=Speculation(draft_count=4), **FIELDS).result()
    assert tuple(answer.samples[0].token_ids) == secured[0]
    assert answer.samples[0].result.speculation.accepted_tokens > 0


@pytest.mark.slow
async def test_the_command_line_and_the_doctor_come_in_with_the_authority(stack: RunningStack, folder: Path) -> None:
    """And say why they do not where they come without it."""
    tls, address = trusting(folder, "client"), stack.address
    command = [sys.executable, "-c", "from outrider.cli import main; main()", "generate", PROMPTS[0]]
    words = ("--max-tokens", "4", "--seed", "1", "--json", "--address", address)
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    ended, refused = await asyncio.gather(
        asyncio.to_thread(run, [*command, *words, "--tls-ca", tls.ca]), asyncio.to_thread(run, [*command, *words])
    )
    assert ended.returncode == 0
    [sample] = json.loads(ended.stdout)["samples"]
    assert len(sample["token_ids"]) == 4
    assert refused.returncode == TlsFailed.exit_code == 78
    assert f"outrider: {address} speaks TLS, and was called without it.\n" in refused.stderr

    assert stack.gateway is not None
    found = [each async for each in check_gateway(address, stack.gateway.rest_address, "1", tls=tls)]
    assert [(each.check, each.status) for each in found if each.check != "REST"] == [
        ("gateway", Status.OK),
        ("self test", Status.OK),
    ]
    assert [each.sentence.startswith("Version ") for each in found if each.check == "REST"] == [True]
    [finding] = [each async for each in check_gateway(address, None, "1")]
    assert (finding.exit_code, finding.sentence) == (78, f"{address} speaks TLS, and was called without it.")
    assert "--tls-ca" in finding.fix


@pytest.mark.slow
@pytest.mark.parametrize("words", [("copying", "--stories", "2"), ("structured", "--turns", "2", "--hostile", "2")])
async def test_measurements_come_in_with_the_authority(
    stack: RunningStack, folder: Path, words: tuple[str, ...]
) -> None:
    """And end in a sentence without it."""
    name, *flags = words
    command = [sys.executable, "-m", f"bench.{name}", "--address", stack.address, "--tokens", "12", *flags]
    quiet = os.environ | QUIET_GRPC
    run = partial(subprocess.run, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=quiet)
    ended, refused = await asyncio.gather(
        asyncio.to_thread(run, [*command, "--tls-ca", trusting(folder, "client").ca]), asyncio.to_thread(run, command)
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Medians with intervals of 95 %" in ended.stdout
    sentence = f"{stack.address} speaks TLS, and was called without it.\n"
    assert (refused.returncode, refused.stderr[-len(sentence) :]) == (78, sentence)


@pytest.mark.slow
async def test_certificates_are_replaced_under_load(stack: RunningStack, folder: Path, tmp_path: Path) -> None:
    """Requests that run go on with all their tokens, new connections get the new ones, and no client sees an error."""
    expected = await said(stack)
    renewed = tmp_path / "renewed"
    shutil.copytree(folder / "authority", renewed / "authority")
    issue(renewed, *NAMES)
    answers: list[list[tuple[int, ...]]] = []
    is_enough = asyncio.Event()

    async def load() -> None:
        while not is_enough.is_set():
            answers.append(await said(stack))

    async def answered() -> None:
        before = len(answers)
        await eventually(lambda: len(answers) > before, PATIENCE_S)

    async with asyncio.TaskGroup() as loads:
        for _ in range(2):
            loads.create_task(load())
        for name in NAMES:
            replace_files(shown_by(renewed, name), shown_by(folder, name), "cert", "key")
            await answered()
        served = {"target": stack.target.address, "draft": stack.draft.address, "gateway": stack.address}
        for name, address in served.items():
            assert await shown_at(address, shown_by(folder, name)) == pem_of(shown_by(renewed, name))
        async with AsyncClient(stack.address, tls=trusting(folder, "client")) as fresh:
            answer = await fresh.generate(PROMPTS[0], seed=0, **FIELDS).result()
        # A link that breaks now is made again, with what is there now on both sides.
        await stack.restart_target()
        await answered()
        await answered()
        is_enough.set()
    assert tuple(answer.samples[0].token_ids) == expected[0]
    assert all(each == expected for each in answers)


@pytest.mark.slow
async def test_a_gateway_that_is_refused_at_its_start_ends_with_the_code_of_that(
    stack: RunningStack, folder: Path, tmp_path: Path
) -> None:
    """Which keeps supervisors from starting it again and again."""
    shutil.copytree(folder / "authority", tmp_path / "authority")
    used = shown_by(issue(tmp_path, "gateway", lifetime=-DAY), "gateway")
    files = {"service_tls_ca": used.ca, "service_tls_cert": used.cert, "service_tls_key": used.key}
    settings = GatewaySettings(
        stack.target.address, TARGET, listen="127.0.0.1:0", rest_listen="", target_wait_seconds=3.0, **files
    )
    with pytest.raises(TlsFailed, match=r"did not answer within 3 seconds: .*: certificate has expired.$") as raised:
        await start(settings)
    assert raised.value.exit_code == 78


async def test_a_gateway_that_is_refused_says_why_and_comes_back(
    stack: RunningStack, folder: Path, tmp_path: Path
) -> None:
    """Once in the log, with every request that finds no target, and until its certificate has been replaced."""
    expired = tmp_path / "expired"
    shutil.copytree(folder / "authority", expired / "authority")
    used = shown_by(issue(expired, "gateway", lifetime=-DAY), "gateway")
    with capture_logs() as logs:
        link = ServicePeer("target", stack.target.address, lambda info: None, tls=TlsFiles(used))
        await eventually(lambda: link.refusal is not None)
        reason = f"{stack.target.address} does not accept the certificate in {used.cert}: certificate has expired."
        with pytest.raises(PeerLost) as raised:
            link.present()
        assert raised.value.message == f"The target service at {stack.target.address} cannot be reached: {reason}"
        replace_files(shown_by(folder, "gateway"), used, "cert", "key")
        assert await link.settled(PATIENCE_S)
        assert link.present().role == "target"
        assert link.refusal is None
        await link.close()
    assert [line["reason"] for line in logs if line["event"] == "service refused"] == [reason]
