"""All commands at once: help that can be read, exit codes of sysexits.h, completion, wrong usage, and docs/cli.md."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import bench
import draft_service
import gateway
import outrider
import target_service
from gateway.lookup.datastore.command import app as datastore
from outrider.cli import app as commands
from outrider.cli import main
from outrider.cli.bench.load.__main__ import app as bench_load
from outrider.cli.bench.rounds.__main__ import app as bench_rounds
from outrider.cli.bench.speed import app as bench_speed
from outrider.cli.bench.timeline import app as bench_timeline
from outrider.errors import OutriderError
from outrider.parameters import MAX_STOPS
from outrider.process.certs import app as certs
from outrider.process.options import IO_EXIT_CODE
from outrider.rpc.wire import MAX_MESSAGE_BYTES

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
PACKAGES = (outrider, gateway, draft_service, target_service, bench)
# Programs that read their command line when they are imported, what is loaded by name alone, and what runs elsewhere.
APART = re.compile(
    r".*(__main__|\.hf_models(\..*)?|\._native\w*|bench\.gguf\.llama|bench\.vllm\.engine|drafting\.vllm)$"
)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words; groups have commands of their own."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from walk(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(walk(typer.main.get_command(commands)))
# What `outrider bench`, `outrider datastore` and `outrider certs` pass their arguments on to.
COMMANDS["bench", "rounds"] = typer.main.get_command(bench_rounds)
COMMANDS["bench", "speed"] = typer.main.get_command(bench_speed)
COMMANDS["bench", "load"] = typer.main.get_command(bench_load)
COMMANDS["bench", "timeline"] = typer.main.get_command(bench_timeline)
COMMANDS.update(walk(typer.main.get_command(datastore), ("datastore",)))
COMMANDS["certs",] = typer.main.get_command(certs)
EACH = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


Told = Callable[[str], tuple[int, str, str]]


def outcome(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    # Else the program would be called after pytest, which is a package that is run.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit) as ending:
        main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Told:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""
    return lambda line: (outcome(monkeypatch, *line.split()), *capfd.readouterr())


def test_the_commands_are_these() -> None:
    """A command that goes missing here goes missing in the docs."""
    found = dict(walk(typer.main.get_command(commands)))
    assert {
        ("up",),
        ("generate",),
        ("doctor",),
        ("version",),
        ("convert-head",),
        ("certs",),
        ("bench", "rounds"),
        ("bench", "load"),
        ("datastore", "build"),
        ("datastore", "inspect"),
    } <= set(found)
    assert set(found) == set(COMMANDS)


@pytest.mark.slow
@EACH
def test_help_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Nothing is cut off, and every option has words of its own."""
    assert outcome(monkeypatch, *words, "--help") == 0
    text = capfd.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_help_tells_the_limits_and_defaults_that_there_are() -> None:
    """How often a text may be said, and which pair is served or measured."""

    def told(parameter: str, *words: str) -> str:
        [found] = [each for each in COMMANDS[words].params if each.name == parameter]
        return str(getattr(found, "help", ""))

    assert told("stop", "generate").endswith(f"At most {MAX_STOPS} times.")
    assert told("pair", "up").endswith("Default: OUTRIDER_PAIR, or else smollm2 where it can be had.")
    for measurement in ("rounds", "load"):
        assert told("pair", "bench", measurement).endswith("Default: tales.")


@EACH
def test_every_option_is_explained(words: tuple[str, ...]) -> None:
    """One sentence at least, which begins with a capital or the name of what it is about, and ends with a stop."""
    command = COMMANDS[words]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        assert str(getattr(parameter, "help", "")).rstrip().endswith((".", "]")), parameter.name


@pytest.mark.slow
@EACH
def test_wrong_usage_is_64_everywhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """The parser's own 2 is none of sysexits.h."""
    assert outcome(monkeypatch, *words, "--no-such-option") == 64
    assert "--no-such-option" in capfd.readouterr().err


