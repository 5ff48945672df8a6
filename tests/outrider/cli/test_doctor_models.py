"""What doctor reads of models without loading them, what it makes of a pair, of memory and of the engine."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from support.models.chat_templates import CHATML
from support.models.renamed import write_renamed
from support.models.tiny_gguf import F32, Metadata, Tensors, tensors_of, write_gguf
from support.models.tiny_models import write_tiny_model
from support.stack import DRAFT, TARGET

from outrider.cli.doctor import models
from outrider.cli.doctor.checks import check_ends, engine_findings
from outrider.cli.doctor.models import Asked, ModelFiles
from outrider.cli.doctor.report import Finding, Status
from outrider.cli.local_stack import Stack
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary

KERNELS = {"kernels": "native-v3", "processor_levels": ["native-v3"], "numerics_id": "cpu-x"}
KERNELS |= {
    "cuda": [],
    "cuda_runtime": "CUDA None",
    "cuda_seen": "It sees no CUDA device",
    "triton": None,
    "triton_missing": "none is installed",
}
DEVICE = {"name": "X", "memory_bytes": 80 << 30, "free_bytes": 79 << 30, "kernels": "eager"}
Q4_0 = GGMLQuantizationType.Q4_0
EQUAL = {"name": "a row alone and in a batch", "rows": 72, "equal_rows": 72}


def found(facts: Mapping[str, object], device: str = "cpu") -> list[Finding]:
    """What doctor makes of an engine that says this."""
    return engine_findings(0, f"a log\n{json.dumps(facts)}\n", "", device)


def read(role: str, model: str) -> ModelFiles:
    """A model that can be read."""
    files = models.read_model(role, model)
    assert files is not None
    return files


def copied(folder: Path, **config: object) -> Path:
    """The embedded draft with another configuration."""
    for path in Path(DRAFT).iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    values = json.loads((Path(DRAFT) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def cached(hub: Path, name: str) -> Path:
    """The embedded draft as the hub's library keeps a model."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return copied(snapshot)


def test_the_embedded_pair_fits() -> None:
    """Sizes and type come from the headers, the verdict from the digests."""
    target, draft = read("target", TARGET), read("draft", DRAFT)
    assert (target.weights.stored_dtype, target.context_len) == ("bfloat16", 4096)
    assert target.weights.count == 11_015_040
    assert [each.status for each in models.check_fit(target, draft)] == [Status.OK]
    finding = models.check_model("target", TARGET, target, "bfloat16")
    assert (finding.status, "11,015,040 parameters" in finding.sentence) == (Status.OK, True)


def test_a_sized_model_has_its_shape_and_takes_its_memory() -> None:
    """Its tokenizer is that of the embedded model inside."""
    sized, small = read("target", "sized:target-200m"), read("target", TARGET)
    count = sized.weights.count
    assert count > 180_000_000
    assert sized.vocabulary == small.vocabulary
    assert [sized.weights.memory_bytes(dtype) for dtype in ("float32", "bfloat16")] == [4 * count, 2 * count]


def test_a_simulated_model_is_called_that_and_takes_no_memory() -> None:
    """With its size, device and time a row; a type that is not simulated is a failure."""
    simulated = read("target", "sim:h100-8b@stretch=2")
    assert simulated.vocabulary == read("target", TARGET).vocabulary
    finding = models.check_memory({"target": simulated}, {"target": Asked()}, 8 << 30)
    assert finding.sentence.startswith("A stack takes about 550 MiB (target: weights 0 KiB); 8.0 GiB are free.")
    finding = models.check_model("target", simulated.name, simulated, "bfloat16")
    assert finding.status is Status.OK
    for words in ("sim:h100-8b@stretch=2 is simulated", "8,030,261,248 parameters", "H100 SXM", "12.6 ms for one row"):
        assert words in finding.sentence
    assert models.check_model("target", simulated.name, simulated, "float32").status is Status.FAILED


def test_a_hub_id_is_not_looked_at() -> None:
    """Nothing is downloaded for a report."""
    assert models.read_model("target", "someone/something") is None
    finding = models.check_model("target", "someone/something", None, "bfloat16")
    assert (finding.status, "hf download someone/something" in finding.fix) == (Status.SKIPPED, True)
    findings, absent, _ = models.check_pair(Stack(TARGET, "someone/something"))
    assert absent == ["someone/something"]
    [vocabulary] = [each for each in findings if each.check == "vocabulary"]
    assert (vocabulary.status, "someone/something" in vocabulary.sentence) == (Status.SKIPPED, True)


