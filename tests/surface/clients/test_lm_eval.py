"""lm-eval, unmodified, in an environment of its own: its scores of texts are those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from support.models.model_cases import logprobs_and_reach
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack, run_client
from support.stack import TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.harness]
PYTHON = Path(__file__).resolve().parents[3] / ".venv-lm-eval" / "bin" / "python"
ENDS = [" went home to her mother.", " ate the moon with a spoon.", "'s seven sons were ravens"]
DOCUMENTS = [
    {"opening": "Once upon a time there was a king who had a daughter, and she", "ends": ENDS, "label": 0},
    {"opening": "The fox said to the wolf", "ends": [', "Come with me."', " and", "é ☔"], "label": 1},
    {"opening": "Then the old woman", "ends": ENDS[::-1], "label": 2},
]


def scores() -> list[list[tuple[float, float, bool]]]:
    """Of each end of each document: the sum of its log-probabilities, how far rounding may carry that, and whether it
    is what is likeliest.
    """
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)

    def score(opening: str, end: str) -> tuple[float, float, bool]:
        begun, whole = (tokenizer(text, return_tensors="pt").input_ids[0] for text in (opening, opening + end))
        rows, limit = logprobs_and_reach(model, whole.tolist())
        logprobs, wanted = rows[len(begun) - 1 : -1], whole[len(begun) :]
        return (
            float(logprobs.gather(1, wanted[:, None]).sum()),
            len(wanted) * limit,
            torch.equal(logprobs.argmax(-1), wanted),
        )

    with torch.inference_mode():
        return [[score(each["opening"], end) for end in each["ends"]] for each in DOCUMENTS]


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment here: make test-harness makes it")
async def test_scores_are_those_of_transformers(
    rest: RestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts that the server cut into tokens; generated text is what the same body gets, also in chat."""
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    # It fetches nothing, and writes nothing elsewhere.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    told = await run_client(PYTHON, "lm_eval_client.py", rest.address, await rest.model(), str(tmp_path))
    found, expected = told["ends"]["responses"], scores()
    for of_document, wanted in zip(found, expected, strict=True):
        for [(logprob, is_greedy)], (exact, limit, is_likeliest) in zip(of_document, wanted, strict=True):
            assert logprob == pytest.approx(exact, rel=0, abs=limit)
            assert is_greedy == is_likeliest
    likeliest = [max(range(len(each)), key=lambda place: each[place][0]) for each in expected]
    right = [each["label"] == best for each, best in zip(DOCUMENTS, likeliest, strict=True)]
    assert told["ends"]["results"]["acc,none"] == pytest.approx(sum(right) / len(right))
    how = {"temperature": 0, "max_tokens": 24, "stop": [".", "!", "?", "<|endoftext|>"], "seed": 1234}
    for document, [[text]] in zip(DOCUMENTS, told["openings"]["responses"], strict=True):
        answer = await rest.ask(COMPLETIONS, prompt=document["opening"], **how)
        assert text == answer["choices"][0]["text"] != ""
    for document, [[text]] in zip(DOCUMENTS, told["chat"]["responses"], strict=True):
        answer = await rest.ask(CHAT, messages=[{"role": "user", "content": document["opening"]}], **how)
        assert text == answer["choices"][0]["message"]["content"] != ""
