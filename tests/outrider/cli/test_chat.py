"""`outrider chat` without a terminal, as a process of its own, and what its conversation keeps."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.command_line import RESULT, ScriptedGateway, scripted_gateway

from outrider.cli.chat.conversation import (
    COMMANDS,
    ChatTurn,
    Conversation,
    WrongCommand,
    help_text,
    parse_length,
    parse_line,
    parse_temperature,
)
from outrider.cli.race import verdict
from outrider.client import GeneratedToken, Origin, Round
from outrider.parameters import Acceptance, Rule

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "chat")
ANSWER = "Once upon a!"
ONCE = Round((GeneratedToken(4, Origin.PLAIN, "Once"),), "Once")
FIGURES = "3 tokens, 1000 tokens/s, first token 0 ms, cached 1 of 2 prompt tokens, acceptance rate 0.50, seed 5"


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


async def run_command(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a conversation."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode or 0, output.decode(), notes.decode()


async def test_each_line_is_a_turn(gateway: ScriptedGateway) -> None:
    """Answers go to stdout, figures to stderr; the whole conversation and all options are sent with every turn."""
    lines = "Grüße\n\n//not a command\n/edit instead\n/system Be brief.\n/retry\n/quit\nnever\n"
    options = ("--max-tokens", "9", "--seed", "5", "--system", "Be kind.", "--rule", "ratio", "--show-rejected")
    code, output, notes = await run_command(*options, "--address", gateway.address, stdin=lines.encode())
    assert (code, output) == (0, f"{ANSWER}\n" * 4)
    assert notes.splitlines()[0] == f"{FIGURES}, ended at the length limit"
    said = [[(each.role, each.content) for each in chat.messages] for chat in gateway.chats]
    first = [("system", "Be kind."), ("user", "Grüße")]
    assert said[:3] == [
        first,
        [*first, ("assistant", ANSWER), ("user", "/not a command")],
        [*first, ("assistant", ANSWER), ("user", "instead")],
    ]
    assert said[3] == [("system", "Be brief."), *said[2][1:]]
    assert [chat.generation.seed for chat in gateway.chats] == [5, 5, 5, 6]
    generation = gateway.chats[0].generation
    assert (generation.max_tokens, generation.speculation.return_rounds) == (9, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "code", "sentence"),
    [
        (b"refuse\nHi\n", 64, "--temperature is -1.0, but must be at least 0"),
        (b"a\xff\n", 64, "line is b'a\\xff\\n', but must be valid UTF-8"),
        (b"/edit\n", 64, "/edit needs the new text behind it."),
    ],
)
async def test_the_first_error_ends_it(gateway: ScriptedGateway, lines: bytes, code: int, sentence: str) -> None:
    """Where no gateway can answer, one sentence and its exit code are all."""
    assert await run_command("--address", gateway.address, stdin=lines) == (code, "", f"outrider: {sentence}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_it(gateway: ScriptedGateway, number: signal.Signals, expected: int) -> None:
    """The call is cancelled on the way out."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--address", gateway.address, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"wait\n")
    assert await asyncio.wait_for(process.stdout.readexactly(4), 60) == b"Once"
    process.send_signal(number)
    await asyncio.wait_for(gateway.cancelled.wait(), 120)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, output, notes) == (expected, b"", b"")


@pytest.mark.slow
def test_options_without_an_effect_are_refused() -> None:
    """As with `generate`, and before anything starts."""
    command = (*COMMAND, "--no-speculation", "--show-rejected")
    ended = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=60)
    sentence = (
        "outrider: --show-rejected is 'True', but must be left out with --no-speculation, where it has no effect\n"
    )
    assert (ended.returncode, ended.stderr) == (64, sentence)


@pytest.mark.slow
async def test_a_stack_of_its_own() -> None:
    """Started for the conversation and gone after it; the second turn finds the first in the prefix cache."""
    lines = b"Tell me about the fox.\nAnd what did the wolf say to the king in the forest?\n"
    code, output, notes = await run_command("--max-tokens", "12", "--draft-count", "4", "--json", stdin=lines)
    first, second = [json.loads(line) for line in output.splitlines()]
    assert (code, notes) == (0, "")
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 12
    assert second["speculation"]["draft_tokens"] > 0
    assert second["usage"]["cached_prompt_tokens"] > 0


def test_a_turn_without_an_answer_is_forgotten() -> None:
    """It can be repeated or edited, but the next message takes its place."""
    conversation = Conversation()
    conversation.ask("One")
    conversation.edit("Two").add(ONCE)
    assert [message["content"] for message in conversation.messages()] == ["Two", "Once"]
    conversation.ask("Three")
    conversation.ask("Four").add(ONCE)
    conversation.turns[-1].forget_answer()
    assert [message["content"] for message in conversation.messages()] == ["Two", "Once", "Four"]
    assert conversation.turns[0].figures() == f"stopped, 1 tokens, seed {conversation.turns[0].seed}"


