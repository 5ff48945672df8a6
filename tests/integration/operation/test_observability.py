"""Three real processes, seen from outside: their metrics, their logs, and one trace through all of them."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import yaml
from faults.service import KV_TOKENS, MODELS, Process, launch_of
from support.basics import eventually
from support.observability import TraceCollector, collecting, documented, families, findings
from support.stack import request_of

from outrider.rpc.channels import open_channel
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2, types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
MARKER = "swordfish"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REST_TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PROMPT = f"Once upon a time there was a {MARKER} who said: open"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass
class Live:
    """The running processes, what they were asked, and what they answered."""

    processes: dict[str, Process]
    collector: TraceCollector
    completion: pb.Completion
    answer: str
    expositions: dict[str, str]

    def lines(self, service: str) -> list[dict[str, object]]:
        """What a process has logged."""
        return [json.loads(line) for line in self.processes[service].lines if line.startswith("{")]


@pytest.fixture(scope="module")
def environment() -> Iterable[pytest.MonkeyPatch]:
    """The environment of the processes that this module starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield patch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(environment: pytest.MonkeyPatch) -> AsyncIterator[Live]:
    """The stack, after an answer, a conversation, a refusal, and a client that left."""
    async with AsyncExitStack() as life:
        collector = await life.enter_async_context(collecting())
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        common = {"log_level": "debug", "metrics_listen": "127.0.0.1:0"}
        services = {
            role: Process(launch_of(f"{role}_service", model=MODELS[role], threads=1, kv_tokens=KV_TOKENS, **common))
            for role in MODELS
        }
        await asyncio.gather(*(life.enter_async_context(service) for service in services.values()))
        addresses = {role: service.address for role, service in services.items()}
        fronts = {"tokenizer": MODELS["target"], "rest_listen": "127.0.0.1:0"}
        gateway = Process(launch_of("gateway", **addresses, **fronts, **common))
        await life.enter_async_context(gateway)
        processes = {**services, "gateway": gateway}
        channel = await life.enter_async_context(open_channel(gateway.address))
        completion, answer = await _use(GenerationServiceStub(channel))
        await asyncio.to_thread(_use_rest, gateway)
        await _roll_back(await life.enter_async_context(open_channel(services["target"].address)))
        expositions = {name: await asyncio.to_thread(_scrape, process) for name, process in processes.items()}
        yield Live(processes, collector, completion, answer, expositions)


async def _use(stub: GenerationServiceStub) -> tuple[pb.Completion, str]:
    metadata = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
    request = request_of(text=PROMPT, max_tokens=48, draft_count=4, temperature=0.7, seed=5, return_rounds=True)
    said = [response async for response in stub.Generate(request, metadata=metadata)]
    chat = pb.ChatRequest(generation=request_of(max_tokens=4), messages=[pb.ChatMessage(role="user", content=PROMPT)])
    assert [response async for response in stub.Chat(chat)][-1].HasField("completion")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Generate(request_of(text=PROMPT, stop=[MARKER * 100])).read()
    leaving = stub.Generate(request_of(text=PROMPT, max_tokens=400, draft_count=0))
    await leaving.read()
    leaving.cancel()
    return said[-1].completion, "".join(response.round.text_delta for response in said)


async def _roll_back(channel: grpc.aio.Channel) -> None:
    """Rolls back a session that is unknown, which is a call like any other."""
    fence = types_pb2.Fence(session_id=b"?" * 16, epoch=1, base_len=1)
    assert (await ModelServiceStub(channel).Rollback(model_service_pb2.RollbackRequest(fence=fence))).cached_len == 0


def _use_rest(gateway: Process) -> None:
    """A request with words where they do not belong, and a trace of its own."""
    body = json.dumps({"model": "target", "prompt": PROMPT, "max_tokens": 4, "seed": 3}).encode()
    headers = {"content-type": "application/json", "traceparent": f"00-{REST_TRACE_ID}-{SPAN_ID}-01"}
    url = f"http://{_logged(gateway, 'listening')['rest']}/v1/completions?{MARKER}"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        assert answer.status == 200


def _logged(process: Process, event: str) -> dict[str, str]:
    """The first line about something."""
    lines = (json.loads(line) for line in process.lines if line.startswith("{"))
    return next(line for line in lines if line["event"] == event)


def _scrape(process: Process) -> str:
    with urllib.request.urlopen(f"http://{_logged(process, 'serving metrics')['address']}/metrics") as answer:
        return str(answer.read().decode())


def exported(live: Live) -> set[str]:
    """The families of all three processes, as their TYPE lines name them."""
    return set().union(*(families(text) for text in live.expositions.values()))


async def test_every_exposition_passes_the_lint(live: Live) -> None:
    """As `promtool check metrics` sees them, and each process has its own."""
    assert [found for text in live.expositions.values() for found in findings(text)] == []
    sizes = {name: len(families(text)) for name, text in live.expositions.items()}
    assert sizes["target"] == sizes["draft"] > 15
    assert sizes["gateway"] > 35


