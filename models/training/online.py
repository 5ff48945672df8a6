"""A head that goes on learning from what its target answered (target_service/recorder.py), a version at a time.

A version learns from the answers that are there when it begins, but for the newest tenth. On these it is compared with
the head that is served, and published only where it keeps more, beyond doubt.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from outrider.errors import InvalidRequest
from outrider.process.options import between
from target_service.recorder import FACTS, VERSION, number_of, shards, versions
from training.draft_report import kept_of, tokens_a_round
from training.head_files import HeadFiles
from training.head_run import eagle_head
from training.heads import Eagle3
from training.idle import BlocksWhenIdle, IdleMachine
from training.learn import Stage, go_through
from training.model import CausalModel
from training.run import BATCH, COUNT
from training.steady import SteadyConsole
from training.storage import Storage, write_whole
from training.stored import AnswerBlocks, Material, StoredTeacher, head_loss, over_raw_features

KEPT_VERSIONS = 3
HELD_OUT_SHARE = 0.1
MIN_HELD_OUT = 8
# Guesses of a round, as chains of a head are usually long.
MEASURED_DEPTHS = 3
# A version must keep more than this share of tokens a round, and more than so many standard errors.
LEAST_GAIN, DOUBT = 0.01, 2.0
# As of models/make_draft.py: an output matrix that is known already has little to learn.
HEAD_TABLE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """Settings that versions depend on; with other ones they go into another folder."""

    seed: Annotated[int, typer.Option(callback=between(0, 1 << 62), help="Of the order of the answers.")] = 1
    steps: Annotated[int, typer.Option(callback=COUNT, help="Of a version.")] = 200
    batch: Annotated[int, typer.Option(callback=BATCH, help="Answers a step.")] = 4
    learning_rate: Annotated[
        float, typer.Option(callback=between(1e-7, 1), help="Of matrices, at its highest; training's own is 2e-3.")
    ] = 1e-3
    new_answers: Annotated[
        int, typer.Option(callback=between(MIN_HELD_OUT * 2, 1 << 30), help="Files that a version waits for.")
    ] = 128


class Gain(NamedTuple):
    """How many tokens a round more a head keeps than another one, on texts that neither has learnt."""

    tokens: float
    """Tokens a round of the other one."""
    gain: float
    doubt: float
    """Standard error of the gain, over texts."""

    @property
    def is_sure(self) -> bool:
        return self.gain > LEAST_GAIN * self.tokens and self.gain > DOUBT * self.doubt


def gain_of(rounds: Sequence[tuple[float, float]], weights: Sequence[int]) -> Gain:
    """Gain from tokens a round of both heads, the other one's first, on each text, and from how long texts are."""
    total = sum(weights)
    other = sum(weight * before for (before, _), weight in zip(rounds, weights, strict=True)) / total
    gains = [after - before for before, after in rounds]
    mean = sum(weight * gain for gain, weight in zip(gains, weights, strict=True)) / total
    squares = sum((weight * (gain - mean)) ** 2 for gain, weight in zip(gains, weights, strict=True))
    return Gain(other, mean, math.sqrt(squares) / total)


@torch.inference_mode()
def kept_of_text(head: Eagle3, teacher: StoredTeacher, output: Tensor, row: int) -> tuple[list[float], int]:
    """Sums of what is kept of the guesses of each depth in one text at its own temperature, and of how many rounds.

    `output` is the target's whole matrix: what is drawn of ids that the head lacks counts as refused.
    """
    material, places = teacher.material, torch.tensor([row])
    end = int(material.is_answer[row].nonzero().max()) + 1
    # Distributions of answers' tokens, as far as all depths have a row before them.
    columns = material.is_answer[row, MEASURED_DEPTHS + 1 : end].nonzero()[:, 0] + MEASURED_DEPTHS
    laws = linear(material.states("normed", places)[0, columns].bfloat16(), output).float()
    temperature = temperature_of(material, row)
    head.steps_ahead = MEASURED_DEPTHS
    with torch.autocast("cpu", torch.bfloat16):
        features, token_ids = material.states("taps", places)[:, :end], material.token_ids[row : row + 1, :end]
        steps = enumerate(head.normed_states(features, token_ids))
        guesses = [head.lm_head(states[0, columns - 1 - step]).float() for step, states in steps]
    return [kept_of(laws, each, teacher.draft_ids, temperature) for each in guesses], len(columns)


