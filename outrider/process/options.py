"""Settings and command lines: each option is declared once, as a field of a frozen dataclass.

A service process has one dataclass of settings, whose fields carry a `Setting`:

    max_queue: Annotated[int, Setting("Requests that may wait.", within(0))] = 64

That is the flag --max-queue, the variable OUTRIDER_MAX_QUEUE (the flag wins), a line of --help, a row of
docs/options.md, and what `check_settings` refuses, whether a command line or a program makes the settings.
A command of `outrider` takes groups instead: dataclasses whose fields carry typer's own options.
"""

import errno
import inspect
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, NoReturn, Protocol, Self, get_args, get_type_hints, runtime_checkable

import typer

from outrider.errors import InvalidRequest, OutriderError
from outrider.process.streams import ERRORS, hold_descriptors
from outrider.rpc.wire import ADDRESS, MAX_PORT, check_address

USAGE_EXIT_CODE = 64
IO_EXIT_CODE = 74
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
# What the parser exits with on wrong usage; every other error here has a code of sysexits.h.
PARSER_EXIT_CODE = 2

NO_OUTPUT = "There is no standard output to write to; leave it open, or redirect it to a file or to /dev/null."
FULL_OUTPUT = "The output cannot be written: the disk or the quota is full."
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What the system says of a file or a folder that is none, not ours, or on what cannot be written.
UNUSABLE = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# Every address of a name. A host may be called `dns`, so this has a colon more than an address.
DNS_PLACE = re.compile(r"dns:(?P<name>[^\s:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)
FILE_PLACE = "file:"
# What values are checked with begins so, which says nothing to the user who typed the value.
CHECKER_WORDS = {": Value error, ": ": ", ": Input should be ": ": it must be "}


class FileUnusable(OutriderError):
    """The operator must name another file or folder, or make room; the sentence names it, or the variable."""

    status = "FAILED_PRECONDITION"
    reason = "FILE_UNUSABLE"
    exit_code = IO_EXIT_CODE

    @classmethod
    def of(cls, error: OSError) -> Self | None:
        """Error for what a system says of a file or folder; None where it says nothing of any."""
        if error.filename is None or error.errno not in UNUSABLE:
            return None
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
        return cls(f"{name} cannot be used: {error.strerror}.", file=name)


Command = Callable[..., None]
Number = int | float | None


@dataclass(frozen=True, slots=True)
class Limit:
    """Values that an option takes: in words, and a check that raises InvalidRequest, given the flag and the value."""

    words: str
    check: Callable[[str, Any], object]


def within(minimum: float, maximum: float = math.inf) -> Limit:
    """Numbers in [minimum, maximum]; None, for an option that was not given, passes.

    typer has ranges of its own, but what it says about them does not name the value.
    """
    words = f"in [{minimum}, {maximum}]" if maximum < math.inf else f"at least {minimum}"

    def check(flag: str, value: Number) -> None:
        # Not "outside", so that NaN is refused too.
        if value is not None and not minimum <= value <= maximum:
            raise InvalidRequest(flag, value, words)

    return Limit(words, check)


def above(bound: float) -> Limit:
    """Finite numbers of more than `bound`."""
    words = f"more than {bound}, and finite"

    def check(flag: str, value: float) -> None:
        if not bound < value < math.inf:
            raise InvalidRequest(flag, value, words)

    return Limit(words, check)


def addresses(*, min_port: int = 1, needed: bool = True, several: bool = False, named: bool = False) -> Limit:
    """HOST:PORT, or several places with commas, each perhaps as NAME=PLACE; empty where none is needed."""
    words = "HOST:PORT" + ", dns:NAME:PORT or file:PATH, or several with commas" * several
    words += ", each after NAME= or not" * named + ", or empty" * (not needed)

    def check(flag: str, text: str) -> None:
        field = flag.removeprefix("--").replace("-", "_")
        groups = named_places(text).values() if named else [listed(text)]
        entries = [each for group in groups for each in group] if several else [text] * bool(text)
        for entry in entries or [""] * needed:
            if several:
                ServicePlace.of(field, entry)
            else:
                check_address(field, entry, min_port=min_port)

    return Limit(words, check)


@dataclass(frozen=True, slots=True)
class ServicePlace:
    """Where services are: at one address, at every address of a name with a port, or at those that a file lists."""

    words: str
    """Text of the option that names it."""
    name: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def of(cls, field: str, words: str) -> Self:
        """Place that words name; raises InvalidRequest about those that name none."""
        found = DNS_PLACE.fullmatch(words)
        if found is not None and 1 <= int(found["port"]) <= MAX_PORT:
            with suppress(UnicodeError):
                # What cannot be written so is no name, and no look-up would take it.
                found["name"].encode("idna")
                return cls(words, name=found["name"], port=int(found["port"]))
        # A host may be called `file`.
        if words.startswith(FILE_PLACE) and words != FILE_PLACE and not ADDRESS.fullmatch(words):
            return cls(words, path=words.removeprefix(FILE_PLACE))
        try:
            return cls(check_address(field, words))
        except InvalidRequest:
            limit = f"HOST:PORT or dns:NAME:PORT with a port in [1, {MAX_PORT}], or file:PATH"
            raise InvalidRequest(field, words, limit) from None

    @property
    def is_changing(self) -> bool:
        """Whether there may be other addresses later."""
        return bool(self.name or self.path)


def listed(text: str) -> tuple[str, ...]:
    """The entries of a list with commas, in order."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def named_places(text: str) -> dict[str, tuple[str, ...]]:
    """Places by the names before them, in the order of the names; those without one have the empty name."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in listed(text):
        name, is_named, place = entry.partition("=")
        # After a colon it is a part of a path.
        if not is_named or ":" in name:
            name, place = "", entry
        found[name.strip()] = (*found.get(name.strip(), ()), place.strip())
    return found


def between(minimum: float, maximum: float = math.inf) -> Callable[[typer.CallbackParam, Number], Number]:
    """`within` as a callback of typer, for options of commands that have no settings."""

    def check(param: typer.CallbackParam, value: Number) -> Number:
        within(minimum, maximum).check(param.opts[0], value)
        return value

    return check


@dataclass(frozen=True, slots=True)
class Setting:
    """Makes a field of settings an option: its sentence, its limit, and its default in words where that helps."""

    sentence: str
    limit: Limit | None = None
    default: str = ""
    is_secret: bool = False
    """Whether it may have a password, which no list of processes must show."""


class Group(Protocol):
    """An instance of any dataclass, whose fields are annotated as options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, slots=True)
class Option:
    """A field of settings as users meet it."""

    name: str
    kind: Any
    setting: Setting
    default: Any
    """Default value; MISSING where one must be given."""

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        """The variable of the environment that is read where the flag is not given."""
        return f"OUTRIDER_{self.name.upper()}"

    @property
    def flags(self) -> str:
        """Flags for the parser: a switch that is on by itself can be switched off, another one can be switched on."""
        return f"{self.flag}/--no-{self.flag[2:]}" if self.default is True else self.flag

    @property
    def parameter(self) -> inspect.Parameter:
        limit = self.setting.limit
        option = typer.Option(
            self.flags,
            envvar=self.variable,
            help=self.setting.sentence + (f" Must be {limit.words}." if limit else ""),
            show_default=self.setting.default or True,
        )
        default = inspect.Parameter.empty if self.default is MISSING else self.default
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[self.kind, option]
        )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(settings: type[Group]) -> list[Option]:
    """The options of settings; those that every process has, which are keyword-only, come last."""
    hints = get_type_hints(settings, include_extras=True)
    found = []
    for field in sorted(fields(settings), key=lambda field: field.kw_only is True):
        kind, *notes = get_args(hints[field.name]) or (None,)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found += [Option(field.name, kind, note, default) for note in notes if isinstance(note, Setting)]
    return found


def words_of(settings: Group) -> list[str]:
    """The command line that makes the same settings, beside the variables of `secrets_of`."""
    words: list[str] = []
    for option in settings_of(type(settings)):
        value = getattr(settings, option.name)
        if option.setting.is_secret:
            continue
        if not isinstance(value, bool):
            words += [option.flag, str(value)] if value is not None else []
        elif value is not option.default:
            words.append(option.flags.split("/")[-1])
    return words


def secrets_of(settings: Group) -> dict[str, str]:
    """Variables of the environment that make the same settings, of what is in no command line."""
    secret = [option for option in settings_of(type(settings)) if option.setting.is_secret]
    return {option.variable: str(getattr(settings, option.name)) for option in secret}


def without_password(url: str) -> str:
    """A URL, or what was to be one, without user and password, for sentences and log lines."""
    return re.sub("//.*@", "//***@", url)


def check_settings(settings: Group) -> None:
    """Raises InvalidRequest about the first value outside its limit; for __post_init__."""
    for option in settings_of(type(settings)):
        if option.setting.limit is not None:
            option.setting.limit.check(option.flag, getattr(settings, option.name))


def grouped(command: Command) -> Command:
    """The command with an option for each field of the dataclasses that it takes; no two may have the same name.

    Of settings these are the fields with a `Setting`, of any other group all fields, which typer itself understands.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Group]] = {}
    options: dict[str, list[inspect.Parameter]] = {}
    for name, group in ((each.name, each.annotation) for each in signature.parameters.values()):
        if isinstance(group, type) and is_dataclass(group):
            groups[name] = group
            hints = get_type_hints(group, include_extras=True)
            options[name] = [option.parameter for option in settings_of(group)] or [
                inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
                )
                for each in fields(group)
            ]

    @wraps(command)
    def flat(**values: object) -> None:
        made = {
            name: group(**{option.name: values.pop(option.name) for option in options[name]})
            for name, group in groups.items()
        }
        command(**values, **made)

    # What typer reads. A function has no such attribute until somebody sets it, which mypy cannot know.
    flat.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[option for each in signature.parameters.values() for option in options.get(each.name, [each])]
    )
    return flat


