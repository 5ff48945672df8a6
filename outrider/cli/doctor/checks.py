"""The checks that need an answer: who has a port, what the engine computes with, how a gateway replies."""

import asyncio
import http.client
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.doctor.report import (
    CONFIG,
    SELF_TEST,
    SOFTWARE,
    UNAVAILABLE,
    Finding,
    failed,
    ok,
    skipped,
    warning,
)
from outrider.cli.local_stack import OFFLINE, port_error
from outrider.cli.model_facts import model_facts
from outrider.client import AsyncClient, Speculation
from outrider.client.events import Sample
from outrider.client.requests import key_pairs
from outrider.errors import OutriderError
from outrider.model_files.memory import gibibytes
from outrider.process.children import HOST
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import Tls, TlsFailed, TlsFiles, why_refused

PORTS, KERNELS, CUDA, ROWS, GATEWAY, REST = "ports", "kernels", "cuda", "row invariance", "gateway", "REST"
ENDS, SPEED = "ends", "speed"
TIMEOUT_S = 3.0
MAX_BODY_BYTES = 1 << 16
# Other servers of models have /version and /v1/models too.
STATUS_PATH = "/page/status"
# Needs no key, where a gateway asks for one.
LIVE_PATH, ALIVE = "/live", '{"status":"alive"}'
GENERATION_SERVICE = "outrider.v1.GenerationService"
# What each option's port is for, as `who_answers` names it.
ROLES = {"--rest-port": "rest", "--port": "gateway", "--draft-port": "draft", "--target-port": "target"}
GATEWAY_PORTS = ("--rest-port", "--port")
NAMES = {"rest": "REST and the page", "gateway": "gateway", "draft": "draft service", "target": "target service"}
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps -e ."
# Operations of torch, which compute where there are no others.
EAGER = "eager"
# Far longer than a large model takes to load.
PROBE_TIMEOUT_S = 600.0
PROBE_FIX = "Run `python -m outrider.model_service.row_probe --model DIR` to see all of what it says."
END_PROBE_FIX = "Run `python -m gateway.end_probe --model PLACE` to see all of what it says."
END_FIX = "Send what ends an answer as `stop`, or name its token as eos_token_id in generation_config.json."
TLS_FIX = "Give --tls-ca, and --tls-cert with --tls-key, as the gateway needs them; new certificates: `outrider certs`."
PROMPT = "Once upon a time there was a"
QUESTION, ASKED_TOKENS = "What is the capital of France?", 32
# With 4 guesses a round gives at most 5 tokens, so there are at least two.
MAX_TOKENS, DRAFT_COUNT, MIN_ROUNDS = 16, 4, 2
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answerer:
    """A program that answers; `role` is gateway, target, draft, rest, or "other" for a program that is not ours."""

    role: str
    model: str = ""
    is_serving: bool = True


async def who_answers(address: str, tls: Tls | None = None) -> Answerer | None:
    """Program that takes connections on an address, None if there is none. Raises InvalidRequest about unfit files."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return None
    writer.close()
    if await asyncio.to_thread(rest_text, address, LIVE_PATH, tls=tls) == ALIVE:
        return Answerer("rest")
    async with open_channel(address, TlsFiles.of(tls)) as channel:
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        # Without an answer it may still be a model service, which does not generate.
        with suppress(grpc.aio.AioRpcError):
            health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
            return Answerer("gateway", is_serving=health.status == health_pb2.HealthCheckResponse.SERVING)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            facts = await model_facts(address, tls)
    except (OutriderError, TimeoutError):
        return Answerer("other")
    return Answerer(facts.role, facts.model)


def rest_status(address: str, api_key: str | None = None, tls: Tls | None = None) -> dict[str, Any] | None:
    """Answer of a gateway's REST surface about itself; None where none answers. Blocks for at most some seconds."""
    try:
        status = json.loads(rest_text(address, STATUS_PATH, api_key=api_key, tls=tls) or "null")
    except ValueError:
        return None
    return status if isinstance(status, dict) and "gateway" in status else None