def test_a_hub_id_that_was_downloaded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the library's cache, under its own name; what broke off before the weights came is not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path, "someone/something")
    files = models.read_model("draft", "someone/something")
    assert files is not None
    assert (files.name, files.vocabulary) == ("something", read("draft", DRAFT).vocabulary)
    (snapshot / "model.safetensors").unlink()
    assert models.read_model("draft", "someone/something") is None


def test_other_vocabularies_and_shorter_drafts(tmp_path: Path) -> None:
    """The first fails with what differs, the second is a warning with the length."""
    target = read("target", TARGET)
    short = read("draft", str(copied(tmp_path, max_position_embeddings=512)))
    findings = models.check_fit(target, short)
    assert [each.status for each in findings] == [Status.OK, Status.WARNING]
    assert "512" in findings[1].sentence
    other = ModelFiles("x", tmp_path, 1, "bfloat16", 4096, 1, Vocabulary.of([("a", 0), ("b", 1)]))
    [mismatch] = models.check_fit(target, other)
    assert (mismatch.status, mismatch.exit_code) == (Status.FAILED, 78)
    assert "4096 and 2 ids" in mismatch.sentence


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", struct.pack("<Q", 1 << 60), "is not a sound safetensors file"),
        ("model.safetensors", b"\x01", "is not a sound safetensors file"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"[]", "is no JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """A header that claims a terabyte is not believed."""
    copied(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=words):
        models.read_model("draft", str(tmp_path))
    findings, *_ = models.check_pair(Stack(TARGET, str(tmp_path)))
    assert [(each.check, each.exit_code) for each in findings if each.status is Status.FAILED] == [("draft model", 78)]


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """Reported as what it lacks."""
    copied(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no safetensors weights"):
        models.read_model("draft", str(tmp_path))


def test_memory_of_a_pair() -> None:
    """Caches fit themselves to what is free; without room for one, or for what is asked for, it is a failure."""
    pair = {"target": read("target", "sized:target-1b"), "draft": read("draft", DRAFT)}
    asked = {role: Asked() for role in pair}

    def told(available: int | None, **options: object) -> Finding:
        return models.check_memory(pair, asked | {"target": Asked(**options)}, available)  # type: ignore[arg-type] - its fields

    assert [told(available).status for available in (8 << 30, 3 << 30, 1 << 30, None)] == [
        *(Status.OK, Status.OK, Status.FAILED, Status.SKIPPED)
    ]
    cache = "cache of 8,192 tokens in 512 MiB, room for a whole context of 4,096, 64 KiB a token"
    assert cache in told(8 << 30).sentence
    assert told(8 << 30, dtype="int8").sentence != told(8 << 30).sentence
    assert "in 512 MiB, room for a whole context of 4,096, 32 KiB" in told(8 << 30, kv_dtype="bfloat16").sentence
    refused = told(8 << 30, kv_tokens=1_000_000)
    assert refused.status is Status.FAILED
    assert refused.sentence.startswith("For the target --kv-tokens is 1000000, but must be at most ")
    assert told(8 << 30, kv_tokens=16).status is Status.OK


def test_an_engine_that_keeps_its_promise() -> None:
    """Kernels, no device, rows equal."""
    findings = found({**KERNELS, "comparisons": [EQUAL]})
    assert [each.status for each in findings] == [Status.OK, Status.SKIPPED, Status.OK]


def test_unequal_rows_fail_on_a_cpu_and_warn_on_a_device() -> None:
    """No promise of equal bits holds on an accelerator."""
    facts = {**KERNELS, "cuda": [DEVICE], "comparisons": [{**EQUAL, "equal_rows": 70}]}
    [*_, on_cpu] = found(facts)
    assert (on_cpu.status, on_cpu.exit_code) == (Status.FAILED, 70)
    assert "2 of 72" in on_cpu.sentence
    [*_, on_device] = found(facts, "cuda:0")
    assert on_device.status is Status.WARNING


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            {"cuda": [DEVICE], "cuda_runtime": "CUDA 12.8", "triton": "3.2.0", "triton_missing": "triton is 3.2.0"},
            "cuda:0 is X, 79.0 GiB of 80.0 GiB free. CUDA 12.8, Triton 3.2.0; torch's own kernels compute (eager), "
            "because triton is 3.2.0.",
        ),
        (
            {"cuda": [DEVICE | {"kernels": "triton-v1"}] * 2, "cuda_runtime": "CUDA 12.8"},
            "cuda:0 is X, 79.0 GiB of 80.0 GiB free; cuda:1 is X, 79.0 GiB of 80.0 GiB free. CUDA 12.8, no Triton; "
            "triton-v1 computes.",
        ),
        (
            {"cuda_seen": "It sees no CUDA device, because torch 2 is built without CUDA: install a build that has it"},
            "torch sees no CUDA device, because torch 2 is built without CUDA: install a build that has it. Models run "
            "on the CPU.",
        ),
    ],
)
def test_devices_are_told_with_what_would_compute_there(facts: dict[str, Any], sentence: str) -> None:
    """Free memory, versions, and which kernels why."""
    assert found(KERNELS | facts)[1].sentence == sentence


def test_a_device_that_is_not_there_fails_with_what_is_seen() -> None:
    """In the engine's own words, and no rows were compared."""
    _, device, rows = found({**KERNELS, "refused_device": "--device is 'cuda:9', but must be seen"}, "cuda:9")
    assert (device.status, device.sentence) == (Status.FAILED, "--device is 'cuda:9', but must be seen.")
    assert rows.status is Status.SKIPPED


@pytest.mark.parametrize(
    ("kernels", "levels", "words"),
    [
        (None, ["native-v3"], "apt install gcc"),
        (None, ["native-v3"], "pip install"),
        (None, [], "AVX2"),
        ("native-v3", ["native-v4", "native-v3"], "pip install"),
    ],
)
def test_slow_kernels_are_told_with_the_fix(kernels: str | None, levels: list[str], words: str) -> None:
    """Not built, not buildable, not for this processor, or not the best for it."""
    facts = {**KERNELS, "kernels": kernels, "processor_levels": levels}
    finding = found(facts)[0]
    assert finding.status is Status.WARNING
    assert words in finding.fix


def test_a_probe_that_fails_is_told_by_its_last_words() -> None:
    """A refused model is configuration, a traceback is a fault, no torch is neither."""
    refused = engine_findings(78, "", "a log\nIt is a Mamba.\n\n", "cpu")
    assert [(each.sentence, each.exit_code) for each in refused] == [("It is a Mamba.", 78)]
    assert engine_findings(1, "", "Traceback\nOSError: disk", "cpu")[0].exit_code == 70
    gone = "ModuleNotFoundError: No module named 'torch'"
    assert engine_findings(1, "", gone, "cpu")[0].status is Status.SKIPPED


@pytest.mark.slow
def test_a_gguf_file_is_read_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a path, a folder, or the library's cache: its numbers, its type, its tokens; a broken one fails."""
    file = write_gguf(Path(TARGET), tmp_path / "small.gguf", GGMLQuantizationType.Q4_0)
    expected = read("target", TARGET)
    for place in (file, tmp_path):
        files = read("target", str(place))
        assert (files.weights.count, files.vocabulary) == (expected.weights.count, expected.vocabulary)
        assert (files.context_len, files.key_value_width) == (expected.context_len, expected.key_value_width)
        assert (files.folder, files.weights.stored_dtype) == (file, "Q4_0")
    assert read("target", str(file)).name == "small"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path, "someone/something")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "a.gguf").write_bytes(file.read_bytes())
    assert [read("target", f"someone/something{end}").folder for end in ("", ":a.gguf")] == [snapshot / "a.gguf"] * 2
    assert models.read_model("target", "someone/something:b.gguf") is None
    assert "`hf download someone/something b.gguf`" in models.download_fix(["someone/something:b.gguf"])
    file.write_bytes(file.read_bytes()[:1000])
    findings, *_ = models.check_pair(Stack(str(file), None))
    assert findings[0].status is Status.FAILED
    assert "is truncated" in findings[0].sentence


