"""The order of things when drafts are made for a target: it writes, a head and a separate model learn, and a report."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.errors import InvalidRequest
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.options import between, refuse_together
from training.decoding import BatchDecoder
from training.dialogue import Writing
from training.draft_report import Question, Report, measure_drafts
from training.head_files import HeadFiles
from training.head_run import HeadSettings, draft_ids_of, eagle_head, shape_of, taps_of
from training.heads import Eagle3
from training.learn import Loss, Stage, go_through
from training.material import write_shard, write_shards
from training.model import CausalModel, trained_model, write_weights
from training.run import BATCH, COUNT, frozen
from training.steady import SteadyConsole
from training.storage import Storage, write_whole
from training.stored import AnswerBlocks, Material, StoredTeacher, draft_loss, head_loss, over_raw_features

SIZE = between(1, 65536)
# None where what it begins with stays as it is.
STEPS = between(0, 1_000_000_000)
DRAFT_HEAD_DIM = 32
# An output matrix that begins as the target's has little to learn.
HEAD_TABLE_SHARE = 0.05
OWN_ROW_SCORE = 11.0
RATES = {"head": 6e-3, "head-overlap": 2e-3, "draft": 4e-3, "draft-overlap": 1e-3}
# Of these, for what has learnt already.
LEARNT_RATE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRunSettings:
    """Settings that the drafts depend on, beside target, documents and threads; another value of one is another run."""

    seed: Annotated[int, typer.Option(callback=between(0, 1 << 62), help="Of everything that is drawn.")] = 1
    tokens: Annotated[int, typer.Option(callback=COUNT, help="Of answers that the target writes, at least.")] = 500_000
    texts: Annotated[int, typer.Option(callback=BATCH, help="That it writes at once.")] = 64
    text_len: Annotated[int, typer.Option(callback=between(16, 65536), help="Tokens of each of them.")] = 512
    temperatures: Annotated[str, typer.Option(help="Of the answers, with commas; the texts take them in turn.")] = (
        "0,0.7"
    )
    corpus_share: Annotated[
        float, typer.Option(callback=between(0, 1), help="Of the texts, that begin with a piece of --corpus.")
    ] = 0.15
    steps_ahead: Annotated[
        int, typer.Option(callback=between(1, 16), help="Guesses in a row that the head is trained for.")
    ] = 2
    hidden_size: Annotated[
        int | None, typer.Option(callback=SIZE, help="Hidden size of the head; by default the target's.")
    ] = None
    kv_heads: Annotated[int | None, typer.Option(callback=SIZE, help="Of the head; by default 1.")] = None
    mlp_size: Annotated[
        int | None, typer.Option(callback=SIZE, help="Of the head; by default 16/9 of its hidden size.")
    ] = None
    taps: Annotated[
        str | None,
        typer.Option(help="Layers whose inputs the head reads, from 0; by default the second, the middle, the last."),
    ] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(callback=COUNT, help="Most frequent tokens of answers that both drafts know; by default all."),
    ] = None
    from_head: Annotated[
        str | None, typer.Option(help="Folder of a head of the same shape and target, that goes on with its own ids.")
    ] = None
    from_draft: Annotated[
        str | None, typer.Option(help="Folder of a separate draft with the target's tokens, that goes on.")
    ] = None
    head_steps: Annotated[int, typer.Option(callback=STEPS, help="Of copying the target's laws.")] = 900
    head_overlap_steps: Annotated[
        int, typer.Option(callback=STEPS, help="Behind them, of raising how often a guess is kept.")
    ] = 250
    head_batch: Annotated[int, typer.Option(callback=BATCH, help="Texts a step of the head.")] = 4
    draft_size: Annotated[
        int | None, typer.Option(callback=SIZE, help="Hidden size of a new separate draft; by default 128.")
    ] = None
    draft_layers: Annotated[
        int | None, typer.Option(callback=between(1, 64), help="Of a new separate draft; by default 2.")
    ] = None
    draft_steps: Annotated[int, typer.Option(callback=STEPS, help="Of copying the target's laws.")] = 900
    draft_overlap_steps: Annotated[
        int, typer.Option(callback=STEPS, help="Behind them, of raising how often a guess is kept.")
    ] = 250
    draft_batch: Annotated[int, typer.Option(callback=BATCH, help="Texts a step of the separate draft.")] = 8

    @property
    def answer_temperatures(self) -> tuple[float, ...]:
        """Raises InvalidRequest about `--temperatures`."""
        try:
            found = tuple(float(part) for part in self.temperatures.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 <= each <= 2 for each in found):
            raise InvalidRequest("--temperatures", self.temperatures, "numbers from 0 to 2 with commas between them")
        return found

    @property
    def head(self) -> HeadSettings:
        """The head's sizes as the other command for heads has them."""
        return HeadSettings(
            steps_ahead=self.steps_ahead, kv_heads=self.kv_heads, mlp_size=self.mlp_size, taps=self.taps
        )