def temperature_of(material: Material, row: int) -> float:
    """Temperature at which a recorded text was drawn."""
    path, place = material.places[row]
    with safe_open(path, "pt") as file:
        return float(file.get_tensor("temperature")[place])


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """Versions of a head in one folder, from wherever its storage says that it stands."""

    settings: OnlineSettings
    target: CausalModel
    served: Path
    """Folder of the head that the target has beside."""
    files: HeadFiles
    record: Path
    storage: Storage
    console: SteadyConsole
    machine: IdleMachine

    def is_due(self) -> bool:
        """Whether a version is under way, or there is enough for one."""
        return self._texts.exists() or len(self.new_answers()) >= self.settings.new_answers

    def new_answers(self) -> list[Path]:
        """Files that came after those of the last version."""
        last = self.storage.result(f"{VERSION}{self._number - 1}")
        return [path for path in shards(self.record) if last is None or number_of(path) > last["newest"]]

    def make(self) -> str:
        """Makes the next version, published or not; returns in words what came of it."""
        number = self._number
        for texts in self.storage.folder.glob("texts-*"):
            # Of a version that a kill has left after its end.
            if texts != self._texts:
                shutil.rmtree(texts)
        if not self._texts.exists():
            write_whole(self._texts, partial(linked, shards(self.record)))
        texts = self._texts
        newest, files = number_of(shards(texts)[-1]), different(shards(texts))
        gains = self._version(files, number) if len(files) >= 2 * MIN_HELD_OUT else {}
        found = {"newest": newest, "gains": {name: tuple(gain) for name, gain in gains.items()}}
        self.storage.save_result(f"{VERSION}{number}", found)
        shutil.rmtree(texts)
        (self.storage.folder / f"{self._stage(number)}.pt").unlink(missing_ok=True)
        return in_words(number, gains, len(files))

    def _version(self, files: Sequence[Path], number: int) -> dict[str, Gain]:
        """Learns from all files but the newest, and publishes what is better on these; returns how much it is."""
        count = max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(files)))
        learnt, held_out = Material.of(files[:-count]), Material.of(files[-count:])
        output = self.target.get_output_embeddings().weight.detach().bfloat16()
        # From the last version that was published before this one.
        earlier = [path for path in versions(self.storage.out) if number_of(path) < self._number]
        draft_ids, began = self.files.draft_ids, earlier[-1] if earlier else self.served
        teacher = StoredTeacher(learnt, output[draft_ids], draft_ids, learnt.feature_scale())
        head = self._head(began)
        self._learn(head, teacher, number)
        made = over_raw_features(head, teacher)
        judge = StoredTeacher(held_out, output[draft_ids], draft_ids, teacher.feature_scale)
        rivals = dict.fromkeys((self.served, began))
        gains = {rival.name: self._gain(self._head(rival), made, judge, output) for rival in rivals}
        place = self.storage.out / f"{VERSION}{number:03}"
        if is_better(gains) and not place.exists():
            write_whole(place, partial(self.files.write, made.state_dict(), output))
        for old in versions(self.storage.out)[:-KEPT_VERSIONS]:
            shutil.rmtree(old)
        return gains

    @property
    def _number(self) -> int:
        number = 1
        while self.storage.result(f"{VERSION}{number}") is not None:
            number += 1
        return number

    @property
    def _texts(self) -> Path:
        return self.storage.folder / f"texts-{self._number}"

    def _head(self, folder: Path) -> Eagle3:
        return eagle_head(self.files, self.target, self.settings.seed, folder)

    @staticmethod
    def _stage(number: int) -> str:
        return f"learn-{number}"

    def _learn(self, head: Eagle3, teacher: StoredTeacher, number: int) -> None:
        """Raises how often the head's guesses are kept on what is learnt, in steps that wait for an idle machine."""
        settings, name = self.settings, self._stage(number)
        head.fc.weight.data *= teacher.feature_scale
        known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        known[self.files.draft_ids] = True
        length = teacher.material.token_ids.shape[1]
        stage = Stage(
            name, settings.steps, settings.learning_rate, ((settings.batch, length),), table_share=HEAD_TABLE_SHARE
        )
        sizes = f"{settings.steps:,} steps of {settings.batch} of {len(teacher.material.token_ids):,} answers"
        self.console.print(f"{name}: {sizes}")
        blocks = AnswerBlocks(teacher.material, known, head.steps_ahead, settings.batch, f"{settings.seed} {name}")
        lesson = BlocksWhenIdle(blocks, self.machine), head_loss(teacher, overlap=True)
        go_through(stage, head, partial(list, [lesson]), self.storage, self.console)

    def _gain(self, rival: Eagle3, made: Eagle3, judge: StoredTeacher, output: Tensor) -> Gain:
        rounds: list[tuple[float, float]] = []
        weights: list[int] = []
        for row in range(len(judge.material.token_ids)):
            self.console.doing = f"comparing: text {row + 1:,} of {len(judge.material.token_ids):,}"
            self.machine.wait()
            kept = [kept_of_text(head, judge, output, row) for head in (rival, made)]
            if count := kept[0][1]:
                before, after = (tokens_a_round([each / count for each in sums]) for sums, _ in kept)
                rounds.append((before, after))
                weights.append(count)
        return gain_of(rounds, weights)


