"""Runs inspect-ai, in a virtual environment of its own, on two tasks of one sample, and prints what it got as JSON.

Imports nothing of the project. Arguments: the server's address, the model's name, and a folder for its logs.
"""

import json
import sys
from typing import Any, Literal

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.util import json_schema
from pydantic import BaseModel

QUESTION = "Tell me of a fox."


class Beast(BaseModel):
    """What it asks for; of a schema it sends no bounds of texts and numbers, so there are none."""

    kind: Literal["cat", "dog", "fox"]
    is_wild: bool


def task(name: str, **config: Any) -> Task:
    """One question, whose answer is right when it has a fox."""
    return Task(
        name=name,
        dataset=[Sample(input=QUESTION, target="fox")],
        scorer=includes(),
        config=GenerateConfig(temperature=0.0, **config),
    )


def main(base_url: str, name: str, folder: str) -> None:
    """Evaluates both and prints it."""
    model = get_model(f"openai-api/outrider/{name}", base_url=base_url, api_key="none")
    form = ResponseSchema(name="beast", json_schema=json_schema(Beast), strict=True)
    tasks = [task("text", max_tokens=12), task("beast", max_tokens=120, response_schema=form)]
    logs = evaluate(tasks, model=model, log_dir=folder, log_format="json", display="none", max_tasks=1)
    told: dict[str, Any] = {"schema": form.json_schema.model_dump(exclude_none=True)}
    for log in logs:
        [sample] = log.samples or []
        told[log.eval.task] = {
            "status": log.status,
            "text": sample.output.completion,
            "reason": sample.output.stop_reason,
            "score": (sample.scores or {})["includes"].value,
            "tokens": sum(usage.output_tokens for usage in log.stats.model_usage.values()),
        }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
