"""The commands' signatures, and from options to plain values. Knows nothing about how they are carried out."""

import typer

from outrider.addresses import check_address
from outrider.cli import bench, options
from outrider.cli.client import check_size
from outrider.cli.events import Ask
from outrider.cli.generate import choose_view, generation, read_prompt
from outrider.cli.running import note, run
from outrider.cli.stack import (
    DRAFT_PORT,
    GATEWAY_PORT,
    TARGET_PORT,
    Stack,
    choose_models,
)
from outrider.cli.up import serving
from outrider.command_line import refuse_together
from outrider.model_service_flags import Dtype, available_cpus

app = typer.Typer(
    help="Speculative decoding as two services and a gateway: faster, and not one token different.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


@app.command()
def up(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.DtypeOption = None,
    device: options.Device = "cpu",
    draft_device: options.DraftDevice = None,
    threads: options.Threads = None,
    draft_threads: options.DraftThreads = 1,
    port: options.Port = GATEWAY_PORT,
    draft_port: options.DraftPort = DRAFT_PORT,
    target_port: options.TargetPort = TARGET_PORT,
    no_draft: options.NoDraft = False,
    story: options.Story = False,
) -> None:
    """Starts draft service, target service and gateway, and restarts what dies, until Ctrl-C."""
    refuse_together("--no-draft", no_draft or None, {"--draft": draft, "--draft-device": draft_device})
    target_model, draft_model = _models(target, draft, no_draft=no_draft)
    stack = Stack(
        target=target_model,
        draft=draft_model,
        dtype=(dtype or Dtype.BFLOAT16).value,
        device=device,
        draft_device=draft_device or device,
        threads=threads or available_cpus(),
        draft_threads=draft_threads,
        gateway_port=port,
        draft_port=draft_port,
        target_port=target_port,
    )
    run(serving(stack, story=story), serves=True)


@app.command()
def generate(  # noqa: PLR0913, as above
    prompt: options.Prompt,
    *,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    draft_count: options.DraftCountOption = None,
    no_speculation: options.NoSpeculation = False,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.DtypeOption = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Continues PROMPT, with the target's own tokens whatever the draft does."""
    refuse_together("--no-speculation", no_speculation or None, {"--draft": draft, "--draft-count": draft_count})
    refuse_together("--address", address, {"--target": target, "--draft": draft, "--dtype": dtype})
    if address is not None:
        check_address("--address", address)
    ask = Ask(
        prompt=read_prompt(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        draft_count=options.parse_draft_count(draft_count),
        speculation=not no_speculation,
    )
    check_size(ask)
    stack = None if address is not None else _own_stack(target, draft, dtype, speculation=ask.speculation)
    run(generation(ask, choose_view(as_json=as_json), address, stack))


def _models(target: str | None, draft: str | None, *, no_draft: bool) -> tuple[str, str | None]:
    pair = choose_models(target, draft, no_draft=no_draft)
    if pair[1] is None and not no_draft:
        note(f"No draft was named for {pair[0]}, so it decodes plainly; name one with --draft.")
    return pair


def _own_stack(target: str | None, draft: str | None, dtype: Dtype | None, *, speculation: bool) -> Stack:
    """The stack that `generate` starts. Without speculation there is no use for a draft."""
    target_model, draft_model = _models(target, draft, no_draft=not speculation)
    return Stack(target_model, draft_model, (dtype or Dtype.BFLOAT16).value, threads=available_cpus())
