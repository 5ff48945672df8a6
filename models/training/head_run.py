"""The order of things when a drafting head is trained: what it is, what it learns from, and what comes of it."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
import typer
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.errors import InvalidRequest
from outrider.process.options import between
from training.data import IGNORED, HeldOut, TrainingBlocks, targets_of
from training.head_files import METHODS, HeadFiles
from training.heads import Eagle3, HeadShape, Medusa, Mtp, TrainedMlpSpeculator
from training.imitate import Teacher, continued, greedy_tokens_per_pass, imitation, measure_head
from training.learn import Lesson, Stage, go_through
from training.model import PRESETS, CausalModel
from training.run import BATCH, COUNT, frozen
from training.steady import SteadyConsole
from training.storage import Storage, write_whole

SIZE = between(1, 65536)
HEAD_RATES = {"head": 3e-3, "head-overlap": 1e-3}
SAMPLE_BATCH = 64
GREEDY_TEXTS, PROMPT_LEN, GREEDY_LEN = 64, 32, 160


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Settings that a head depends on, beside text, target and device; another value of one is another run."""

    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "eagle3"
    preset: Annotated[
        str, typer.Option(help=f"Of the target's own training, for its blocks of text: {', '.join(PRESETS)}.")
    ] = "story"
    seed: Annotated[
        int,
        typer.Option(
            callback=between(0, 1 << 62),
            help="Of first weights, order and held-out blocks of the text: the target's own, or it has learnt them.",
        ),
    ] = 1
    from_head: Annotated[
        str | None, typer.Option(help="Folder of a head of the same shape, with whose weights this one begins.")
    ] = None
    steps: Annotated[int, typer.Option(callback=COUNT, help="Of copying the target's distributions.")] = 1200
    overlap_steps: Annotated[
        int | None, typer.Option(callback=COUNT, help="Behind them, of raising how often a guess is kept.")
    ] = None
    batch: Annotated[int, typer.Option(callback=BATCH, help="Blocks a step.")] = 16
    own_samples: Annotated[
        int | None,
        typer.Option(callback=COUNT, help="Tokens that the target writes first, for half of all blocks then."),
    ] = None
    steps_ahead: Annotated[
        int, typer.Option(callback=between(1, 16), help="Guesses in a row that it is trained for.")
    ] = 5
    hidden_size: Annotated[
        int | None,
        typer.Option(callback=SIZE, help="Of eagle3 or mlp_speculator; by default half of the target's."),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(callback=SIZE, help="Of eagle3 or mtp, as wide as the target's; by default as many as fit."),
    ] = None
    kv_heads: Annotated[int | None, typer.Option(callback=SIZE, help="Of eagle3 or mtp; by default 1.")] = None
    mlp_size: Annotated[
        int | None, typer.Option(callback=SIZE, help="Of eagle3 or mtp; by default 8/3 of the hidden size.")
    ] = None
    taps: Annotated[
        str | None,
        typer.Option(
            help="Of eagle3: layers whose inputs it reads, from 0; by default the second, the middle and the last."
        ),
    ] = None
    draft_vocab: Annotated[
        int | None, typer.Option(callback=COUNT, help="Of eagle3: most frequent tokens that it knows; by default all.")
    ] = None

    def checked(self) -> Self:
        """The settings as they are. Raises InvalidRequest about an unknown name, or an option that the method lacks."""
        for flag, value, known in (("--method", self.method, METHODS), ("--preset", self.preset, tuple(PRESETS))):
            if value not in known:
                raise InvalidRequest(flag, value, f"one of {', '.join(known)}")
        unread = {
            "eagle3": (),
            "mtp": ("hidden_size", "taps", "draft_vocab"),
            "medusa": ("hidden_size", "heads", "kv_heads", "mlp_size", "taps", "draft_vocab"),
            "mlp_speculator": ("heads", "kv_heads", "mlp_size", "taps", "draft_vocab"),
        }
        for name in unread[self.method]:
            if getattr(self, name) is not None:
                limit = f"left out with --method {self.method}, which has none to choose"
                raise InvalidRequest("--" + name.replace("_", "-"), getattr(self, name), limit)
        return self