def test_an_empty_answer_that_ended_by_itself_is_one() -> None:
    """Silence is what the model said."""
    conversation = Conversation()
    turn = conversation.ask("One")
    turn.add(replace(RESULT, rest=""))
    assert turn.answer == ""
    assert len(conversation.messages()) == 2
    assert "cached 2 of 3 prompt tokens" in turn.figures()


def test_repetitions_draw_other_seeds() -> None:
    """Random ones, or one more each time where the seed is fixed, without leaving 64 bits."""
    free = Conversation()
    seeds = {free.ask("One").seed, free.retry().seed, free.retry().seed}
    assert len(seeds) == 3
    fixed = Conversation(seed=2**63 - 2)
    assert [fixed.ask("One").seed, fixed.retry().seed, fixed.retry().seed] == [2**63 - 2, 2**63 - 1, -(2**63 - 1)]
    assert fixed.edit("Two").seed == 2**63 - 2


def test_nothing_said_cannot_be_said_again() -> None:
    """A sentence says so."""
    with pytest.raises(WrongCommand, match="no message yet"):
        Conversation("Be brief.", 5).retry()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("  Hello there \n", ("", "Hello there")),
        ("//usr is a folder", ("", "/usr is a folder")),
        (" \n", ("", "")),
        ("/edit  Hello  there \n", ("edit", "Hello  there")),
        ("/quit", ("quit", "")),
    ],
)
def test_what_a_line_means(line: str, meaning: tuple[str, str]) -> None:
    """A slash begins a command, two begin a message with one."""
    assert parse_line(line) == meaning


@pytest.mark.parametrize("line", ["/", "/Retry", "/retry now", "/retry #2 now", "/race now", "/edit #2", "/edits"])
def test_wrong_commands_are_refused(line: str) -> None:
    """By name; nothing is taken for a message by mistake."""
    with pytest.raises(
        WrongCommand, match=r"^(There is no command /|/retry takes #N|/race takes nothing|/edit needs the new text)"
    ):
        parse_line(line)


def test_an_earlier_message_is_changed_or_sent_again() -> None:
    """What came after it is forgotten, and a number that no message has is refused by name."""
    conversation = Conversation(seed=5)
    for message in ("One", "Two", "Three"):
        conversation.ask(message).add(ONCE)
    with pytest.raises(WrongCommand, match=r"^There is no message #4; the last one is #3\.$"):
        conversation.retry(4)
    assert conversation.listing() == "#1 One\n#2 Two\n#3 Three"
    assert conversation.retry(2).seed == 6
    conversation.turns[-1].add(ONCE)
    assert [turn.user for turn in conversation.turns] == ["One", "Two"]
    conversation.edit("First", 1)
    assert conversation.listing() == "#1 First"


@pytest.mark.slow
async def test_a_race_compares_the_tokens_of_both_answers(gateway: ScriptedGateway) -> None:
    """The last message is answered by turns from one seed, with salts of their own; the first answer is kept."""
    lines = b"Hello\n/race\nGo on\n"
    code, output, notes = await run_command("--address", gateway.address, stdin=lines)
    assert (code, output) == (0, f"{ANSWER}\n" * 4)
    assert "Identical token for token: 3 tokens. 1.00 times as fast, the median of 3 turns: 0.00 s with spec" in notes
    first, *race, after = gateway.chats
    assert [each.generation.speculation.enabled for each in race] == [True, False, False, True, True, False]
    assert len({chat.generation.seed for chat in (first, *race)}) == 1
    assert len({chat.generation.cache_salt for chat in (first, *race)}) == 7
    assert [[message.content for message in each.messages] for each in race] == [["Hello"]] * 6
    assert [message.content for message in after.messages] == ["Hello", ANSWER, "Go on"]


@pytest.mark.parametrize(
    ("rule", "numerics", "reason"),
    [
        (Rule.RATIO, "cpu-test", "The rule ratio does not promise the same tokens"),
        (Rule.MATCH, "cuda-test", "computed in different ways"),
        (Rule.MATCH, "cpu-test", "this must not happen"),
    ],
)
def test_a_race_names_the_token_that_differs_and_the_reason(rule: Rule, numerics: str, reason: str) -> None:
    """Counted from 1; an answer that ends sooner differs at its end."""
    other = Round((*ONCE.tokens, GeneratedToken(9, Origin.PLAIN, "!")), "Once!")
    fast = ChatTurn("One", 5, [ONCE], replace(RESULT, acceptance=Acceptance(rule=rule)))
    plain = ChatTurn("One", 5, [other], replace(RESULT, numerics_ids=(numerics,)))
    told = verdict([fast], [plain])
    assert told.startswith("Differs at token 2. ")
    assert reason in told


