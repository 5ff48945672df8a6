"""Programs of others, unmodified, as processes that reach a gateway and nothing else: agents, and litellm's proxy."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from support.basics import eventually
from support.services.reciting import reciting_stack

PATIENCE_S = 240
# Agents' prompts have some 20,000 tokens of most models, and more of a tokenizer that knows few words.
CONTEXT_LEN = 1 << 19
TASK = "make the king in a.txt a queen"
DONE = "Done: the king is a queen."
# Whatever else they want to reach is refused.
NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
KEY = "sk-outrider"


async def work(folder: Path, steps: tuple[str, ...], command: list[str | Path], home: Mapping[str, str]) -> str:
    """What an agent prints that does its task, and whose target takes these steps.

    `{url}` in its files and variables is the gateway's.
    """
    place, desk, house = (folder / name for name in ("place", "desk", "house"))
    for each in (place, desk, house):
        each.mkdir()
    (desk / "a.txt").write_text("the king\n")

    def script(prompt: str) -> str:
        return steps[min(prompt.count("<|turn|>tool"), len(steps) - 1)]

    async with reciting_stack(place, script, steps, context_len=CONTEXT_LEN, served_model_name="*") as stack:
        url = str(stack.http.base_url).rstrip("/")
        variables = {"PATH": os.environ["PATH"], "HOME": str(house), "TERM": "dumb", **NOWHERE}
        for name, text in home.items():
            if "/" in name:
                (house / name).parent.mkdir(exist_ok=True)
                (house / name).write_text(text.replace("{url}", url))
            else:
                variables[name] = text.replace("{url}", url)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, cwd=desk, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            output, notes = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, (output + notes).decode()
    assert (desk / "a.txt").read_text() == "the queen\n"
    return output.decode()


@asynccontextmanager
async def litellm_proxy(
    program: Path, folder: Path, base_url: str, model: str, providers: Iterable[str]
) -> AsyncIterator[str]:
    """Starts it on a free port and returns its URL; its models are named by what it takes the gateway for."""
    link = {"api_base": base_url, "api_key": "none"}
    models = [{"model_name": each, "litellm_params": {"model": f"{each}/{model}", **link}} for each in providers]
    config, notes = folder / "config.json", folder / "notes.txt"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    home = {"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **NOWHERE}
    command: list[str | Path] = [program, "--config", config, "--host", "127.0.0.1", "--port", "0"]
    with notes.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=home, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file
        )
    found: list[str] = []

    def is_up() -> bool:
        assert process.returncode is None, notes.read_text()
        found[:] = re.findall(r"running on (http://\S+)", notes.read_text())
        return bool(found)

    try:
        await eventually(is_up)
        yield found[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
