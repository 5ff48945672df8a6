"""vLLM on CPU, driven by lines of JSON: {"prompts": [[ids]], "streams": how many at once, "tokens": of each answer}.

Usage: engine.py MODEL SPECULATIVE OPTIONS, all in JSON but the first; SPECULATIVE is vLLM's configuration, or null.
Runs in vLLM's environment. It says what comes meanwhile, every 16 steps, and at the end what came of it.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

SAY_STEPS = 16


def say(**what: object) -> None:
    """Writes a line that is not one of vLLM's own."""
    sys.stdout.write(json.dumps({"said": what}) + "\n")
    sys.stdout.flush()


class EngineDriver:
    """An engine in this process, step by step."""

    def __init__(self, model: str, speculative: dict[str, Any] | None, options: dict[str, Any]) -> None:
        self.engine = LLM(
            model,
            dtype="float32",
            seed=0,
            # A prompt that was answered before would cost less.
            enable_prefix_caching=False,
            speculative_config=speculative,
            **options,
        ).llm_engine
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner

    def counters(self) -> dict[str, float]:
        """Counters of our proposer; another way to guess has none."""
        counters = getattr(getattr(self.runner, "drafter", None), "counters", None)
        return {} if counters is None else asdict(counters)

    def answer(self, prompts: list[list[int]], streams: int, tokens: int) -> None:
        """Answers all prompts greedily, at most `streams` at a time. A row's step gives one token and what was kept."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
        )
        answers: list[list[int]] = [[] for _ in prompts]
        waiting, running = [*range(len(prompts))][::-1], set[int]()
        began_s, steps, row_steps = time.perf_counter(), 0, 0
        while waiting or running:
            while waiting and len(running) < streams:
                number = waiting.pop()
                running.add(number)
                self.engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompts[number]), sampling)
            for output in self.engine.step():
                number = int(output.request_id)
                row_steps += 1
                answers[number] = [*output.outputs[0].token_ids]
                if output.finished:
                    running.remove(number)
            steps += 1
            if steps % SAY_STEPS == 0:
                say(steps=steps, counters=self.counters())
        seconds = time.perf_counter() - began_s
        say(answers=answers, seconds=seconds, row_steps=row_steps, counters=self.counters())


def main(model: str, speculative: str, options: str) -> None:
    """Answers lines until there are no more."""
    driver = EngineDriver(model, json.loads(speculative), json.loads(options))
    say(ready=True)
    for line in sys.stdin:
        driver.answer(**json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
