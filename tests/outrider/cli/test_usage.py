"""Wrong usage of `outrider`, as a process of its own: one sentence, exit code 64, and nothing starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.rpc.channels import MAX_MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
INT32 = "in [1, 2147483647]"
ADDRESS = "HOST:PORT with a port in [1, 65535]"


def outrider(*arguments: str | bytes, stdin: bytes = b"") -> tuple[int, str, str]:
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
        ("up --threads 257", "--threads is 257, but must be in [1, 256]"),
        ("up --draft-threads 0", "--draft-threads is 0, but must be in [1, 256]"),
    ],
)
def test_values_out_of_range(line: str, sentence: str) -> None:
    """The option, its value and its limit, and no line besides."""
    assert outrider(*line.split()) == (64, "", f"outrider: {sentence}\n")


@pytest.mark.parametrize(
    ("line", "idle", "other"),
    [
        ("up --no-draft --draft models/draft", "--draft is 'models/draft'", "--no-draft"),
        ("up --no-draft --draft-device cpu", "--draft-device is 'cpu'", "--no-draft"),
        ("up --no-draft --draft-dtype float32", "--draft-dtype is 'float32'", "--no-draft"),
        ("up --no-draft --top-n 8", "--top-n is '8'", "--no-draft"),
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
def test_an_option_without_an_effect_is_refused(line: str, idle: str, other: str) -> None:
    """Rather than ignored in silence."""
    sentence = f"outrider: {idle}, but must be left out with {other}, where it has no effect\n"
    assert outrider(*line.split()) == (64, "", sentence)


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
        ("bench serve --nope", "No such option: --nope"),
        ("version --json=3", "Option '--json' does not take a value."),
    ],
)
def test_what_the_parser_refuses_is_one_sentence(line: str, words: str) -> None:
    """No box, no usage block: the only line on stderr says what is wrong, and ends with the fix."""
    code, output, notes = outrider(*line.split())
    assert (code, output) == (64, "")
    [sentence] = notes.splitlines()
    assert sentence.startswith("outrider: ")
    assert words in sentence
    assert sentence.endswith(".")
    assert "--help" in sentence


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_missing_command_is_answered_with_help(words: list[str]) -> None:
    """And with one sentence on stderr, because nothing was done."""
    code, output, notes = outrider(*words)
    assert (code, "Commands" in output, notes.count("\n")) == (64, True, 1)
    assert notes.startswith("outrider: No command is given. See `")


@pytest.mark.parametrize(("argument", "stdin"), [("-", b"a\xff"), (b"a\xff", b"")])
def test_prompt_must_be_text(argument: str | bytes, stdin: bytes) -> None:
    """Bytes that are no UTF-8 are shown, wherever they came from."""
    sentence = "outrider: prompt is b'a\\xff', but must be valid UTF-8\n"
    assert outrider("generate", argument, stdin=stdin) == (64, "", sentence)


@pytest.mark.parametrize("option", ["--stop", "--ban", "--drafter"])
def test_options_must_be_text(option: str) -> None:
    """The same with the option's name, instead of what protobuf says about it."""
    sentence = f"outrider: {option} is b'a\\xff', but must be valid UTF-8\n"
    assert outrider("generate", "Hi", option, b"a\xff") == (64, "", sentence)


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
    """The parser tells them, with the option's name and the code of all wrong usage."""
    code, output, notes = outrider("generate", "Hi", option, value)
    assert (code, output) == (64, "")
    assert option in notes


def test_prompt_must_fit_into_a_message() -> None:
    """A prompt that no gateway could receive is refused before a stack is started for it."""
    code, output, notes = outrider("generate", "-", stdin=b"a" * MAX_MESSAGE_BYTES)
    assert (code, output) == (64, "")
    assert notes.startswith("outrider: prompt and options take 41943")
    assert notes.endswith(f"but a request has at most {MAX_MESSAGE_BYTES} bytes\n")


def test_an_echo_without_numbers_starts_nothing() -> None:
    """The sentence names the options, and no stack is started for it."""
    code, _, errors = outrider("generate", "x", "--echo")
    assert (code, errors.strip()) == (64, "outrider: --echo is True, but must be given with --logprobs")
