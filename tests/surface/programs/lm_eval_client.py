"""Runs lm-eval, in a virtual environment of its own, on tasks over local files, and prints what it found as JSON.

Imports nothing of the project. Arguments: the server's address, the model's name, and a folder with
`documents.jsonl`. It has no tokenizer: it asks the server for tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

# Which of several ends is the likeliest, and how a text goes on; JSON is YAML.
TASKS: dict[str, dict[str, Any]] = {
    "ends": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{opening}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "openings": {
        "output_type": "generate_until",
        "doc_to_text": "{{opening}}",
        "doc_to_target": "{{ends[0]}}",
        "generation_kwargs": {"until": [".", "!", "?"], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def evaluated(kind: str, url: str, name: str, tasks: list[str], manager: TaskManager, **options: Any) -> dict[str, Any]:
    """For each task its results, and what the model gave for each document, in order."""
    arguments = {"model": name, "base_url": url, "num_concurrent": 2, "max_retries": 1, "max_length": 512}
    found = simple_evaluate(kind, model_args=arguments, tasks=tasks, task_manager=manager, **options)
    assert found is not None
    return {
        task: {
            "results": {key: value for key, value in found["results"][task].items() if isinstance(value, float)},
            "responses": [each["resps"] for each in sorted(found["samples"][task], key=lambda each: each["doc_id"])],
        }
        for task in tasks
    }


def main(address: str, name: str, place: str) -> None:
    """Writes the tasks, runs them and prints it."""
    folder = Path(place)
    for task, config in TASKS.items():
        files = {"test": str(folder / "documents.jsonl")}
        source = {"task": task, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (folder / f"{task}.yaml").write_text(json.dumps({**source, **config}))
    manager = TaskManager(include_path=place, include_defaults=False)
    completions, chat = f"http://{address}/v1/completions", f"http://{address}/v1/chat/completions"
    told = evaluated("local-completions", completions, name, ["ends", "openings"], manager)
    in_chat = evaluated("local-chat-completions", chat, name, ["openings"], manager, apply_chat_template=True)
    sys.stdout.write(json.dumps({**told, "chat": in_chat["openings"]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