def different(files: Sequence[Path]) -> list[Path]:
    """The files but for those whose text comes again later: what is held out must not have been learnt."""
    newest: dict[bytes, Path] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            text = file.get_tensor("token_ids").numpy().tobytes()
        newest.pop(text, None)
        newest[text] = path
    return [*newest.values()]


def linked(files: Sequence[Path], folder: Path) -> None:
    """A folder of these files as they are now, which takes no room on their own disk; some may be gone already."""
    folder.mkdir()
    for path in files:
        with suppress(FileNotFoundError):
            try:
                os.link(path, folder / path.name)
            except FileNotFoundError:
                raise
            except OSError:
                # Another disk, or one without such links.
                shutil.copyfile(path, folder / path.name)


def check_record(record: Path, digest: str, taps: Sequence[int]) -> None:
    """Raises InvalidRequest unless a folder holds answers of the target of this digest, with what the head reads."""
    try:
        facts = json.loads((record / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("--record", str(record), f"a folder that a target records into: {error}") from error
    wanted = {"model_hash": digest, "taps": [*taps]}
    other = next((name for name, value in wanted.items() if facts.get(name) != value), None)
    if other is not None:
        limit = f"of this target with this head: its {other} is {facts.get(other)!r} and not {wanted[other]!r}"
        raise InvalidRequest("--record", str(record), limit)


def is_better(gains: Mapping[str, Gain]) -> bool:
    """Whether a version is surely better than all that it was compared with, and was compared."""
    return bool(gains) and all(gain.is_sure for gain in gains.values())


def in_words(number: int, gains: Mapping[str, Gain], num_texts: int) -> str:
    """A line about a version."""
    compared = ", ".join(
        f"{gain.gain:+.3f} ± {gain.doubt:.3f} tokens a round beside {gain.tokens:.3f} of {name}"
        for name, gain in gains.items()
    )
    verdict = "published" if is_better(gains) else "not published"
    return f"version {number} is {verdict}: {compared or f'only {num_texts} answers differ'}"
