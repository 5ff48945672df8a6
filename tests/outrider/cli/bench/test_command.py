"""`outrider bench`: what its child needs and gets, and how fast a model is in five lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.tiny_gguf import write_gguf

from outrider.cli import modules
from outrider.cli.modules import Extra, NotInstalled, check_installed, command

MODELS = Path(__file__).resolve().parents[4] / "models"
SPEED = (sys.executable, "-c", "from outrider.cli import main; main()", "bench", "speed")


def test_the_child_gets_the_arguments_as_they_were_typed() -> None:
    """The module that measures reads them; -P guards imports."""
    given = ("--target=sized:200m", "--seed", "-3", "--json")
    assert command("a.module", given) == (
        sys.executable,
        "-P",
        "-m",
        "a.module",
        *given,
    )


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"torch"}, "the engine. Run pip install 'outrider[engine]'."),
        ({"uvicorn"}, "the gateway. Run pip install 'outrider[gateway]'."),
        ({"torch", "uvicorn"}, "the gateway and the engine. Run pip install 'outrider[all]'."),
    ],
)
def test_what_is_not_installed_is_told_with_the_command(
    missing: set[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its extra, with the exit code of a configuration; and a command that does not need it goes on."""
    monkeypatch.setattr(modules, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(NotInstalled) as refusal:
        check_installed(*Extra)
    assert refusal.value.message.endswith(sentence)
    assert refusal.value.exit_code == 78
    check_installed()


@pytest.mark.grid
def test_speed_is_five_lines_of_a_target_without_a_draft(tmp_path: Path) -> None:
    """Of a GGUF file; as JSON every sample, each of another prompt, the settings by turns."""
    file = write_gguf(MODELS / "target", tmp_path / "tales-F32.gguf")
    options = ("--target", str(file), "--prompts", "2", "--tokens", "24", "--threads", "1")
    printed = [
        subprocess.run([*SPEED, *options, *more], capture_output=True, check=True, timeout=120, text=True).stdout
        for more in ((), ("--json",))
    ]
    lines = printed[0].splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "prompt",
        "answer, plain",
        "answer, speculative",
        "speculation",
    ]
    assert lines[0].startswith("tales in bfloat16, ")
    document = json.loads(printed[1])
    samples = document["samples"]
    assert [each["speculates"] for each in samples] == [True, False, False, True]
    assert len({each["prompt"] for each in samples}) == 4
    assert all(len(each["token_ids"]) == 24 and each["tokens_per_s"] > 0 for each in samples)
    rates = [each["prompt_tokens"] / each["first_s"] for each in samples if not each["speculates"]]
    figure = document["figures"]["prompt_tokens_per_s"]
    assert min(rates) <= figure["median"] <= max(rates)
