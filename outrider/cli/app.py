"""The commands' signatures, and from options to plain values. Knows nothing about how they are carried out."""

import typer

from outrider.addresses import check_address
from outrider.cli import bench, options
from outrider.cli.asking import Answer, Ask, Report, Sampling, Speculation
from outrider.cli.client import check_ask
from outrider.cli.generate import choose_view, generation, read_prompt
from outrider.cli.running import note, run
from outrider.cli.stack import Stack, choose_models
from outrider.cli.up import serving
from outrider.command_line import refuse_together
from outrider.model_service_flags import Dtype, available_cpus
from outrider.option_groups import grouped, options_of

# What is about the draft only.
DRAFT_OPTIONS = ("draft", "draft_dtype", "top_n")

app = typer.Typer(
    help="Speculative decoding as two services and a gateway: faster, and not one token different.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


@app.command()
@grouped
def up(
    *,
    models: options.Models,
    machine: options.Machine,
    no_draft: options.NoDraft = False,
    story: options.Story = False,
) -> None:
    """Starts draft service, target service and gateway, and restarts what dies, until Ctrl-C."""
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(machine, "draft_device")
    refuse_together("--no-draft", no_draft or None, idle)
    stack = _stack(models, machine, speculation=not no_draft)
    run(serving(stack, story=story), serves=True)


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
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(speculation)
    plain = idle.pop("--no-speculation")
    refuse_together("--no-speculation", plain or None, idle)
    refuse_together("--address", address, options_of(models))
    if address is not None:
        check_address("--address", address)
    ask = Ask(read_prompt(prompt), answer, sampling, speculation, report)
    check_ask(ask)
    alone = options.Machine(port=0, draft_port=0, target_port=0)
    stack = None if address is not None else _stack(models, alone, speculation=not plain)
    run(generation(ask, choose_view(as_json=as_json), address, stack))


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
        draft_port=machine.draft_port,
        target_port=machine.target_port,
        draft_dtype=models.draft_dtype,
        top_n=models.top_n,
    )