def options_of(group: Group, *names: str) -> dict[str, object]:
    """Fields of a group by the names of their options, all or those named; None where an option was not given."""
    return {flag_of(name): getattr(group, name) for name in names or tuple(each.name for each in fields(group))}


def refuse_together(option: str, value: object, others: Mapping[str, object]) -> None:
    """Raises InvalidRequest when an option is given with one that has no effect beside it; None means not given."""
    other = next((name for name, given in others.items() if given is not None), None)
    if value is not None and other is not None:
        raise InvalidRequest(other, str(others[other]), f"left out with {option}, where it has no effect")


def service_app() -> typer.Typer:
    """An empty command line of a program, whose help is plain text."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@runtime_checkable
class ParserError(Protocol):
    """What the parser raises. Known by its shape, because the place of its class differs between versions of typer."""

    exit_code: int
    ctx: Any

    def format_message(self) -> str:
        """Fault, in one line or several; nothing where a command is missing, when the help is shown instead."""


def parser_sentence(error: ParserError) -> str:
    """Fault in one line, and where to look how it is done."""
    found = " ".join(error.format_message().split()) or "No command is given."
    for words, better in CHECKER_WORDS.items():
        found = found.replace(words, better)
    found = found if found.endswith((".", "?", "!")) else f"{found}."
    fix = f"See `{error.ctx.command_path} --help`." if error.ctx else "See what --help says behind the same command."
    # What was typed may have characters that would drive the reader's terminal.
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in found) + f" {fix}"


def run_app(app: Callable[[], object], prefix: str = "") -> NoReturn:
    """Runs a command line to its end; an error becomes one sentence, after the prefix, and its exit code.

    What is neither wrong usage nor an OutriderError nor a lost output comes with its traceback, and exits with 70.
    Without a standard output nothing starts; one that is full or has lost its reader ends the command.
    """
    sentence = ""
    hold_descriptors()
    if sys.stdout is None:
        sentence, code = NO_OUTPUT, IO_EXIT_CODE
    else:
        try:
            try:
                sentence, code = _outcome(app)
            finally:
                # Short outputs fail when they are flushed, which the interpreter would do too late for a sentence.
                sys.stdout.flush()
        except (OSError, SystemExit) as error:
            # The libraries that write help and tables exit by themselves, with 1, when their reader is gone.
            lost = error.__context__ if isinstance(error, SystemExit) else error
            if not _is_lost_output(lost):
                raise
            # Keeps the interpreter from writing what is left once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            is_unread = isinstance(lost, BrokenPipeError)
            sentence, code = ("", BROKEN_PIPE_EXIT_CODE) if is_unread else (FULL_OUTPUT, IO_EXIT_CODE)
    if sentence:
        _say(f"{prefix}{sentence}\n")
    sys.exit(code)


def _say(text: str) -> None:
    """Writes to standard error; that it cannot be read changes no exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # Keeps the interpreter from trying once more, and from ending with a code of its own then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), ERRORS)


def _outcome(app: Callable[[], object]) -> tuple[str, int]:
    """Line for stderr at the end of a command line, if any, and its exit code."""
    try:
        # The parser's own way to show an error is a box of several lines.
        ended = app(standalone_mode=False) if isinstance(app, typer.Typer) else app()
    except OutriderError as error:
        return error.message, error.exit_code
    except SystemExit as ending:
        if ending.code != PARSER_EXIT_CODE:
            raise
        return "", USAGE_EXIT_CODE
    except Exception as error:
        if isinstance(error, ParserError):
            return parser_sentence(error), USAGE_EXIT_CODE
        if unusable := FileUnusable.of(error) if isinstance(error, OSError) else None:
            return unusable.message, unusable.exit_code
        if _is_lost_output(error):
            raise
        _say(traceback.format_exc())
        return "An internal fault; report it with the lines above.", OutriderError.exit_code
    # An exit that a command requested comes back as its code.
    return "", ended if isinstance(ended, int) else 0


def _is_lost_output(error: BaseException | None) -> bool:
    return isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno in FULL)