def test_a_race_promises_nothing_that_was_not_seen() -> None:
    """A stopped one has no result, equal answers under another rule are chance, and without guesses time is nothing."""
    ended = ChatTurn("One", 5, [ONCE], RESULT)
    assert verdict([ChatTurn("One", 5, [ONCE])], [ended]).startswith("No result")
    assert verdict([ended, ChatTurn("One", 5, [ONCE])], [ended]).startswith("No result")
    by_chance = replace(ended, result=replace(RESULT, acceptance=Acceptance(rule=Rule.BLOCK)))
    assert verdict([by_chance], [ended]).startswith("The same")
    idle = replace(RESULT, speculation=replace(RESULT.speculation, draft_tokens=0))
    assert "Neither answer had any guesses" in verdict([replace(ended, result=idle)], [ended])


def lane(*times_s: float, rounds: int) -> list[ChatTurn]:
    """Answers of 60 tokens, each after the prompt's pass and so many more."""
    speculation = replace(RESULT.speculation, rounds=rounds)
    result = replace(RESULT, completion_tokens=60, speculation=speculation)
    return [ChatTurn("One", 5, [ONCE], replace(result, total_us=int(1e6 * each))) for each in times_s]


def test_a_race_is_told_by_the_median_of_its_turns() -> None:
    """A turn is compared with its neighbour; tokens a pass count the prompt's pass and those without guesses."""
    told = verdict(lane(1.0, 2.0, 1.1, rounds=39), lane(1.4, 1.5, 1.32, rounds=59))
    assert told.endswith(
        " 1.20 times as fast, the median of 3 turns: 1.10 s with speculation, 1.40 s without. "
        "A pass of the target brought 1.50 tokens."
    )


@pytest.mark.parametrize(
    ("plain_s", "others", "doubt"),
    [
        ((1.2, 1.2, 1.2), "other processes took 0.9 of its 2 CPUs", "other processes took 0.9 of its 2 CPUs"),
        ((1.2, 1.2, 1.9), "", "the same answer without speculation took 1.20 s and 1.90 s"),
        ((5.14, 5.14, 5.14), "", "5.14 times as fast is more than these passes can bring"),
    ],
)
def test_a_busy_machine_gives_no_figure_of_speed(plain_s: tuple[float, ...], others: str, doubt: str) -> None:
    """Others were seen, the same work took unequal times, or speculation seems to bring more than its tokens."""
    told = verdict(lane(1.0, 1.0, 1.0, rounds=46), lane(*plain_s, rounds=59), others)
    busy = f"Identical token for token: 60 tokens. The machine was busy, so there is no figure of speed: {doubt}. "
    assert told == f"{busy}A pass of the target brought 1.28 tokens."


def test_help_lists_every_command() -> None:
    """Each with what it does."""
    for name, (_, meaning) in COMMANDS.items():
        assert f"/{name}" in help_text()
        assert meaning in help_text()


async def test_temperature_and_length_change_inside(gateway: ScriptedGateway) -> None:
    """The next answers have what was set, and with - again what the chat began with."""
    lines = b"One\n/temperature 0.7\n/length 200\nTwo\n/temperature\n/temperature -\n/length -\nThree\n"
    code, _, notes = await run_command("--max-tokens", "9", "--address", gateway.address, stdin=lines)
    asked = [chat.generation for chat in gateway.chats]
    assert (code, [each.max_tokens for each in asked]) == (0, [9, 200, 9])
    temperatures = [each.sampling.temperature if each.sampling.HasField("temperature") else None for each in asked]
    assert temperatures == [None, pytest.approx(0.7), None]
    assert notes.count("The temperature is 0.7.") == 2
    for sentence in ("The temperature is the default.", "at most 200 tokens.", "at most 9 tokens."):
        assert notes.count(sentence) == 1


@pytest.mark.parametrize("value", ["warm", "-1", "nan", "inf", "100.5", "1,5"])
def test_a_temperature_that_cannot_be_is_refused(value: str) -> None:
    """By name, with the limit."""
    with pytest.raises(WrongCommand, match=f"^/temperature is '{value}', but must be a number from 0 to 100, or -.$"):
        parse_temperature(value)


@pytest.mark.parametrize("value", ["0", "-5", "2.5", "long", "2147483648", "9" * 5000])
def test_a_length_that_cannot_be_is_refused(value: str) -> None:
    """By name, with the limit."""
    with pytest.raises(WrongCommand, match=r"^/length is .*, but must be a whole number from 1 to 2147483647, or -\.$"):
        parse_length(value)