def shape_of(settings: HeadSettings, target: CausalModel) -> HeadShape:
    """The sizes of the head. Raises InvalidRequest about those that do not fit the target or each other."""
    config = target.config
    is_free = settings.method in ("eagle3", "mlp_speculator")
    hidden_size = (settings.hidden_size or max(1, config.hidden_size // 2)) if is_free else config.hidden_size
    if settings.method == "eagle3" and hidden_size > config.hidden_size:
        raise InvalidRequest("--hidden-size", hidden_size, f"at most {config.hidden_size}, the target's")
    num_heads = settings.heads or max(1, hidden_size // config.head_dim)
    num_kv_heads = settings.kv_heads or 1
    if num_heads % num_kv_heads:
        raise InvalidRequest("--kv-heads", num_kv_heads, f"a divisor of the {num_heads} heads")
    return HeadShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=settings.mlp_size or 8 * hidden_size // 3,
        steps_ahead=settings.steps_ahead,
        norm_epsilon=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        context_len=config.max_position_embeddings,
    )


def taps_of(settings: HeadSettings, num_layers: int) -> tuple[int, ...]:
    """Boundaries of the target that the head reads. Raises InvalidRequest about `--taps`."""
    if settings.method != "eagle3":
        return (num_layers,)
    if settings.taps is None:
        return tuple(sorted({min(tap, num_layers - 1) for tap in (1, num_layers // 2, num_layers - 1)}))
    taps = [int(part) if part.strip().isdecimal() else -1 for part in settings.taps.split(",")]
    # What leaves the last layer is normed in some engines and not in others.
    if sorted(set(taps)) != taps or taps[0] < 0 or taps[-1] >= num_layers:
        raise InvalidRequest("--taps", settings.taps, f"rising layer numbers with commas, from 0 to {num_layers - 1}")
    return tuple(taps)


def draft_ids_of(learnt: Tensor, size: int | None, vocab_size: int) -> Tensor:
    """The most frequent ids [size] of learnt tokens, rising; of equally frequent ones the lower. None: all.

    Raises InvalidRequest about `--draft-vocab`.
    """
    if size is None:
        return torch.arange(vocab_size)
    if size > vocab_size:
        raise InvalidRequest("--draft-vocab", size, f"at most {vocab_size:,}, the target's")
    counts = torch.bincount(learnt[learnt != IGNORED], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def files_of(settings: HeadSettings, held_out: HeldOut, target: CausalModel, name: str) -> HeadFiles:
    """Files of a head, with all that is decided before it learns. Raises InvalidRequest about what does not fit."""
    config = target.config
    learnt = targets_of(held_out.token_ids, held_out.blocks, held_out.block_len)
    return HeadFiles(
        method=settings.method,
        shape=shape_of(settings, target),
        taps=taps_of(settings, config.num_hidden_layers),
        draft_ids=draft_ids_of(learnt, settings.draft_vocab, config.vocab_size),
        target=name,
        target_config=config,
    )


@dataclass(frozen=True, slots=True)
class HeadRun:
    """One training of a head, from wherever its storage says that it stands."""

    settings: HeadSettings
    files: HeadFiles
    held_out: HeldOut
    target: CausalModel
    storage: Storage
    console: SteadyConsole

    def make(self) -> Table:
        """Writes the head into the folder `head` of the storage's; returns what it reached."""
        settings, files, text, device = self.settings, self.files, self.held_out, self.target.device
        frozen(self.target)
        targets = targets_of(text.token_ids, text.blocks, text.block_len)
        embedding, output = (
            each.weight.detach().cpu()
            for each in (self.target.get_input_embeddings(), self.target.get_output_embeddings())
        )
        head = new_head(files, embedding, output, settings.seed)
        if settings.from_head is not None:
            begin_with(head, Path(settings.from_head))
        head = head.to(device)
        teacher = Teacher(self.target, files.taps, files.draft_ids.to(device))
        unseen = text.token_ids[targets == IGNORED].to(device)
        covered = float(teacher.knows(unseen).double().mean())
        count = sum(each.numel() for each in head.parameters())
        self.console.print(
            f"{settings.method}: {count:,} weights, taps {', '.join(map(str, files.taps))}, "
            f"{len(files.draft_ids):,} ids, which are {covered:.1%} of the held-out text"
        )
        lines = [(text.token_ids, targets)]
        if settings.own_samples is not None:
            samples = self._samples(targets, settings.own_samples)
            lines.append((samples, samples))
        stages = [Stage("head", settings.steps, HEAD_RATES["head"], ((settings.batch, text.block_len),))]
        if settings.overlap_steps is not None:
            name = "head-overlap"
            stages.append(replace(stages[0], name=name, steps=settings.overlap_steps, learning_rate=HEAD_RATES[name]))
        for stage in stages:
            self.console.print(f"{stage.name}: {stage.steps:,} steps, {settings.batch} x {text.block_len:,} tokens")
            go_through(stage, head, partial(self._lessons, stage, teacher, lines), self.storage, self.console)
        if not (self.storage.out / "head").exists():
            write_whole(self.storage.out / "head", partial(files.write, head.state_dict(), output))
        return self._report(head, teacher)

    def _samples(self, targets: Tensor, num_tokens: int) -> Tensor:
        """A line of at least so many tokens that the target wrote at temperature 1, after beginnings of the text."""
        found = self.storage.result("samples")
        if found is None:
            length = 2 * self.held_out.block_len
            generator = torch.Generator().manual_seed(self.settings.seed)
            begun = self.storage.result("samples-begun")
            written = torch.zeros(0, dtype=torch.int64)
            if begun is not None:
                written = begun["token_ids"]
                generator.set_state(begun["generator"])
            while len(written) < num_tokens:
                starts = torch.randint(len(targets) - PROMPT_LEN, (SAMPLE_BATCH,), generator=generator).tolist()
                prompts = [self.held_out.token_ids[start : start + PROMPT_LEN] for start in starts]
                allowed = [
                    prompt
                    for prompt, start in zip(prompts, starts, strict=True)
                    if (targets[start : start + PROMPT_LEN] != IGNORED).all()
                ]
                self.console.doing = f"samples: {len(written):,} of {num_tokens:,} tokens"
                texts = continued(self.target, torch.stack(allowed).to(self.target.device), length, generator)
                written = torch.cat([written, texts.flatten().cpu()])
                kept = {"token_ids": written, "generator": generator.get_state()}
                self.storage.save_result("samples-begun", kept)
                self.console.print(f"samples: {len(written):,} tokens")
            found = {"token_ids": written}
            self.storage.save_result("samples", found)
        return found["token_ids"]  # type: ignore[no-any-return]

    def _lessons(self, stage: Stage, teacher: Teacher, lines: list[tuple[Tensor, Tensor]]) -> list[Lesson]:
        """Lessons of each line of text, with its share of the stage's blocks."""
        block_len, seed = self.held_out.block_len, f"{self.settings.seed} {stage.name}"
        loss = imitation(teacher, overlap=stage.name == "head-overlap")
        lessons: list[Lesson] = []
        for number, (token_ids, targets) in enumerate(lines):
            batch = (self.settings.batch + number) // len(lines)
            if batch:
                blocks = TrainingBlocks(token_ids, targets, block_len, batch, f"{seed} {number}")
                lessons.append((blocks, loss))
        return lessons

    def _report(self, head: nn.Module, teacher: Teacher) -> Table:
        """Table of what it reaches on held-out blocks, and on the target's own greedy text after their beginnings."""
        found = self.storage.result("report")
        if found is None:
            self.console.doing = "report"
            blocks = self.held_out.whole_blocks()
            prompts = blocks[:GREEDY_TEXTS, :PROMPT_LEN].to(self.target.device)
            greedy = continued(self.target, prompts, min(GREEDY_LEN, self.files.shape.context_len), None)
            # The first round follows the prompt and the token of its own step.
            first = PROMPT_LEN - 1
            reached = {
                "held-out text": measure_head(head, teacher, blocks),
                "greedy text": measure_head(head, teacher, greedy, first),
            }
            found = {
                "reached": {name: [tuple(each) for each in values] for name, values in reached.items()},
                "tokens": greedy_tokens_per_pass(head, teacher, greedy, first),
            }
            self.storage.save_result("report", found)
        columns = (f"{name}: {what}" for name in found["reached"] for what in ("kept", "agrees"))
        table = Table("step ahead", *columns)
        for step, values in enumerate(zip(*found["reached"].values(), strict=True)):
            table.add_row(str(step + 1), *(f"{value:.3f}" for each in values for value in each))
        table.caption = f"{found['tokens']:.2f} tokens a pass at temperature 0 with {self.settings.steps_ahead} guesses"
        return table


def begin_with(head: nn.Module, folder: Path) -> None:
    """Gives a head the weights of another one's file. Raises InvalidRequest where these are not of its shape."""
    try:
        found = load_file(folder / "model.safetensors")
        named = {name.removeprefix("speculator."): tensor for name, tensor in found.items()}
        head.load_state_dict({name: named[name] for name in head.state_dict()})
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise InvalidRequest("--from-head", str(folder), f"a head of the same method and shape: {error}") from error


def eagle_head(files: HeadFiles, target: CausalModel, seed: int, begins_with: Path | None = None) -> Eagle3:
    """An eagle3 head for a target, with first weights of the seed or those of a folder, for which see begin_with."""
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
    head = new_head(files, embedding.weight.detach(), output.weight.detach(), seed)
    assert isinstance(head, Eagle3)
    if begins_with is not None:
        begin_with(head, begins_with)
    return head


def new_head(files: HeadFiles, embedding: Tensor, output: Tensor, seed: int) -> nn.Module:
    """A head for a target's matrices [V, H], with first weights of the seed; leaves torch's own seed alone."""
    shape = files.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if files.method == "eagle3":
            return Eagle3(shape, len(files.taps), embedding, output, files.draft_ids)
        if files.method == "mtp":
            return Mtp(shape, embedding, output)
        if files.method == "medusa":
            return Medusa(shape, output)
        return TrainedMlpSpeculator(shape, *embedding.shape[::-1])