def rest_text(
    address: str, path: str, max_bytes: int = MAX_BODY_BYTES, *, api_key: str | None = None, tls: Tls | None = None
) -> str | None:
    """The body of a successful HTTP GET, None for any other answer. Blocks for at most some seconds."""
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    connection = (
        http.client.HTTPConnection(*place, timeout=TIMEOUT_S)
        if tls is None
        else http.client.HTTPSConnection(*place, timeout=TIMEOUT_S, context=tls.context(ssl.PROTOCOL_TLS_CLIENT))
    )
    try:
        connection.request("GET", path, headers=dict(key_pairs(api_key)))
        response = connection.getresponse()
        body = response.read(max_bytes)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body.decode(errors="replace") if response.status == 200 else None


async def check_ports(wanted: Mapping[str, int], host: str = HOST) -> list[Finding]:
    """Findings about ports: one about all free ones, and one about each other; 0 means any and is not looked at.

    The gateway's, which --port and --rest-port name, are of `host`.
    """
    ports = {option: number for option, number in wanted.items() if number}
    places = {option: host if option in GATEWAY_PORTS else HOST for option in ports}
    answerers = await asyncio.gather(*(who_answers(f"{places[option]}:{number}") for option, number in ports.items()))
    free: list[str] = []
    findings: list[Finding] = []
    for (option, number), answerer in zip(ports.items(), answerers, strict=True):
        choose = f"{option} 0 takes a free one."
        if answerer is None:
            if error := port_error(number, places[option]):
                findings.append(failed(PORTS, f"{number} cannot be used: {error.strerror}.", choose, UNAVAILABLE))
            else:
                free.append(str(number))
        elif answerer.role == "other":
            sentence = f"{number} is taken by a program that is not Outrider's, so `outrider up` cannot start."
            fix = f"Stop it, or choose another port: {choose}"
            findings.append(failed(PORTS, sentence, fix, UNAVAILABLE))
        else:
            name = NAMES.get(answerer.role, answerer.role) + (f" ({answerer.model})" if answerer.model else "")
            sentence = f"{number} answers already, as Outrider's {name}."
            fix = "`outrider up` wants it for something else: stop what answers there, or choose another port: "
            is_right = answerer.role == ROLES[option]
            findings.append(ok(PORTS, sentence) if is_right else failed(PORTS, sentence, fix + choose, UNAVAILABLE))
    together = [ok(PORTS, f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} free.")] if free else []
    return together + findings


async def check_engine(model: str, dtype: str, device: str, threads: int, token_bytes: int = 0) -> list[Finding]:
    """What a child process computes with; it compares rows of the model as well, unless that is empty.

    token_bytes are those of the target's weights that a token reads, 0 where they are not known. Cancelled, it ends the
    child.
    """
    flags = ("--model", model, "--dtype", dtype, "--device", device, "--threads", str(threads))
    try:
        code, output, notes = await _said_by("outrider.model_service.row_probe", *flags)
    except TimeoutError:
        return [failed(ROWS, f"The engine was not done within {PROBE_TIMEOUT_S:g} s.", PROBE_FIX, SOFTWARE)]
    return engine_findings(code, output, notes, device, token_bytes)


async def check_ends(place: Path) -> Finding:
    """Finding about the tokens that end the model's answers, by a child process that loads no model."""
    try:
        code, output, notes = await _said_by("gateway.end_probe", "--model", str(place))
    except TimeoutError:
        return failed(ENDS, f"The files were not read within {PROBE_TIMEOUT_S:g} s.", END_PROBE_FIX, SOFTWARE)
    if code == CONFIG:
        return failed(ENDS, last_line(notes), "Name another model with --target.")
    if code:
        return failed(ENDS, f"The files cannot be read: {last_line(notes)}", END_PROBE_FIX, SOFTWARE)
    facts = json.loads(output.strip().splitlines()[-1])
    told = "; ".join(f"{token}, by {', '.join(places)}" for token, places in facts["ends"].items())
    if not told:
        return warning(ENDS, "No token ends an answer of the target: each goes on to max_tokens.", END_FIX)
    sentence = f"An answer of the target ends with {told}."
    if not facts["fault"]:
        return ok(ENDS, sentence)
    return warning(ENDS, f"{sentence} But {facts['fault']}.", END_FIX)


async def _said_by(module: str, *flags: str) -> tuple[int, str, str]:
    """Runs a program of ours to its end; returns its exit code, its output and its notes. Raises TimeoutError."""
    child = await asyncio.create_subprocess_exec(
        # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
        *(sys.executable, "-P", "-m", module, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A check of this machine downloads nothing.
        env={**os.environ, **OFFLINE},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, notes = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode or 0, output.decode(errors="replace"), notes.decode(errors="replace")


def last_line(notes: str) -> str:
    """Last line that a failed program printed."""
    return next((line.strip() for line in reversed(notes.splitlines()) if line.strip()), "It said nothing.")


def engine_findings(code: int, output: str, notes: str, device: str, token_bytes: int = 0) -> list[Finding]:
    """Kernels, CUDA devices, speed, and whether rows are independent, by how the child ended and its last line."""
    if code == 0:
        facts = json.loads(output.strip().splitlines()[-1])
        found = [_kernel_finding(facts["kernels"], facts["processor_levels"]), _cuda_finding(facts)]
        if (speed := facts.get("weight_bytes_per_s")) and token_bytes:
            sentence = (
                f"A product of one row reads {speed / 1e9:.1f} GB of weights a second here, measured now, and a token "
                f"of the target {gibibytes(token_bytes)}: plain decoding makes at most about "
                f"{speed / token_bytes:,.3g} tokens a second. That is an estimate from memory alone: long contexts and "
                "small models make less, and guesses more."
            )
            found.append(ok(SPEED, sentence))
        return [*found, _row_finding(facts, device)]
    problem = last_line(notes)
    if "No module named 'torch'" in problem:
        return [skipped(ROWS, "There is no torch here to compute with.", "pip install 'outrider[engine]'")]
    if code == CONFIG:
        return [failed(ROWS, problem, "Name another model with --target.")]
    return [failed(ROWS, f"The engine does not run: {problem}", PROBE_FIX, SOFTWARE)]


def _kernel_finding(built: str | None, levels: Sequence[str]) -> Finding:
    if built is None and not levels:
        sentence = "This processor has neither AVX2 nor AVX-512, so torch computes, several times slower."
        return warning(KERNELS, sentence, "Use a machine with AVX2 (2013 or later), or an accelerator.")
    if built is None:
        fix = f"Install a C compiler if there is none (apt install gcc libc6-dev), then: {REBUILD}"
        return warning(KERNELS, "The kernels are not built, so torch computes, several times slower.", fix)
    if built != levels[0]:
        return warning(KERNELS, f"{built} is built, but {levels[0]} would run here and is faster.", REBUILD)
    return ok(KERNELS, f"{built} is built, and the fastest for this processor.")


def _cuda_finding(facts: Mapping[str, Any]) -> Finding:
    devices, triton = facts["cuda"], facts["triton"]
    if "refused_device" in facts:
        return failed(CUDA, facts["refused_device"], "Or leave out --device.")
    if not devices:
        return skipped(CUDA, f"{facts['cuda_seen'].replace('It', 'torch', 1)}. Models run on the CPU.")
    kernels = {each["kernels"] for each in devices}
    reason = f"torch's own kernels compute (eager), because {facts['triton_missing']}"
    own = f"{', '.join(sorted(kernels - {EAGER}))} computes" if kernels - {EAGER} else reason
    versions = f"{facts['cuda_runtime']}, {f'Triton {triton}' if triton else 'no Triton'}; {own}."
    names = (
        f"cuda:{n} is {each['name']}, {gibibytes(each['free_bytes'])} of {gibibytes(each['memory_bytes'])} free"
        for n, each in enumerate(devices)
    )
    return ok(CUDA, f"{'; '.join(names)}. {versions}")


def _row_finding(facts: Mapping[str, Any], device: str) -> Finding:
    comparisons = facts.get("comparisons")
    if comparisons is None:
        return skipped(ROWS, "No model was loaded.")
    numerics = facts["numerics_id"]
    unequal = [each for each in comparisons if each["equal_rows"] != each["rows"]]
    if not unequal:
        counts = ", ".join(f"{each['name']} ({each['rows']} rows)" for each in comparisons)
        return ok(ROWS, f"Bitwise equal with {numerics}: {counts}.")
    shares = ", ".join(f"{each['name']}: {each['rows'] - each['equal_rows']} of {each['rows']}" for each in unequal)
    sentence = f"Rows differ in their bits with {numerics} ({shares}), so tokens may depend on who else is served."
    if device != "cpu":
        return warning(ROWS, sentence, "Use --device cpu where every token must be that of plain decoding.")
    return failed(ROWS, sentence, f"Build the kernels again: {REBUILD}", SOFTWARE)


async def check_gateway(
    address: str, rest_address: str | None, own_version: str, api_key: str | None = None, tls: Tls | None = None
) -> AsyncIterator[Finding]:
    """All checks of a gateway that runs, in order; nothing more where none serves on the address."""
    finding = gateway_finding(address, await who_answers(address, tls))
    if finding.exit_code and (reason := await asyncio.to_thread(why_refused, address, tls)):
        finding = failed(GATEWAY, reason, TLS_FIX, TlsFailed.exit_code)
    yield finding
    if finding.exit_code:
        return
    if rest_address is None:
        yield skipped(REST, "Only REST tells the gateway's version.", "Give its address with --rest-address.")
    else:
        status = await asyncio.to_thread(rest_status, rest_address, api_key, tls)
        reason = "" if status is not None else await asyncio.to_thread(why_refused, rest_address, tls)
        yield (
            failed(REST, reason, TLS_FIX, TlsFailed.exit_code)
            if reason
            else rest_finding(rest_address, status, own_version)
        )
    yield await self_test(address, api_key, has_draft=True, tls=tls)


def gateway_finding(address: str, answerer: Answerer | None) -> Finding:
    """Whether who answers is a gateway that serves."""
    if answerer is None:
        sentence = f"Nothing answers on {address}."
        return failed(GATEWAY, sentence, "Start a stack with `outrider up`, or check the address.", UNAVAILABLE)
    if answerer.role == "rest":
        sentence = f"{address} is the gateway's REST address, and --address is its gRPC one."
        return failed(GATEWAY, sentence, "Give it as --rest-address; gRPC answers on 50050 by default.")
    if answerer.role != "gateway":
        who = "a program that is not Outrider's" if answerer.role == "other" else f"the {answerer.role} service"
        return failed(GATEWAY, f"On {address} answers {who}.", "Give the address of the gateway.")
    if not answerer.is_serving:
        sentence = f"The gateway on {address} answers, but has no target to serve with."
        return failed(GATEWAY, sentence, "Start the target, or look into the gateway's log.", UNAVAILABLE)
    return ok(GATEWAY, f"The gateway on {address} is serving.")


def rest_finding(address: str, status: Mapping[str, Any] | None, own_version: str) -> Finding:
    """The version that the gateway runs, and the models that it names."""
    if status is None:
        sentence = f"{address} does not answer as a gateway's REST surface."
        fix = (
            "Check the address, which `outrider up` prints as the page's, and --api-key where the gateway asks for one."
        )
        return failed(REST, sentence, fix, UNAVAILABLE)
    services, draft = [], status.get("draft", {})
    for role in ("target", "draft"):
        service = status.get(role, {})
        if not service.get("configured"):
            services.append(f"no {role}")
        elif service.get("up"):
            services.append(f"the {role} {service.get('model')}")
        else:
            is_misfit = service.get("state") == "misfit"
            services.append(f"a {role} that {'answers, but does not fit' if is_misfit else 'is away'}")
    version = status["gateway"].get("version")
    sentence = f"Version {version} answers on {address}, with {' and '.join(services)}."
    if draft.get("state") == "misfit":
        fix = "Start a draft with the target's tokenizer there; the gateway's log says what is wrong with this one."
        return warning(REST, sentence, fix)
    if version == own_version:
        return ok(REST, sentence)
    fix = "Use the same version on both sides where something does not work."
    return warning(REST, f"{sentence} This command is version {own_version}.", fix)


async def self_test(address: str, api_key: str | None = None, *, has_draft: bool, tls: Tls | None = None) -> Finding:
    """Sends a gateway one request with and without speculation, and a question as a user asks it, without a setting.

    `has_draft` says whether a draft is to take part.
    """
    options = (Speculation(draft_count=DRAFT_COUNT), Speculation(enabled=False))
    samples: list[Sample] = []
    try:
        async with AsyncClient(address, timeout_s=ANSWER_TIMEOUT_S, api_key=api_key, tls=tls) as client:
            for speculation in options:
                stream = client.generate(
                    PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, seed=7, temperature=0.8, speculation=speculation
                )
                samples += (await stream.result()).samples
            [asked] = (
                await client.chat([{"role": "user", "content": QUESTION}], max_tokens=ASKED_TOKENS).result()
            ).samples
    except OutriderError as error:
        if error.exit_code == UNAVAILABLE:
            fix = "Start a stack with `outrider up`, or look into its log."
        else:
            fix = "Follow that sentence; the checks above may say more."
        return failed(SELF_TEST, error.message, fix, error.exit_code)
    speculative, plain = samples
    return with_answer(compare_answers(speculative, plain, has_draft=has_draft), asked)


def with_answer(finding: Finding, asked: Sample) -> Finding:
    """A finding with what was answered to the question, and a warning where that is nothing to read."""
    text = " ".join(asked.text.split())
    said = f"{finding.sentence} Asked {QUESTION!r} with its own settings, the model answers {text!r}."
    if text or finding.exit_code:
        return replace(finding, sentence=said)
    fix = "Look at what ends an answer and at the chat template in the model's files."
    return warning(finding.check, said, fix)


def compare_answers(speculative: Sample, plain: Sample, *, has_draft: bool) -> Finding:
    """Whether both answers have the same ids, and speculation took part."""
    ids, plain_ids = speculative.token_ids, plain.token_ids
    if ids != plain_ids:
        differs = (place for place, pair in enumerate(zip(ids, plain_ids, strict=False)) if pair[0] != pair[1])
        place = next(differs, min(len(ids), len(plain_ids)))
        sentence = f"Speculation changed the answer: token {place} differs, with the same seed under match."
        fix = "Run with --no-draft, and report it with this page: this must not happen."
        return failed(SELF_TEST, sentence, fix, SOFTWARE)
    result = speculative.result
    figures = result.speculation
    sentence = (
        f"{len(plain_ids)} tokens are the same with and without speculation: {figures.rounds} rounds with "
        f"{figures.accepted_tokens} of {figures.draft_tokens} guesses accepted, seed {result.seed}, "
        f"{result.numerics_ids[-1]}, target {result.model_hash[:12]}."
    )
    if figures.rounds < MIN_ROUNDS:
        fix = "Report it with this page."
        return failed(SELF_TEST, f"{figures.rounds} rounds cannot give {MAX_TOKENS} tokens.", fix, SOFTWARE)
    if has_draft and not figures.draft_tokens:
        fix = "Start a draft, or look into its log; answers are the same without it, only later."
        return warning(SELF_TEST, f"{sentence} The draft guessed nothing, so nothing was gained.", fix)
    return ok(SELF_TEST, sentence)
