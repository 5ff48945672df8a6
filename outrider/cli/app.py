"""The commands' signatures, and from options to plain values. Knows nothing about how they are carried out."""

from dataclasses import replace

import typer

from outrider.cli import bench, options
from outrider.cli.asking import Answer, Ask, JsonTurns, Report, Sampling, Speculation, SystemMessage
from outrider.cli.chat.command import Chat, chatting
from outrider.cli.client import call_options, check_ask, check_chat
from outrider.cli.doctor.checkup import Machine
from outrider.cli.doctor.command import examine_gateway, examine_machine
from outrider.cli.generate import choose_view, generation, read_prompt
from outrider.cli.live_display import choose_display
from outrider.cli.naming import OPTIONS
from outrider.cli.running import note, run
from outrider.cli.stack import Stack, choose_models
from outrider.cli.up import serving
from outrider.cli.version import tell
from outrider.command_line import refuse_together
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_service_flags import Dtype, available_cpus
from outrider.option_groups import grouped, options_of
from outrider.rpc.channels import check_address

# What is about the draft only.
DRAFT_OPTIONS = ("draft", "draft_dtype", "top_n")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


@app.callback()
def main(*, version: options.Version = False) -> None:
    """Speculative decoding as two services and a gateway: faster, and not one token different."""


@app.command()
@grouped
def up(
    *,
    models: options.Models,
    machine: options.Machine,
    no_draft: options.NoDraft = False,
    story: options.Story = False,
    as_json: options.JsonEvents = False,
) -> None:
    """Starts draft service, target service and gateway, and restarts what dies, until Ctrl-C."""
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(machine, "draft_device")
    refuse_together("--no-draft", no_draft or None, idle)
    refuse_together("--json", as_json or None, {"--story": story or None})
    stack = _stack(models, machine, speculation=not no_draft)
    run(serving(stack, choose_display(as_json=as_json), story=story), serves=True)


@app.command()
@grouped
def generate(
    prompt: options.Prompt,
    *,
    answer: Answer,
    sampling: Sampling,
    speculation: Speculation,
    report: Report,
    models: options.Models,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Continues PROMPT; under the default rule with the target's own tokens, whatever the draft does."""
    _check_idle(models, speculation, address)
    ask = Ask(read_prompt(prompt), answer, sampling, speculation, report)
    check_ask(ask)
    stack = None if address is not None else _stack_alone(models, speculation)
    run(generation(ask, choose_view(as_json=as_json), address, stack), options=OPTIONS)


@app.command()
@grouped
def chat(
    *,
    system: SystemMessage = "",
    answer: Answer,
    sampling: Sampling,
    speculation: Speculation,
    models: options.Models,
    address: options.Address = None,
    as_json: JsonTurns = False,
) -> None:
    """Talks with the target turn by turn; without a terminal each line of standard input is one turn."""
    _check_idle(models, speculation, address)
    wanted = call_options(answer, sampling, speculation)
    check_chat(system, wanted)
    rejected = bool(speculation.show_rejected)
    stack = None if address is not None else _stack_alone(models, speculation)
    chatting(Chat(wanted, system, address, stack, as_json=as_json, rejected=rejected))


def _check_idle(models: options.Models, speculation: Speculation, address: str | None) -> None:
    """Raises InvalidRequest about options of a request that have no effect beside others, and a wrong address."""
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(speculation)
    plain = idle.pop("--no-speculation")
    refuse_together("--no-speculation", plain or None, idle)
    refuse_together("--address", address, options_of(models))
    if address is not None:
        check_address("--address", address)


def _stack_alone(models: options.Models, speculation: Speculation) -> Stack:
    """The stack that one command starts for itself, on free ports."""
    alone = options.Machine(port=0, draft_port=0, target_port=0)
    return replace(_stack(models, alone, speculation=not speculation.no_speculation), rest_port=None)


@app.command()
@grouped
def doctor(
    *,
    address: options.GatewayAddress = None,
    rest_address: options.RestAddress = None,
    quick: options.Quick = False,
    as_json: options.JsonReport = False,
    no_draft: options.NoDraft = False,
    models: options.Models,
    machine: options.Machine,
) -> None:
    """Checks this machine and a pair of models, or a running gateway, and says what to change."""
    if address is None:
        if rest_address is not None:
            raise InvalidRequest("--rest-address", rest_address, "given with --address")
        raise typer.Exit(examine_machine(_machine(models, machine, quick=quick, no_draft=no_draft), as_json=as_json))
    here = {"--quick": quick or None, "--no-draft": no_draft or None}
    refuse_together("--address", address, here | options_of(models))
    check_address("--address", address)
    if rest_address is not None:
        check_address("--rest-address", rest_address)
    raise typer.Exit(examine_gateway(address, rest_address, as_json=as_json))


@app.command()
def version(*, as_json: options.JsonReport = False) -> None:
    """Prints the version of Outrider; as JSON also those of what computes and carries."""
    tell(as_json=as_json)


def _machine(models: options.Models, machine: options.Machine, *, quick: bool, no_draft: bool) -> Machine:
    """What doctor looks at; models that are refused are one of its findings."""
    try:
        return Machine(_stack(models, machine, speculation=not no_draft), quick=quick)
    except ModelRefused as error:
        return Machine(None, error, quick)


def _stack(models: options.Models, machine: options.Machine, *, speculation: bool) -> Stack:
    """The stack to start. Without speculation there is no use for a draft. Raises ModelRefused."""
    target, draft = choose_models(models.target, models.draft, no_draft=not speculation)
    if draft is None and speculation:
        note(f"No draft was named for {target}, so it decodes plainly; name one with --draft.")
    return Stack(
        target=target,
        draft=draft,
        dtype=models.dtype or Dtype.BFLOAT16,
        device=machine.device,
        draft_device=machine.draft_device or machine.device,
        threads=machine.threads or available_cpus(),
        draft_threads=machine.draft_threads,
        gateway_port=machine.port,
        rest_port=machine.rest_port,
        draft_port=machine.draft_port,
        target_port=machine.target_port,
        draft_dtype=models.draft_dtype,
        top_n=models.top_n,
    )
