"""The target service: its settings, and how it is put together."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog

from outrider.drafters.drafter import Drafter
from outrider.drafters.hosted import HostedModel, host_head
from outrider.drafters.registry import registered
from outrider.drafters.shelf.early_exit import Kangaroo, LayerSkip
from outrider.drafters.shelf.probing import LOOKAHEAD, PASS, Lookahead, PassChain, ProbeDrafter, embed_probes
from outrider.engine.device_thread import DeviceWorker
from outrider.engine.devices import one_thread
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.pass_embeddings import is_pass, read_pass
from outrider.engine.models.weights import BESIDE_BLOCKS, DTYPES, resolve
from outrider.engine.ops import choose_ops
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outboxes
from outrider.model_service.server import LoadedModel, RunningModelService, describe, load_model_aside, serve_model
from outrider.model_service.settings import MAX_THREADS, Dtype, Listen, ModelServiceSettings, check_model
from outrider.parameters import SamplingParameters
from outrider.process.options import Setting, within
from target_service.recorder import Recorder, versions
from target_service.servicer import TargetServicer
from target_service.sessions import TargetSessions
from target_service.states import UNACKNOWLEDGED_WINDOW, TargetState
from target_service.step_costs import measure_steps
from target_service.verifier import TargetTask, Verifier

log = structlog.get_logger()

# Of a head's weights on the CPU, beside a target whose own are rounded: a guess takes two fifths of the time that it
# takes in bfloat16 (docs/decisions/0074).
HEAD_BITS = 4

LEARNT = "learnt"
"""What the names of drafters begin with that are versions of a head."""


@dataclass(frozen=True, slots=True)
class TargetSettings(ModelServiceSettings):
    """Options that an operator sets for the target service."""

    listen: Listen = "127.0.0.1:50052"
    draft_model: Annotated[
        str, Setting("A draft model in this process, for guesses that cost no message; named as --model. Empty: none.")
    ] = ""
    draft_threads: Annotated[int, Setting("Compute threads of that model, and of a head.", within(1, MAX_THREADS))] = 1
    head: Annotated[
        str, Setting("A head in this process that reads the target's state: a folder or a hub id. Empty: none.")
    ] = ""
    record: Annotated[
        str,
        Setting(
            "Folder that finished answers are kept in, with what the head read meanwhile, to train that head with. "
            "Empty: nothing is kept."
        ),
    ] = ""
    record_mib: Annotated[int, Setting("Most that is kept there, the newest answers.", within(1))] = 1024
    learnt: Annotated[
        str,
        Setting(
            "Folder of versions of the head that models/learn_head.py has published; the newest guesses too, as "
            "`learnt-` and the beginning of its digest. Empty: none."
        ),
    ] = ""
    exit_layer: Annotated[
        int,
        Setting("Layers of the target that guess for it, in its own cache. 0: none.", within(0)),
    ] = 0
    lookahead: Annotated[
        bool, Setting("Guess with n-grams that are found by Jacobi iteration, in rows beside every verdict.")
    ] = False

    def __post_init__(self) -> None:
        ModelServiceSettings.__post_init__(self)
        if self.draft_model:
            object.__setattr__(self, "draft_model", check_model("--draft-model", self.draft_model, "draft"))
        if self.head:
            check_model("--head", self.head)
        for flag, value in (("--record", self.record), ("--learnt", self.learnt)):
            if value and not self.head:
                raise InvalidRequest(flag, value, "empty without --head, which goes on learning")

    @property
    def has_guest(self) -> bool:
        return bool(self.head or self.draft_model)


async def start(settings: TargetSettings) -> RunningModelService:
    """Loads the models and serves; raises ModelRefused, InvalidRequest, AddressTaken, and OSError about `--record`."""
    model = await load_model_aside(settings)
    with ExitStack() as undo:
        running = await _start(settings, model, undo)
        # They are ended with the service.
        undo.pop_all()
    return running


async def _start(settings: TargetSettings, model: LoadedModel, undo: ExitStack) -> RunningModelService:
    record: Recorder | None = None
    drafters, hosted_costs = registered(model.runner), dict[str, Mapping[int, int]]()
    if settings.exit_layer:
        drafters.append(LayerSkip(model.runner, settings.exit_layer))
    if settings.lookahead:
        drafters.append(ProbeDrafter(model.runner, LOOKAHEAD, Lookahead))
    if settings.head:
        heads = await asyncio.to_thread(load_heads, model.runner, settings)
        drafters += heads
        if settings.record:
            record = recorder_of(settings, model.runner, heads[0])
            undo.callback(record.close)
        sampling = model.recommended.defaults.under(SamplingParameters())
        for each in heads:
            hosted_costs[each.name] = await asyncio.to_thread(measure_steps, each, model.runner, sampling)
    if settings.draft_model:
        draft = await load_model_aside(
            replace(
                settings,
                model=settings.draft_model,
                threads=settings.draft_threads,
                context_len=None,
                # A draft beside a file's own bits need not be such a file.
                dtype=Dtype.AUTO if settings.dtype in BLOCK_DTYPES else settings.dtype,
            )
        )
        difference = model.vocabulary.difference(draft.vocabulary)
        if difference:
            raise ModelRefused(f"--draft-model {settings.draft_model} does not fit the target: {difference}")
        drafters.append(HostedModel(draft.runner))
        hosted_costs[drafters[-1].name] = (await draft.measured()).row_costs
    return await start_with(await model.measured(), settings, drafters, hosted_costs, record)


def recorder_of(settings: TargetSettings, target: ModelRunner, head: Drafter[Any]) -> Recorder:
    """What keeps answers for a head's training; raises InvalidRequest about one that is not trained by answers."""
    copy = head.copy if isinstance(head, HostedModel) else None
    if copy is None or copy.head.facts.method != "eagle3":
        raise InvalidRequest("--record", settings.record, f"empty beside a head of {head.name}: only eagle3 learns")
    folder = Path(settings.record).expanduser()
    return Recorder(folder, settings.record_mib << 20, target, copy.head.facts.taps)


