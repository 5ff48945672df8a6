"""What is wrong with a model is the model's fault: named at its start, or by a 500, never a client's 400."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.models.tiny_models import write_tiny_model
from support.stack import PATIENT, RunningStack, running_stack

from outrider.cli.doctor.checks import self_test
from outrider.cli.doctor.report import Status
from outrider.errors import InvalidRequest, ModelFault, ModelRefused
from outrider.model_service.row_probe import compare
from outrider.model_service.server import load_model
from outrider.model_service.settings import ModelServiceSettings

VOCAB, GREEDY = 300, {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def changed(source: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other numbers."""
    shutil.copytree(source, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def says(folder: Path, name: str, **keys: object) -> None:
    """Puts keys into one of the files of a folder."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with an output matrix of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("faults") / "sound", "llama", tie_word_embeddings=False)


def settings(model: Path) -> ModelServiceSettings:
    """Settings of a service with a model."""
    return ModelServiceSettings(str(model), kv_tokens=1024)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_what_is_no_number_is_found_at_load(sound: Path, tmp_path: Path, name: str, value: float) -> None:
    """In any tensor, also where only the type in memory cannot hold it; norms are kept as the file has them."""
    folder = changed(sound, tmp_path / "broken", lambda tensors: tensors[name].view(-1)[7:8].fill_(value))
    if value < torch.inf and "norm" in name and value == 3.4e38:
        load_model(settings(folder))
        return
    with pytest.raises(ModelRefused, match=f"{name} holds NaN or infinity as "):
        load_model(settings(folder))


def only_for_some(tensors: dict[str, torch.Tensor]) -> None:
    """Finite numbers of which one is too large for the logits of about every second prompt."""
    tensors["lm_head.weight"][9] = 0
    tensors["lm_head.weight"][9, 5] = 3.2e38
    tensors["model.norm.weight"][5] = 4.0


@asynccontextmanager
async def served(target: Path, draft: Path | None = None, **gateway: Any) -> AsyncIterator[RunningStack]:
    """A stack whose draft is never too late."""
    name = None if draft is None else str(draft)
    async with running_stack(str(target), name, kv_tokens=2048, gateway=PATIENT | gateway) as stack:
        yield stack


async def outcomes(stack: RunningStack, **options: Any) -> dict[int, ModelFault | tuple[int, ...]]:
    """What becomes of prompts of two tokens, all asked at once."""

    async def ask(token_id: int) -> ModelFault | tuple[int, ...]:
        try:
            return (await stack.generate(token_ids=[token_id, token_id + 1], **GREEDY | options)).token_ids
        except ModelFault as fault:
            return fault

    asked = range(1, 25)
    return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.0, "rule": 2},
        {"logprob_count": 2, "echo": True},
    ],
    ids=["plain", "edited", "ratio", "logprobs"],
)
async def test_infinite_logits_are_a_fault_that_names_the_model(
    sound: Path, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    """Of those prompts alone for which they come: others are answered beside them, and the log has a line."""
    broken = changed(sound, tmp_path / "broken", only_for_some)
    with capture_logs() as lines:
        async with served(broken, sound) as stack:
            found = await outcomes(stack, **options)
    faults = [each for each in found.values() if isinstance(each, ModelFault)]
    assert 0 < len(faults) < len(found)
    assert all("the model broken computed NaN or infinity in bfloat16 behind" in str(each) for each in faults)
    assert {(line["event"], line["model"]) for line in lines if line["log_level"] == "error"} == {
        ("the model computed no numbers", "broken")
    }


async def test_rest_answers_a_fault_of_the_model_with_500(sound: Path, tmp_path: Path) -> None:
    """With the model's name, and a code of its own."""
    broken = changed(sound, tmp_path / "broken", only_for_some)
    async with served(broken, rest_listen="127.0.0.1:0") as stack, httpx.AsyncClient() as http:
        assert stack.gateway is not None
        found = await outcomes(stack)
        token_id = next(number for number, each in found.items() if isinstance(each, ModelFault))
        body = {"model": "broken", "prompt": [token_id, token_id + 1], "temperature": 0, "max_tokens": 6}
        reply = await http.post(f"http://{stack.gateway.rest_address}/v1/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (500, "server_error", "model_fault")
    assert "the model broken" in error["message"]


@pytest.mark.slow
async def test_a_draft_that_computes_no_numbers_costs_guesses_alone(sound: Path, tmp_path: Path) -> None:
    """Every request is answered as without it."""
    broken = changed(sound, tmp_path / "broken", only_for_some)
    async with served(sound, broken) as stack:
        guessed = await outcomes(stack, draft_count=4)
        assert guessed == await outcomes(stack, enabled=False)
    assert not any(isinstance(each, ModelFault) for each in guessed.values())


async def test_a_doctor_says_that_the_model_is_at_fault(sound: Path, tmp_path: Path) -> None:
    """By a question as a user asks it, and without a stack by the rows that it compares."""
    broken = changed(sound, tmp_path / "broken", only_for_some)
    async with served(broken) as stack:
        finding = await self_test(stack.address, has_draft=False)
    assert (finding.status, "the model broken computed NaN or infinity" in finding.sentence) == (Status.FAILED, True)
    with pytest.raises(ModelFault, match="the model broken computed NaN or infinity in bfloat16 behind"):
        compare(load_model(settings(broken)).runner)


@pytest.mark.parametrize("ids", [[VOCAB], [2**31 - 1], [300, 4000]])
def test_ends_that_are_never_said_are_found_at_load(sound: Path, tmp_path: Path, ids: list[int]) -> None:
    """Where no other is left, the model is refused."""
    folder = Path(shutil.copytree(sound, tmp_path / "endless"))
    says(folder, "generation_config.json", eos_token_id=ids)
    says(folder, "config.json", eos_token_id=ids)
    says(folder, "tokenizer_config.json", eos_token=None, bos_token=None)
    # Nor is there one by its name.
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|unused|>"))
    with pytest.raises(ModelRefused, match=r"endless ends with the token ids \[.*but it can say only those below 257"):
        load_model(settings(folder))


async def test_an_end_beyond_the_rows_beside_a_sound_one_is_a_warning(sound: Path, tmp_path: Path) -> None:
    """And requests are served, with the end that can be said."""
    folder = Path(shutil.copytree(sound, tmp_path / "half"))
    says(folder, "generation_config.json", eos_token_id=[0, VOCAB])
    with capture_logs() as lines:
        async with served(folder) as stack:
            assert len((await stack.generate(token_ids=[5], **GREEDY)).token_ids) == 6
            assert list((await stack.info(stack.target)).eos_token_ids) == [0]
    assert any(line["event"] == "ends that are never said" and "[300]" in line["reason"] for line in lines)


async def test_a_token_without_a_row_is_the_fault_of_a_prompt_that_has_it(sound: Path, tmp_path: Path) -> None:
    """As of Gemma 3 1B and of models that were trained with a padding token: everything else is answered."""
    folder = Path(shutil.copytree(sound, tmp_path / "padded"))
    added = {"300": {"content": "<image>", "special": True}, "301": {"content": "<pad>", "special": True}}
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {f"unused{number}": number for number in range(len(raw["model"]["vocab"]), VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    says(folder, "tokenizer_config.json", added_tokens_decoder=added | {"0": raw["added_tokens"][0]})
    async with served(folder, base) as stack:
        assert (await stack.info(stack.target)).vocabulary_size == VOCAB
        answer = await stack.generate(text="abc", banned_words=["<pad>"], draft_count=3, **GREEDY)
        assert answer.completion.speculation.draft_tokens
        with pytest.raises(InvalidRequest, match=r"prompt is '<image>', but must be of tokens that the model knows"):
            await stack.generate(text="a<image>c", **GREEDY)
        with pytest.raises(InvalidRequest, match=r"token_ids\.1 is 301, but must be a token id between 0 and 299"):
            await stack.generate(token_ids=[1, 301], **GREEDY)


def test_a_tokenizer_of_another_model_is_refused(sound: Path, tmp_path: Path) -> None:
    """Where more than added tokens have no row."""
    folder = Path(shutil.copytree(sound, tmp_path / "other"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {"ab": VOCAB}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelRefused, match="other: the tokenizer knows the id 300, but the model has only 300 rows"):
        load_model(settings(folder))


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "gemma3"])
@pytest.mark.parametrize("pad", [VOCAB, -1])
def test_a_padding_id_without_a_row_is_for_nothing(tmp_path: Path, family: str, pad: int) -> None:
    """Nor is another special id, or a token more in the tokenizer, in models of either kind."""
    folder = write_tiny_model(tmp_path / "tiny", family)
    says(folder, "config.json", pad_token_id=pad, bos_token_id=VOCAB + 7)
    says(folder, "tokenizer_config.json", pad_token="<pad>", mask_token="<mask>")
    assert load_model(settings(folder)).runner.vocabulary_size == 259
