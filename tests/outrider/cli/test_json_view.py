"""Answers as JSON."""

import io
import json

from support.command_line import NUMBERED, REJECTED, TEXT, show_two_samples, shown

from outrider.cli.json_view import JsonView


def test_json_is_one_object() -> None:
    """Text with what was held back, all token ids, and the sections by their names."""
    output = io.StringIO()
    shown(JsonView(output))
    [line] = output.getvalue().splitlines()
    [answer] = json.loads(line)["samples"]
    assert answer["text"] == TEXT
    assert answer["token_ids"] == [5, 6, 7, 8, 9]
    assert answer["finish_reason"] == "length"
    assert answer["seed"] == 11
    assert answer["usage"] == {"prompt_tokens": 3, "cached_prompt_tokens": 2, "completion_tokens": 5}
    assert answer["speculation"]["acceptance_rate"] == 0.5
    assert answer["timings"] == {"queue_us": 50, "first_token_us": 1_000, "total_us": 100_000}


def test_json_tells_log_probabilities() -> None:
    """Those of the prompt beside the samples, those of the output token by token, with the most probable ones."""
    output = io.StringIO()
    shown(JsonView(output), NUMBERED)
    told = json.loads(output.getvalue())
    [first, second] = told["prompt"]
    assert first == {"token_id": 3, "text": "Ask", "logprob": None, "most_probable": []}
    assert second["logprob"] == -3.0
    [sample] = told["samples"]
    assert [token["logprob"] for token in sample["tokens"]] == [-0.25, -1.5]
    [token_id, other] = sample["tokens"][1]["most_probable"]
    assert (token_id, other) == ({"token_id": 6, "logprob": -1.5}, {"token_id": 8, "logprob": -1.625})


def test_without_log_probabilities_json_has_no_tokens() -> None:
    """Token ids say it all."""
    output = io.StringIO()
    shown(JsonView(output))
    told = json.loads(output.getvalue())
    assert list(told) == ["samples"]
    assert "tokens" not in told["samples"][0]


def test_json_lists_samples_in_order() -> None:
    """Each with its own tokens and figures, and the rule that decided."""
    output = io.StringIO()
    show_two_samples(JsonView(output))
    samples = json.loads(output.getvalue())["samples"]
    assert [(sample["text"], sample["seed"]) for sample in samples] == [(TEXT, 11), (TEXT, 12)]
    assert {(sample["rule"], sample["follows_target"]) for sample in samples} == {("match", True)}


def test_json_tells_rounds_when_they_are_wanted() -> None:
    """Who said each token first, what was not kept, and how it came about."""
    output = io.StringIO()
    shown(JsonView(output), REJECTED, rejected=True)
    [sample] = json.loads(output.getvalue())["samples"]
    first, second, _ = sample["rounds"]
    assert first["tokens"] == [{"token_id": 5, "text": "Once", "origin": "plain", "draft_logprob": None}]
    assert second["rejected"][0] == {"token_id": 70, "text": " the", "draft_logprob": -0.5}
    assert second["facts"]["draft_count"] == 3