def load_heads(target: ModelRunner, settings: TargetSettings) -> list[Drafter[Any]]:
    """The head, and the newest version of it that was learnt from answers; raises ModelRefused about the first."""
    heads = [load_head(target, settings.head, settings.dtype, settings.draft_threads)]
    folder = Path(settings.learnt).expanduser()
    found = versions(folder) if settings.learnt else []
    if settings.learnt and not found:
        log.info("no version of the head is published yet", folder=str(folder))
    if found:
        try:
            learnt = load_head(target, str(found[-1]), settings.dtype, settings.draft_threads)
        except (ModelRefused, OSError) as error:
            # The head itself goes on: what is learnt beside may cost no start.
            log.warning("the learnt head is not served", folder=str(found[-1]), reason=str(error))
            return heads
        # The name says which weights: under rules that hear the draft, a seed's answer is theirs.
        learnt.name = f"{LEARNT}-{learnt.runner.identity.model_hash[:8]}" if learnt.runner else LEARNT
        heads.append(learnt)
    return heads


def load_head(target: ModelRunner, name: str, dtype: str, num_threads: int = 1) -> Drafter[Any]:
    """The head in a folder or of a hub id, beside its target, or PaSS's embeddings within it; raises ModelRefused.

    A head has threads of its own: of a target's many most would only be woken up for products as small as its. On the
    CPU it has weights of four bits beside all but float32: `match` commits the same tokens, if 1 to 2 % fewer a pass.
    """
    folder, parts = Path(name).expanduser(), target.parts
    # Unlike a model's, a head's weights may have any name in their folder.
    folder = folder if folder.is_dir() else resolve(name)
    if is_pass(folder):
        probe_ids = embed_probes(target, read_pass(folder, parts))
        log.info("embeddings of PaSS loaded", folder=str(folder), count=len(probe_ids))
        return ProbeDrafter(target, PASS, partial(PassChain, probe_ids))
    found = read_head(folder, parts)
    is_cpu = target.device.type == "cpu"
    bits = None if dtype == Dtype.FLOAT32 else HEAD_BITS
    ops = choose_ops(target.device, num_threads, bits) if is_cpu else target.ops
    with one_thread():
        head, digest = found.load(parts, target.device, DTYPES.get(dtype) or BESIDE_BLOCKS, ops)
    log.info("head loaded", method=found.method, folder=str(found.folder), taps=head.facts.taps, switches=found.notes)
    return (Kangaroo if head.facts.reads_own else host_head)(target, head, digest, ops)


async def start_with(
    model: LoadedModel,
    settings: ModelServiceSettings,
    drafters: Sequence[Drafter[Any]] = (),
    hosted_costs: Mapping[str, Mapping[int, int]] | None = None,
    record: Recorder | None = None,
) -> RunningModelService:
    """Serves models that are loaded already, some of them as drafters in this process; the settings' are not.

    `hosted_costs` are microseconds of the steps of such models by their rows, where they were measured. `record` keeps
    answers, and is closed when the service ends.
    """
    # What a draft's files recommend is not used.
    for fault in model.recommended.faults:
        log.warning("a default of the model is not served", reason=fault)
    table, outboxes = LeaseTable[TargetState](settings.lease_seconds), Outboxes()
    verifier = Verifier(model.runner, table)
    worker = DeviceWorker[TargetTask](verifier.advance, model.set_threads, "target device", outboxes.flush)
    sessions = TargetSessions(
        model.runner,
        table,
        worker.submit,
        prefix_cache=settings.prefix_cache,
        drafters=drafters,
        record=None if record is None else record.take,
    )
    facts = replace(
        describe("target", model),
        unacknowledged_window=UNACKNOWLEDGED_WINDOW,
        drafters={each.name: each.rules for each in drafters},
        tree_drafters=frozenset(each.name for each in drafters if each.makes_trees),
        hosted={each.name: each.runner for each in drafters if each.runner is not None},
        hosted_costs=hosted_costs or {},
    )
    serving = partial(TargetServicer, facts, sessions, worker, outboxes)
    running = await serve_model(settings, model, facts, worker, sessions, serving)
    return running if record is None else replace(running, at_end=record.close)
