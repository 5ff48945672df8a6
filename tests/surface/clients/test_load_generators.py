"""GuideLLM and AIPerf, unmodified, in environments of their own: benchmarks of chat end without an error."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.rest.rest_stack import CHAT, RestStack, output_of
from support.stack import TARGET

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.harness]
ROOT = Path(__file__).resolve().parents[3]
GUIDELLM = ROOT / ".venv-guidellm" / "bin" / "guidellm"
AIPERF = ROOT / ".venv-aiperf" / "bin" / "aiperf"
PATIENCE_S = 400


async def run(program: Path, command: str, options: Mapping[str, str], *switches: str) -> str:
    """What a program prints that ends well."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return await output_of(program, command, *words, *switches, patience_s=PATIENCE_S)


@pytest.mark.skipif(not GUIDELLM.exists(), reason="no environment here: make test-harness makes it")
async def test_guidellm_counts_what_was_said(rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the usage on every chunk; every request gets its tokens, and figures of speculation."""
    # It fetches nothing, and writes nothing elsewhere.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    report = tmp_path / "report.json"
    options = {
        # As JSON, because it says more than words of KEY=VALUE can: without a number `auto` may guess nothing.
        "backend": json.dumps(
            {
                **{"kind": "openai_http", "target": f"http://{rest.address}", "model": await rest.model()},
                **{"request_format": CHAT, "extras": {"body": {"speculation": {"draft_count": 4}}}},
            }
        ),
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "tokenizer": f"kind=hf_auto,model={TARGET}",
        "output": f"kind=json,path={report}",
    }
    output = await run(GUIDELLM, "run", options, "--disable-console")
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"]) == (4, 0), output
    for request in benchmark["requests"]["successful"]:
        assert json.loads(request["request_args"])["body"]["stream_options"]["continuous_usage_stats"] is True
        assert request["output_tokens"] == 8
        assert request["output"]
        assert request["response_metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.skipif(not AIPERF.exists(), reason="no environment here: make test-harness makes it")
async def test_aiperf_counts_what_was_said(rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the usage on every chunk; it finds the tokens of every request, and what speculation did."""
    # In offline mode it would take the tokenizer's folder for a name on the hub.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    options = {
        "model": await rest.model(),
        "url": f"http://{rest.address}",
        "endpoint-type": "chat",
        "tokenizer": str(TARGET),
        "request-count": "4",
        "concurrency": "2",
        "isl": "16",
        "osl": "8",
        "extra-inputs": json.dumps({"ignore_eos": True, "speculation": {"draft_count": 4}}),
        "ui": "none",
        "artifact-dir": str(tmp_path / "report"),
    }
    switches = ("--streaming", "--use-server-token-count", "--per-chunk-usage", "--no-gpu-telemetry")
    output = await run(AIPERF, "profile", options, *switches)
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 4, output
    lines = (tmp_path / "report" / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line)["metrics"] for line in lines]
    assert [each["usage_completion_tokens"]["value"] for each in records] == [8] * 4
    assert all(each["spec_decode_steps"]["value"] > 0 for each in records)