@EACH
def test_every_command_has_json_and_a_line_in_the_docs(words: tuple[str, ...]) -> None:
    """In the table of docs/cli.md."""
    assert any("--json" in parameter.opts for parameter in COMMANDS[words].params)
    assert re.search(rf"^\| `outrider {' '.join(words)}( [A-Z]+)*` \|.*--json", DOCS, re.MULTILINE)


def test_the_docs_name_no_command_that_there_is_not() -> None:
    """Every row of the table is one of the commands."""
    named = re.findall(r"^\| `outrider ([a-z -]+?)(?: [A-Z]+)*` \|", DOCS, re.MULTILINE)
    assert {tuple(name.split()) for name in named} == set(COMMANDS)


def errors(base: type[OutriderError]) -> Iterator[type[OutriderError]]:
    """A class and all below it."""
    yield base
    for each in base.__subclasses__():
        yield from errors(each)


def test_every_error_has_an_exit_code_of_the_table() -> None:
    """Of all classes in all packages; and the table has none that nothing ends with."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not APART.fullmatch(module.name):
                importlib.import_module(module.name)
    ours = {each for each in errors(OutriderError) if each.__module__.split(".")[0] in {p.__name__ for p in PACKAGES}}
    documented = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", DOCS, re.MULTILINE) for code in row.split(",")}
    assert {each.exit_code for each in ours} | {IO_EXIT_CODE} == {code for code in documented if 64 <= code <= 78}
    assert len(ours) > 15


def test_a_fault_of_ours_is_70_and_told_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its traceback, which a report needs."""

    def broken(*, as_json: bool) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(sys.modules["outrider.cli.app"], "tell_version", broken)
    assert outcome(monkeypatch, "version") == 70
    notes = capsys.readouterr().err
    assert "ZeroDivisionError: planted" in notes
    assert notes.rstrip().splitlines()[-1].startswith("outrider: An internal fault")


