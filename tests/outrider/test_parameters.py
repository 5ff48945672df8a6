"""Sentences about parameters that are out of range: each names the field, the value and the limit."""

from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.parameters import SamplingParameters


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -1.0}, "sampling.temperature is -1.0, but must be greater than or equal to 0"),
        ({"top_p": float("nan")}, "sampling.top_p is nan, but must be a finite number"),
        ({"top_k": "5"}, "sampling.top_k is '5', but must be a valid integer"),
        ({"logit_bias": {5: 200.0}}, "sampling.logit_bias.5 is 200.0, but must be less than or equal to 100"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias key is -1, but must be greater than or equal to 0"),
        (
            {"logit_bias": dict.fromkeys(range(301), 1.0)},
            "sampling.logit_bias has 301 entries, but must have at most 300",
        ),
        ({"top_q": 1}, "sampling.top_q is 1, but must be absent"),
    ],
)
def test_sentences(values: dict[str, Any], sentence: str) -> None:
    """One sentence for each kind of fault, and its parts again as metadata."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParameters.checked(values, "sampling.")
    assert caught.value.message == sentence
    assert sentence.startswith(caught.value.metadata["field"])
    assert caught.value.metadata["value"] in sentence
    assert caught.value.metadata["limit"]