@pytest.mark.slow
async def test_the_ends_of_a_model_are_told_with_where_they_were_found(tmp_path: Path) -> None:
    """Without loading it; a template's end too, and of a GGUF file its keys."""
    finding = await check_ends(Path(TARGET))
    assert finding.status is Status.OK
    assert (
        "<|endoftext|> (0), by generation_config.json, config.json, tokenizer_config.json, its name" in finding.sentence
    )
    model = Path(write_renamed(tmp_path / "model", {",": "<|mark|>"}))
    (model / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<|mark|>"))
    assert "<|mark|> (12), by the chat template" in (await check_ends(model)).sentence
    gguf = write_gguf(write_tiny_model(tmp_path / "tiny", "llama", tie_word_embeddings=False), tmp_path / "tiny.gguf")
    assert "(0), by tokenizer.ggml.eos_token_id, its name, the chat template" in (await check_ends(gguf)).sentence


@pytest.mark.slow
async def test_a_model_without_an_end_is_a_warning(tmp_path: Path) -> None:
    """And so is a template that closes turns with what is no token."""
    model = Path(write_renamed(tmp_path, {"<|endoftext|>": "<|mark|>"}, generation_config={}, tokenizer_config={}))
    (model / "config.json").write_text("{}")
    finding = await check_ends(model)
    assert (finding.status, finding.exit_code) == (Status.WARNING, 0)
    assert finding.sentence == "No token ends an answer of the target: each goes on to max_tokens."
    (model / "chat_template.jinja").write_text(CHATML)
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    finding = await check_ends(model)
    assert finding.status is Status.WARNING
    assert "closes an assistant's turn with '<|im_end|>', which is no token of its own" in finding.sentence
    (model / "tokenizer_config.json").write_text("[]")
    finding = await check_ends(model)
    assert (finding.status, finding.exit_code) == (Status.FAILED, 78)
    assert "tokenizer_config.json" in finding.sentence


def test_a_default_that_nobody_could_have_is_a_warning(tmp_path: Path) -> None:
    """Of the target, whose defaults count; a draft's are not used."""
    folder = copied(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text('{"temperature": -1, "top_p": 0.9}')
    findings, *_ = models.check_pair(Stack(str(folder), None))
    warned = [each for each in findings if each.status is Status.WARNING]
    assert [each.check for each in warned] == ["generation defaults"]
    assert "temperature is -1, which is left out" in warned[0].sentence
    findings, *_ = models.check_pair(Stack(DRAFT, str(folder)))
    assert "generation defaults" not in [each.check for each in findings]


def test_weights_of_a_gguf_file_are_counted_by_type(tmp_path: Path) -> None:
    """What they take in memory in each type, and what a token reads of them: not an embedding that is looked up."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", hidden_size=256, intermediate_size=512)

    def mix(_: Metadata, tensors: Tensors) -> None:
        tensors["output.weight"] = quantize(tensors_of(folder, F32)["output.weight"][0], Q4_0), Q4_0

    file = write_gguf(folder, tmp_path / "tiny-Q8_0.gguf", GGMLQuantizationType.Q8_0, edit=mix)
    files = read("target", str(file))
    weights, embedding = files.weights, 300 * 256
    assert (files.name, files.family, weights.is_tied) == ("tiny", "LlamaForCausalLM", False)
    assert weights.mix.startswith("Q8_0 (9")
    assert "Q4_0 (" in weights.mix
    assert (weights.served("auto", "cpu"), weights.served("auto", "cuda:0")) == ("file-a15", "bfloat16")
    runner = ModelRunner.load(str(file), kv_tokens=64)
    assert weights.memory_bytes("file") == pytest.approx(sum(each.nbytes for each in runner.model.weights), rel=0.01)
    assert weights.memory_bytes("file") - weights.token_bytes("file") == embedding * 34 // 32
    for dtype in ("bfloat16", "int8", "int4"):
        loaded = sum(each.nbytes for each in ModelRunner.load(str(file), dtype=dtype, kv_tokens=64).model.weights)
        assert weights.memory_bytes(dtype) == pytest.approx(loaded, rel=0.02)
    finding = models.check_model("target", str(file), files, "auto")
    assert (
        f"{weights.count:,} parameters in {weights.mix}, served in the types of the file (file-a15)" in finding.sentence
    )
    assert models.check_model("target", TARGET, read("target", TARGET), "file").status is Status.FAILED


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_of_experts_a_token_reads_those_that_it_chooses(tmp_path: Path, kind: str) -> None:
    """All of them take memory; both numbers are said."""
    folder = write_tiny_model(tmp_path / "tiny", "qwen3_moe", num_experts=8, num_experts_per_tok=2)
    place = folder if kind == "folder" else write_gguf(folder, tmp_path / "tiny.gguf")
    files = read("target", str(place))
    weights, looked_up = files.weights, 300 * 48
    # Two layers of three have experts of three matrices.
    idle = 2 * 6 * 3 * 40 * 48
    assert weights.memory_bytes("float32") == 4 * weights.count
    assert weights.token_bytes("float32") == 4 * (weights.count - looked_up - idle)
    finding = models.check_model("target", str(place), files, "float32")
    assert f"{weights.count:,} parameters ({weights.count - idle:,} for a token) in float32" in finding.sentence


def test_a_speed_is_an_estimate_from_what_a_token_reads() -> None:
    """On the CPU, where kernels were measured and the weights are known."""
    facts = KERNELS | {"comparisons": [EQUAL], "weight_bytes_per_s": 20e9}
    assert not any(each.check == "speed" for each in found(facts))
    output = json.dumps(facts)
    [speed] = [each for each in engine_findings(0, output, "", "cpu", 1 << 30) if each.check == "speed"]
    assert "reads 20.0 GB of weights a second here" in speed.sentence
    assert "a token of the target 1.0 GiB: plain decoding makes at most about 18.6 tokens a second" in speed.sentence
    assert not any(
        each.check == "speed" for each in engine_findings(0, json.dumps(KERNELS | {"comparisons": None}), "", "cpu", 9)
    )
