"""GuideLLM, unmodified, in an environment of its own: a benchmark of chat ends without an error."""

import asyncio
import json
from pathlib import Path

import pytest
from support.stack import TARGET
from surface.rest_stack import CHAT, RestStack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.harness]
GUIDELLM = Path(__file__).resolve().parents[2] / ".venv-guidellm" / "bin" / "guidellm"
PATIENCE_S = 400


@pytest.mark.skipif(not GUIDELLM.exists(), reason="no environment here: make test-harness makes it")
async def test_a_benchmark_counts_what_was_said(
    rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the usage on every chunk; every request gets its tokens, and figures of speculation."""
    # It fetches nothing, and writes nothing elsewhere.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target=http://{rest.address},model={await rest.model()},request_format={CHAT}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "tokenizer": f"kind=hf_auto,model={TARGET}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        GUIDELLM, "run", *words, "--disable-console", stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, output.decode()
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"]) == (4, 0), output.decode()
    for request in benchmark["requests"]["successful"]:
        assert json.loads(request["request_args"])["body"]["stream_options"]["continuous_usage_stats"] is True
        assert request["output_tokens"] == 8
        assert request["output"]
        assert request["response_metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
