"""The conversation itself: reads a line, does what it means, shows what comes back. Knows no terminal."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from outrider.cli.chat.commands import Command, Said, help_text, parse, parse_seed
from outrider.cli.chat.conversation import Conversation, Turn, WrongCommand
from outrider.cli.chat.readers import Reader
from outrider.cli.chat.screens import Screen
from outrider.cli.options import OPTIONS, in_options
from outrider.client import Client, GenerationOptions, OutriderError, Result, Stream

HINT = "Ctrl-C again leaves, and so does /quit."


class Talk:
    """One user with one gateway."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        options: GenerationOptions,
        reader: Reader,
        screen: Screen,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._options = options
        self._reader = reader
        self._screen = screen
        self._interrupted = False
        self._saved: set[Path] = set()

    def run(self) -> None:
        """Goes on until the input ends or the user leaves.

        Raises KeyboardInterrupt at the second Ctrl-C in a row. Where nobody sits there, at the first one, and the
        first OutriderError as well.
        """
        going = True
        while going:
            try:
                going = self._step()
            except KeyboardInterrupt:
                if self._interrupted or not self._reader.is_interactive:
                    raise
                self._interrupted = True
                self._screen.tell(f"\n{HINT}")
            except OutriderError as error:
                if not self._reader.is_interactive:
                    raise
                self._screen.tell(in_options(error, OPTIONS))

    def _step(self) -> bool:
        """One line of input; whether there may be another."""
        line = self._reader.line()
        if line is None:
            return False
        self._interrupted = False
        meaning = parse(line)
        if isinstance(meaning, Said):
            self._answer(self._conversation.ask(meaning.text))
        elif meaning is not None:
            return self._obey(meaning)
        return True

    def _obey(self, command: Command) -> bool:
        commands: dict[str, Callable[[str], None]] = {
            "retry": lambda _: self._answer(self._conversation.retry()),
            "edit": self._edit,
            "system": self._system,
            "seed": self._seed,
            "save": self._save,
            "reset": self._reset,
            "help": lambda _: self._screen.tell(help_text()),
        }
        if command.name == "quit":
            return False
        commands[command.name](command.argument)
        return True

    def _answer(self, turn: Turn) -> None:
        """Asks for an answer and keeps it, or what came of it until Ctrl-C."""
        self._screen.begin(turn)
        texts: list[str] = []
        result: Result | None = None
        try:
            options = GenerationOptions(**{**self._options, "seed": turn.seed})
            with self._client.chat(self._conversation.messages(), **options) as stream, self._stoppable(stream):
                for event in stream:
                    texts.append(event.text)
                    result = event if isinstance(event, Result) else result
                    self._screen.show(event)
        except BaseException:
            self._screen.interrupt()
            raise
        self._screen.end(self._conversation.keep("".join(texts), result))

    @contextmanager
    def _stoppable(self, stream: Stream) -> Iterator[None]:
        """Within it the first Ctrl-C ends the stream in good order; the next one is an interrupt again."""
        if not self._reader.is_interactive:
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            self._interrupted = True
            stream.cancel()

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _edit(self, text: str) -> None:
        text = text or self._reader.edited(self._conversation.last_words())
        self._answer(self._conversation.edit(text))

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        system = self._conversation.system
        self._screen.tell(f"The system message is: {system}" if system else "There is no system message.")

    def _seed(self, text: str) -> None:
        if text:
            self._conversation.seed = parse_seed(text)
        seed = self._conversation.seed
        self._screen.tell("Every answer draws a seed of its own." if seed is None else f"The seed is {seed}.")

    def _save(self, name: str) -> None:
        """Writes the file. One that was there before this conversation is not written over."""
        if not name:
            raise WrongCommand("/save needs the name of a file behind it.")
        file = Path(name).expanduser()
        document = json.dumps(self._conversation.document(), ensure_ascii=False, indent=1)
        try:
            with file.open("w" if file in self._saved else "x", encoding="utf-8") as output:
                output.write(document + "\n")
        except FileExistsError:
            raise WrongCommand(f"{name} is there already; name another file.") from None
        except OSError as error:
            raise WrongCommand(f"{name} cannot be written: {error.strerror}.") from None
        self._saved.add(file)
        self._screen.tell(f"Saved to {name}.")

    def _reset(self, _argument: str) -> None:
        self._conversation.reset()
        self._screen.tell("The conversation is forgotten.")