def head_files(settings: DraftRunSettings, target: CausalModel, name: str, draft_ids: Tensor) -> HeadFiles:
    """Files of the head, with all that is decided about it. Raises InvalidRequest about sizes that do not fit."""
    size = settings.hidden_size or target.config.hidden_size
    sized = replace(settings.head, hidden_size=size, mlp_size=settings.mlp_size or 16 * size // 9)
    taps = taps_of(sized, target.config.num_hidden_layers)
    return HeadFiles(
        method="eagle3",
        shape=shape_of(sized, target),
        taps=taps,
        draft_ids=draft_ids,
        target=name,
        target_config=target.config,
    )


def check_fit(settings: DraftRunSettings, target: CausalModel) -> None:
    """Raises InvalidRequest about what does not fit the target, before anything is computed."""
    config = target.config
    refuse_together("--from-head", settings.from_head, {"--draft-vocab": settings.draft_vocab})
    if settings.text_len > config.max_position_embeddings:
        raise InvalidRequest(
            "--text-len", settings.text_len, f"at most {config.max_position_embeddings:,}, its context"
        )
    draft_ids = ids_of_drafts(settings, target, torch.arange(1))
    files = head_files(settings, target, "", draft_ids)
    new_draft(settings, target)
    if settings.from_head is not None:
        folder = Path(settings.from_head)
        taps = HeadFiles.read(folder, config, "--from-head").taps
        if taps != files.taps:
            limit = f"a head that reads what enters the layers {files.taps}, and not {taps}"
            raise InvalidRequest("--from-head", settings.from_head, limit)
        eagle_head(files, target, settings.seed, folder)


def ids_of_drafts(settings: DraftRunSettings, target: CausalModel, answers: Tensor) -> Tensor:
    """Ids that drafts know, rising: the most frequent of answers, or those of the head that goes on."""
    if settings.from_head is not None:
        return HeadFiles.read(Path(settings.from_head), target.config, "--from-head").draft_ids
    return draft_ids_of(answers, settings.draft_vocab, target.config.vocab_size)


def new_draft(settings: DraftRunSettings, target: CausalModel) -> LlamaForCausalLM:
    """A small Llama for the target's tokens, whose tied matrix begins as what the principal directions of the target's
    output matrix keep of it; leaves torch's own seed alone. Or the draft that goes on. Raises InvalidRequest about
    `--draft-size` and `--from-draft`."""
    size, config = settings.draft_size or 128, target.config
    if settings.from_draft is not None:
        refuse_together(
            "--from-draft",
            settings.from_draft,
            {"--draft-size": settings.draft_size, "--draft-layers": settings.draft_layers},
        )
        found = trained_model("--from-draft", Path(settings.from_draft))
        if not isinstance(found, LlamaForCausalLM) or found.config.vocab_size != config.vocab_size:
            limit = f"a Llama of the target's {config.vocab_size:,} tokens"
            raise InvalidRequest("--from-draft", settings.from_draft, limit)
        return found
    if size % DRAFT_HEAD_DIM or size > config.hidden_size:
        limit = f"a multiple of {DRAFT_HEAD_DIM}, at most {config.hidden_size}"
        raise InvalidRequest("--draft-size", size, limit)
    made = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        intermediate_size=8 * size // 3,
        num_hidden_layers=settings.draft_layers or 2,
        num_attention_heads=size // DRAFT_HEAD_DIM,
        num_key_value_heads=1,
        head_dim=DRAFT_HEAD_DIM,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]},
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        draft = LlamaForCausalLM(made)
    output = target.get_output_embeddings().weight.detach().double()
    directions = torch.linalg.eigh(output.T @ output)[1][:, -size:]
    draft.get_input_embeddings().weight.data.copy_((output @ directions).float())
    return draft