async def test_services_and_gateway_count_the_same(live: Live) -> None:
    """What the gateway was sent, the services have computed."""
    gateway, target, draft = (families(live.expositions[name]) for name in ("gateway", "target", "draft"))
    verdicts = sum(sample.value for sample in gateway["outrider_round_outcomes_total"].samples)
    jobs = {name: metrics["outrider_job_compute_seconds"].samples for name, metrics in (("t", target), ("d", draft))}
    counts = {name: next(s.value for s in found if s.name.endswith("_count")) for name, found in jobs.items()}
    # Of the client that left the target may have computed a verdict or two that was not read, and less is impossible.
    assert counts["t"] >= verdicts > 0
    assert counts["d"] >= gateway["outrider_spec_decode_num_drafts_total"].samples[0].value > 0
    rollbacks = {each.name: each.value for each in target["outrider_rollback_compute_seconds"].samples}
    assert rollbacks["outrider_rollback_compute_seconds_count"] == 1
    info = target["outrider_model_info"].samples[0].labels
    assert (info["model_name"], info["device"], info["dtype"]) == ("target", "cpu", "bfloat16")
    assert info["model_hash"] == live.completion.model_hash
    forwards = {each.name: each.value for each in target["outrider_forward_sessions"].samples}
    assert forwards["outrider_forward_sessions_count"] == target["outrider_forwards_total"].samples[0].value > 0


async def test_prometheus_can_rename_figures_to_vllm_s(live: Live) -> None:
    """Each that is to be renamed is exported by the gateway or the target."""
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    [keep, rename] = next(job for job in jobs if job["job_name"] == "outrider-as-vllm")["metric_relabel_configs"]
    texts = (live.expositions["gateway"], live.expositions["target"])
    samples = {sample.name for text in texts for family in families(text).values() for sample in family.samples}
    replacement = rename["replacement"].replace("$1", r"\1")
    kept = [re.sub(rename["regex"], replacement, name) for name in samples if re.fullmatch(keep["regex"], name)]
    wanted = keep["regex"].removeprefix("outrider_(").partition(")")[0].split("|")
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in kept} == {f"vllm:{name}" for name in wanted}


async def test_the_document_lists_every_metric_and_no_other(live: Live) -> None:
    """docs/observability.md has a row for each family."""
    listed = documented()
    assert len(listed) == len(set(listed))
    assert set(listed) == exported(live)


async def test_a_trace_goes_through_all_three(live: Live) -> None:
    """The client's span is the parent of the gateway's, and that of both services' sessions."""
    collector = live.collector

    def of_trace(service: str, name: str) -> list[str]:
        spans = collector.named(f"outrider-{service}", name)
        return [span.parent_span_id.hex() for span in spans if span.trace_id.hex() == TRACE_ID]

    await eventually(lambda: all((of_trace("gateway", "Generate"), of_trace("target", "session"))))
    await eventually(lambda: bool(of_trace("draft", "session")))
    assert of_trace("gateway", "Generate") == [SPAN_ID]
    [generate] = [span for span in collector.named("outrider-gateway", "Generate") if span.trace_id.hex() == TRACE_ID]
    for service in ("target", "draft"):
        assert of_trace(service, "session") == [generate.span_id.hex()]
    session = collector.named("outrider-target", "session")[0]
    attributes = {each.key: each.value.int_value for each in session.attributes}
    assert attributes["answers"] == live.completion.speculation.rounds + 1
    assert [event.name for event in session.events][:1] == ["first answer"]


async def test_a_request_over_rest_has_one_span_in_the_gateway(live: Live) -> None:
    """The sessions hang below it, and no library puts spans of its own in between."""

    def spans(service: str) -> list[tuple[str, str, str]]:
        found = [span for sender, span in live.collector.spans if sender == f"outrider-{service}"]
        own = [span for span in found if span.trace_id.hex() == REST_TRACE_ID]
        return [(span.name, span.parent_span_id.hex(), span.span_id.hex()) for span in own]

    await eventually(lambda: all(map(spans, ("gateway", "target"))))
    [(name, parent, span_id)] = spans("gateway")
    assert (name, parent) == ("rest", SPAN_ID)
    assert [(each[0], each[1]) for each in spans("target")] == [("session", span_id)]


async def test_failures_are_seen_in_spans_by_their_reason(live: Live) -> None:
    """Not by their sentence, which repeats what the client wrote."""

    def ends() -> set[str]:
        return {span.status.message for span in live.collector.named("outrider-gateway", "Generate")}

    await eventually(lambda: "INVALID_REQUEST" in ends())
    assert ends() == {"", "INVALID_REQUEST"}
    await eventually(lambda: any("cancelled" in str(span) for _, span in live.collector.spans))


async def test_no_text_is_in_logs_or_traces(live: Live) -> None:
    """Neither the prompt nor the answer, at the level of debug, in any process."""
    await eventually(lambda: any(line.get("status") == "CANCELLED" for line in live.lines("gateway")))
    words = [MARKER, live.answer.strip(), live.answer.split(".")[0].strip()]
    assert all(len(word) > 5 for word in words)
    for name, process in live.processes.items():
        assert process.lines, name
        assert [line for line in process.lines for word in words if word in line] == []
    assert [word for word in words if word.encode() in live.collector.received] == []


async def test_each_request_leaves_one_line(live: Live) -> None:
    """With its sizes, times and figures, under a name of its own, and with the client's trace."""
    lines = live.lines("gateway")
    ended = [line for line in lines if line["event"] == "request ended"]
    assert sorted(line["status"] for line in ended) == ["CANCELLED", "OK", "OK", "OK"]
    assert [line["status"] for line in lines if line["event"] == "request refused"] == ["INVALID_REQUEST"]
    first, completion = ended[0], live.completion
    assert first["trace_id"] == TRACE_ID
    assert len({line["request_id"] for line in ended}) == 4
    assert first["finish_reasons"] == ["length"]
    assert first["completion_tokens"] == completion.usage.completion_tokens == 48
    assert first["accepted_tokens"] == completion.speculation.accepted_tokens
    assert first["rounds"] == completion.speculation.rounds
    assert [line["completion_tokens"] > 0 for line in ended if line["status"] == "CANCELLED"] == [True]