def test_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The option and the command say the same; JSON has more."""
    for words in (["--version"], ["version"]):
        assert outcome(monkeypatch, *words) == 0
        assert capsys.readouterr().out == f"outrider {outrider.__version__}\n"
    assert outcome(monkeypatch, "version", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == outrider.__version__
    assert {"python", "grpcio", "protobuf"} <= set(told)


@pytest.mark.parametrize(
    ("shell", "mark"), [("bash", "complete -o"), ("zsh", "#compdef outrider"), ("fish", "complete ")]
)
def test_completion_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, mark: str
) -> None:
    """What --show-completion prints in each shell."""
    monkeypatch.setenv("_OUTRIDER_COMPLETE", f"source_{shell}")
    assert outcome(monkeypatch) == 0
    script = capsys.readouterr().out
    assert mark in script
    assert "_OUTRIDER_COMPLETE" in script


@pytest.mark.parametrize(
    ("shell", "line", "wanted"),
    [
        ("bash", "outrider do", "doctor"),
        ("zsh", "outrider bench lo", "load"),
        ("fish", "outrider up --draft-d", "--draft-dtype"),
        ("bash", "outrider generate Hi --rule le", "lenient"),
    ],
)
def test_words_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, line: str, wanted: str
) -> None:
    """Commands, options, and the values of choices."""
    monkeypatch.setenv("_OUTRIDER_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert outcome(monkeypatch) == 0
    assert wanted in capsys.readouterr().out


ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
INT32 = "in [1, 2147483647]"
ADDRESS = "HOST:PORT with a port in [1, 65535]"


def run_outrider(*arguments: str | bytes, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    ended = subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, check=False, timeout=60, cwd=ROOT)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("generate Hi --draft-count many", "--draft-count is 'many', but must be a number of tokens, or auto"),
        ("generate Hi --draft-count -1", "--draft-count is '-1', but must be a number of tokens, or auto"),
        ("generate Hi --max-tokens 0", f"--max-tokens is 0, but must be {INT32}"),
        ("generate Hi --top-k -1", "--top-k is -1, but must be in [0, 2147483647]"),
        ("generate Hi --address=", f"--address is '', but must be {ADDRESS}"),
        ("generate Hi --address localhost", f"--address is 'localhost', but must be {ADDRESS}"),
        (
            "generate Hi --draft-count 1" + "0" * 5000,
            "--draft-count is '1" + "0" * 75 + "..., but must be a number of tokens, or auto",
        ),
        ("generate Hi --logit-bias 5", "--logit-bias is '5', but must be ID=BIAS, a token id and a number"),
        ("generate Hi --logit-bias 5=", "--logit-bias is '5=', but must be ID=BIAS, a token id and a number"),
        ("generate Hi --logit-bias -1=2", "--logit-bias is '-1=2', but must be ID=BIAS, a token id and a number"),
        (
            "generate Hi --logit-bias 5=1 --logit-bias 5=2",
            "--logit-bias is '5=2', but must be the only one of its token",
        ),
        ("generate Hi --stop-token-id 5 --stop-token-id -1", "--stop-token-id is -1, but must be in [0, 2147483647]"),
        ("generate Hi --samples 0", "--samples is 0, but must be in [1, 8]"),
        ("generate Hi --logprobs -1", "--logprobs is -1, but must be in [0, 20]"),
        ("generate Hi --samples 9", "--samples is 9, but must be in [1, 8]"),
        ("generate Hi --logprobs 21", "--logprobs is 21, but must be in [0, 20]"),
        ("generate Hi --min-tokens -1", "--min-tokens is -1, but must be in [0, 2147483647]"),
        ("generate Hi --top-n 257", "--top-n is 257, but must be in [1, 256]"),
        ("up --top-n 0", "--top-n is 0, but must be in [1, 256]"),
        ("up --cascade-depth 0", "--cascade-depth is 0, but must be in [1, 2147483647]"),
        ("up --cascade-depth 2", "--cascade-depth is 2, but must be left out without --cascade"),
        ("up --threads 257", "--threads is 257, but must be in [1, 256]"),
        ("up --draft-threads 0", "--draft-threads is 0, but must be in [1, 256]"),
        (
            "up --generation-defaults top_p=0.9,temperature=-1",
            "--generation-defaults temperature is -1, but must be greater than or equal to 0",
        ),
    ],
)
def test_values_out_of_range(told: Told, line: str, sentence: str) -> None:
    """The option, its value and its limit, and no line besides."""
    assert told(line) == (64, "", f"outrider: {sentence}\n")


@pytest.mark.parametrize(
    ("line", "idle", "other"),
    [
        ("up --no-draft --draft models/draft", "--draft is 'models/draft'", "--no-draft"),
        ("up --no-draft --draft-device cpu", "--draft-device is 'cpu'", "--no-draft"),
        ("up --no-draft --draft-dtype float32", "--draft-dtype is 'float32'", "--no-draft"),
        ("up --no-draft --top-n 8", "--top-n is '8'", "--no-draft"),
        ("up --no-draft --cascade lookup", "--cascade is 'lookup'", "--no-draft"),
        ("up --draft-in-target --cascade lookup", "--cascade is 'lookup'", "--draft-in-target"),
        ("generate Hi --address a:1 --cascade-depth 2", "--cascade-depth is '2'", "--address"),
        ("generate Hi --no-speculation --rule ratio", "--rule is 'ratio'", "--no-speculation"),
        ("generate Hi --no-speculation --lenience 0.5", "--lenience is '0.5'", "--no-speculation"),
        ("generate Hi --no-speculation --drafter model", "--drafter is 'model'", "--no-speculation"),
        ("generate Hi --address a:1 --top-n 8", "--top-n is '8'", "--address"),
        ("generate Hi --address a:1 --draft-dtype float32", "--draft-dtype is 'float32'", "--address"),
        ("generate Hi --no-speculation --draft models/draft", "--draft is 'models/draft'", "--no-speculation"),
        ("generate Hi --no-speculation --draft-count 4", "--draft-count is '4'", "--no-speculation"),
        ("generate Hi --address a:1 --target models/target", "--target is 'models/target'", "--address"),
        ("generate Hi --address a:1 --draft models/draft", "--draft is 'models/draft'", "--address"),
        ("generate Hi --address a:1 --dtype float32", "--dtype is 'float32'", "--address"),
    ],
)
def test_an_option_without_an_effect_is_refused(told: Told, line: str, idle: str, other: str) -> None:
    """Rather than ignored in silence."""
    sentence = f"outrider: {idle}, but must be left out with {other}, where it has no effect\n"
    assert told(line) == (64, "", sentence)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate", "Missing argument 'PROMPT'."),
        ("generate Hi --unknown", "No such option: --unknown"),
        ("generate Hi Ho", "unexpected extra argument"),
        ("generate Hi --max-tokens", "Option '--max-tokens' requires an argument."),
        ("generate Hi --max-tokens x", "Invalid value for '--max-tokens': "),
        ("generate Hi --rule foo", "Invalid value for '--rule': 'foo' is not one of 'match', 'ratio'"),
        ("nope", "No such command 'nope'."),
        ("bench nope", "No such command 'nope'."),
        ("bench load --nope", "No such option: --nope"),
        ("bench timeline --nope", "No such option: --nope"),
        ("version --json=3", "Option '--json' does not take a value."),
    ],
)
def test_what_the_parser_refuses_is_one_sentence(told: Told, line: str, words: str) -> None:
    """No box, no usage block: the only line on stderr says what is wrong, and ends with the fix."""
    code, output, notes = told(line)
    assert (code, output) == (64, "")
    [sentence] = notes.splitlines()
    assert sentence.startswith("outrider: ")
    assert words in sentence
    assert sentence.endswith(".")
    assert "--help" in sentence


@pytest.mark.parametrize("line", ["", "bench"])
def test_a_missing_command_is_answered_with_help(told: Told, line: str) -> None:
    """And with one sentence on stderr, because nothing was done."""
    code, output, notes = told(line)
    assert (code, "Commands" in output, notes.count("\n")) == (64, True, 1)
    assert notes.startswith("outrider: No command is given. See `")


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "stdin"), [("-", b"a\xff"), (b"a\xff", b"")])
def test_prompt_must_be_text(argument: str | bytes, stdin: bytes) -> None:
    """Bytes that are no UTF-8 are shown, wherever they came from."""
    sentence = "outrider: prompt is b'a\\xff', but must be valid UTF-8\n"
    assert run_outrider("generate", argument, stdin=stdin) == (64, "", sentence)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--stop", "--ban", "--drafter"])
def test_options_must_be_text(option: str) -> None:
    """The same with the option's name, instead of what protobuf says about it."""
    sentence = f"outrider: {option} is b'a\\xff', but must be valid UTF-8\n"
    assert run_outrider("generate", "Hi", option, b"a\xff") == (64, "", sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rule", "greedy"),
        ("--samples", "two"),
        ("--temperature", "warm"),
        ("--stop-token-id", "x"),
        ("--lenience", ""),
    ],
)
def test_values_that_cannot_be_read(option: str, value: str) -> None:
    """The parser names them, with the option's name and the code of all wrong usage."""
    code, output, notes = run_outrider("generate", "Hi", option, value)
    assert (code, output) == (64, "")
    assert option in notes


@pytest.mark.slow
def test_prompt_must_fit_into_a_message() -> None:
    """A prompt that no gateway could receive is refused before a stack is started for it."""
    code, output, notes = run_outrider("generate", "-", stdin=b"a" * MAX_MESSAGE_BYTES)
    assert (code, output) == (64, "")
    assert notes.startswith("outrider: prompt and options take 41943")
    assert notes.endswith(f"but a request has at most {MAX_MESSAGE_BYTES} bytes\n")


@pytest.mark.slow
def test_an_echo_without_numbers_starts_nothing() -> None:
    """The sentence names the options, and no stack is started for it."""
    code, _, errors = run_outrider("generate", "x", "--echo")
    assert (code, errors.strip()) == (64, "outrider: --echo is True, but must be given with --logprobs")