def see_own_row(head: Eagle3, head_dim: int, seed: int) -> None:
    """Lets the attention of a new head begin at its own row, whose token it needs most: queries begin as the keys.

    It would begin as a mean over all rows otherwise, and learn for long to see the token that the guess follows.
    """
    weights, generator = head.state_dict(), torch.Generator().manual_seed(seed)
    keys, queries = (weights[f"layers.0.self_attn.{name}_proj.weight"] for name in "kq")
    keys.normal_(std=math.sqrt(OWN_ROW_SCORE / (keys.shape[1] * math.sqrt(head_dim))), generator=generator)
    groups = keys.view(-1, head_dim, keys.shape[1])
    queries.copy_(groups.repeat_interleave(len(queries) // len(keys), 0).flatten(0, 1))


@dataclass(frozen=True, slots=True)
class DraftRun:
    """One making of drafts, from wherever its storage says that it stands."""

    settings: DraftRunSettings
    target: CausalModel
    name: str
    vocabulary: Vocabulary
    writing: Writing
    questions: Sequence[Question]
    storage: Storage
    console: SteadyConsole

    def make(self) -> Report:
        """Writes `head` and `draft` into the storage's folder; returns what they reach."""
        settings, vocab_size = self.settings, self.target.config.vocab_size
        taps = taps_of(settings.head, self.target.config.num_hidden_layers)
        decoder = BatchDecoder(frozen(self.target), taps)
        material = self._material(decoder)
        draft_ids = ids_of_drafts(settings, self.target, material.token_ids[material.is_answer])
        output = self.target.get_output_embeddings().weight.detach()
        teacher = StoredTeacher(material, output[draft_ids].bfloat16(), draft_ids, material.feature_scale())
        covered = float(torch.isin(material.token_ids[material.is_answer], draft_ids).double().mean())
        self.console.print(f"{len(draft_ids):,} ids are {covered:.1%} of the answers")
        files = head_files(settings, self.target, self.name, draft_ids)
        if settings.from_head is None:
            head = eagle_head(files, self.target, settings.seed)
            see_own_row(head, files.shape.head_dim, settings.seed)
        else:
            head = eagle_head(files, self.target, settings.seed, Path(settings.from_head))
            head.fc.weight.data *= teacher.feature_scale
        draft = new_draft(settings, self.target)
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[draft_ids] = True
        rows, drafts = settings.head_batch, settings.draft_batch
        stages: list[tuple[nn.Module, str, int, int, Loss]] = [
            (head, "head", settings.head_steps, rows, head_loss(teacher, overlap=False)),
            (head, "head-overlap", settings.head_overlap_steps, rows, head_loss(teacher, overlap=True)),
            (draft, "draft", settings.draft_steps, drafts, draft_loss(teacher, overlap=False)),
            (draft, "draft-overlap", settings.draft_overlap_steps, drafts, draft_loss(teacher, overlap=True)),
        ]
        for model, name, steps, batch, loss in stages:
            share = HEAD_TABLE_SHARE if model is head else 1.0
            has_learnt = (settings.from_head if model is head else settings.from_draft) is not None
            learning_rate = RATES[name] * (LEARNT_RATE if has_learnt else 1.0)
            stage = Stage(name, steps, learning_rate, ((batch, settings.text_len),), share)
            count = sum(each.numel() for each in model.parameters())
            self.console.print(f"{name}: {count:,} weights, {steps:,} steps of {batch} x {settings.text_len:,} tokens")
            blocks = AnswerBlocks(material, known, settings.steps_ahead, batch, f"{settings.seed} {name}")
            go_through(stage, model, partial(list, [(blocks, loss)]), self.storage, self.console)
        served = over_raw_features(head, teacher)
        if not (self.storage.out / "head").exists():
            write_whole(self.storage.out / "head", partial(files.write, served.state_dict(), output))
        if not (self.storage.out / "draft").exists():
            write_whole(self.storage.out / "draft", partial(self._write_draft, copy.deepcopy(draft)))
        found = self.storage.result("report")
        if found is None:
            ends = self.storage, self.console
            found = {"report": measure_drafts(self.writing, self.questions, decoder, teacher, served, draft, *ends)}
            self.storage.save_result("report", found)
        return found["report"]  # type: ignore[no-any-return]

    def _material(self, decoder: BatchDecoder) -> Material:
        settings = self.settings

        def write(generator: torch.Generator) -> dict[str, Tensor]:
            texts = self.writing.texts(settings.texts, generator)
            return write_shard(decoder, texts, settings.text_len, generator, progress)

        def progress(position: int) -> None:
            name = f"texts: {settings.texts} of {settings.text_len:,} tokens"
            self.console.doing = f"{name}, token {position:,}"

        def report(count: int, total: int) -> None:
            self.console.print(f"texts: {count} files, {total:,} tokens of answers")

        folder = self.storage.folder / "texts"
        return Material.read(folder, write_shards(folder, settings.tokens, settings.seed, write, report))

    def _write_draft(self, draft: LlamaForCausalLM, folder: Path) -> None:
        write_weights(draft, folder)
        self.vocabulary.write(folder)
