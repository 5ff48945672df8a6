"""The commands: which options each takes, what of them goes together, and what carries it out."""

import json
import os
import sys
from dataclasses import replace
from typing import Annotated

import typer

from outrider.cli import datastore, options
from outrider.cli.bench import command as bench
from outrider.cli.chat.command import Chat, chatting
from outrider.cli.convert_head import run_converter
from outrider.cli.doctor.command import examine_gateway, examine_machine
from outrider.cli.doctor.policy import show_policy
from outrider.cli.generate import check_chat, check_request, generation, read_prompt
from outrider.cli.local_stack import Stack, choose_models
from outrider.cli.modules import Extra, NotInstalled, check_installed, installed_versions, run_module
from outrider.cli.pairs import choose_pair
from outrider.cli.race import KEY_VARIABLE, QUESTION, STORY
from outrider.cli.running import note, run
from outrider.cli.up import choose_display, lost_as_event, lost_as_sentence, serving
from outrider.cli.views import choose_view
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.generation_defaults import OperatorDefaults
from outrider.model_files.model_names import embedded_model
from outrider.model_service.settings import Dtype, KvDtype, available_cpus, check_model
from outrider.process.children import HOST
from outrider.process.options import grouped, listed, options_of, refuse_together
from outrider.process.streams import unfailing
from outrider.rpc.wire import check_address

# What is about the draft service, and about the draft, only.
SERVICE_OPTIONS = ("draft_dtype", "top_n", "cascade", "cascade_depth")
DRAFT_OPTIONS = ("draft", *SERVICE_OPTIONS)
# What has no effect on plain decoding.
SPECULATION_OPTIONS = ("draft_count", "rule", *sorted(options.ACCEPTANCE), "drafter", "prediction", "show_rejected")
# What guesses in a stack, where not whichever is faster: the gateway in what was said, or the draft's model.
LOOKUP, MODEL = options.Guessing.LOOKUP, options.Guessing.MODEL

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench.app, name="bench")
app.add_typer(datastore.app, name="datastore")


def tell_version(*, as_json: bool) -> None:
    """Prints our version alone, or as JSON with those of Python and of what computes and carries."""
    installed = installed_versions()
    ours = installed.pop("outrider") or "unknown"
    sys.stdout.write((json.dumps({"version": ours, **installed}) if as_json else f"outrider {ours}") + "\n")


def _version_and_end(wanted: bool) -> None:
    if wanted:
        tell_version(as_json=False)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_version_and_end)
]


@app.callback()
def main(*, version: Version = False) -> None:
    """Speculative decoding as two services and a gateway: faster, and not one token different."""


@app.command()
@grouped
def up(
    *,
    models: options.Models,
    hosted: options.HostedOptions,
    machine: options.MachineOptions,
    drafter: options.Guesser = None,
    datastore: options.DatastoreFile = None,
    no_draft: options.NoDraft = False,
    race: options.Race = False,
    as_json: options.JsonEvents = False,
) -> None:
    """Starts draft service, target service and gateway, and restarts what dies, until Ctrl-C."""
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(machine, "draft_device")
    idle |= options_of(hosted, "draft_in_target")
    refuse_together("--no-draft", no_draft or None, idle | {"--drafter": drafter, "--datastore": datastore})
    refuse_together("--drafter lookup", drafter if drafter == LOOKUP else None, idle)
    refuse_together("--drafter model", drafter if drafter == MODEL else None, {"--datastore": datastore})
    _check_hosted(models, hosted, draft_device=machine.draft_device)
    refuse_together("--json", as_json or None, {"--race": race or None})
    key = os.environ.get(KEY_VARIABLE)
    if race and machine.api_keys is not None and not key:
        raise InvalidRequest("--race", True, f"left out with --api-keys unless {KEY_VARIABLE} has one of the keys")
    stack = _stack(models, machine, hosted, has_draft=not no_draft and drafter != LOOKUP)
    lookup = {"--no-lookup": no_draft or drafter == MODEL, "--datastore": datastore}
    stack = replace(stack, gateway_flags=stack.gateway_flags | lookup)
    question = replace(STORY if stack.target == embedded_model("target") else QUESTION, api_key=key or None)
    with unfailing(lost_as_event if as_json else lost_as_sentence):
        run(serving(stack, choose_display(as_json=as_json), question if race else None), serves=True)


@app.command()
@grouped
def generate(
    prompt: options.Prompt,
    *,
    request: options.RequestOptions,
    models: options.Models,
    hosted: options.HostedOptions,
    connection: options.ConnectionOptions,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Continues PROMPT; under the default rule with the target's own tokens, whatever the draft does."""
    _check_idle(models, hosted, request, address)
    tls = connection.tls(address)
    text = read_prompt(prompt)
    check_request(text, request)
    stack = None if address is not None else _stack_alone(models, hosted, request)
    run(
        generation(text, request, choose_view(as_json=as_json), address, stack, connection.api_key, tls),
        options=options.OPTIONS,
    )


@app.command()
@grouped
def chat(
    *,
    system: options.SystemMessage = "",
    turn: options.TurnOptions,
    models: options.Models,
    hosted: options.HostedOptions,
    connection: options.ConnectionOptions,
    address: options.Address = None,
    as_json: options.JsonTurns = False,
) -> None:
    """Talks with the target turn by turn; without a terminal each line of standard input is one turn."""
    _check_idle(models, hosted, turn, address)
    tls = connection.tls(address)
    settings = options.settings_of(turn)
    check_chat(system, settings)
    stack = None if address is not None else _stack_alone(models, hosted, turn)
    rejected = bool(turn.show_rejected)
    chatting(Chat(settings, system, address, stack, connection.api_key, as_json=as_json, rejected=rejected, tls=tls))


def _check_idle(
    models: options.Models, hosted: options.HostedOptions, turn: options.TurnOptions, address: str | None
) -> None:
    """Raises InvalidRequest about options of a request that make no sense beside others, and a wrong address."""
    idle = options_of(models, *DRAFT_OPTIONS) | options_of(hosted) | options_of(turn, *SPECULATION_OPTIONS)
    refuse_together("--no-speculation", turn.no_speculation or None, idle)
    shapes = {"--json-schema": turn.json_schema, "--regex": turn.regex, "--choice": turn.choices}
    for option, shape in shapes.items():
        refuse_together(option, shape, {other: each for other, each in shapes.items() if other != option})
    refuse_together("--address", address, options_of(models) | options_of(hosted))
    _check_hosted(models, hosted)
    if address is not None:
        check_address("--address", address)


def _check_hosted(models: options.Models, hosted: options.HostedOptions, draft_device: str | None = None) -> None:
    """Raises InvalidRequest about options of a draft service where there is none; a hosted draft is as the target."""
    service = options_of(models, *SERVICE_OPTIONS) | {"--draft-device": draft_device}
    refuse_together("--draft-in-target", hosted.draft_in_target, service)


def _stack_alone(models: options.Models, hosted: options.HostedOptions, turn: options.TurnOptions) -> Stack:
    """The stack that one command starts for itself, on free ports."""
    defaults = os.environ.get(options.DEFAULTS_VARIABLE)
    alone = options.MachineOptions(port=0, draft_port=0, target_port=0, generation_defaults=defaults)
    looks_only = listed(turn.drafter or "") == (LOOKUP,)
    refuse_together("--drafter lookup", turn.drafter if looks_only else None, options_of(models, *DRAFT_OPTIONS))
    stack = _stack(models, alone, hosted, has_draft=not turn.no_speculation and not looks_only)
    return replace(stack, rest_port=None)


@app.command()
@grouped
def doctor(
    *,
    examined: options.ExaminedOptions,
    quick: options.Quick = False,
    as_json: options.JsonReport = False,
    no_draft: options.NoDraft = False,
    models: options.Models,
    machine: options.MachineOptions,
    connection: options.ConnectionOptions,
) -> None:
    """Checks this machine and a pair of models, or a running gateway, and says what to change."""
    address, rest_address = examined.address, examined.rest_address
    here = {"--quick": quick or None, "--no-draft": no_draft or None}
    if examined.policy:
        refuse_together("--policy", examined.policy, {"--address": address} | here | options_of(models))
        place = rest_address or f"{HOST}:{machine.rest_port}"
        check_address("--rest-address", place)
        raise typer.Exit(show_policy(place, connection.api_key, connection.tls(place), as_json=as_json))
    tls = connection.tls(address)
    if address is None:
        if rest_address is not None:
            raise InvalidRequest("--rest-address", rest_address, "given with --address")
        not_fetched = ""
        try:
            stack: Stack | ModelRefused | NotInstalled = _stack(
                models, machine, options.HostedOptions(), has_draft=not no_draft, fetches=False
            )
            if models.target is None:
                not_fetched = choose_pair(models.pair, fetches=False).reason
        except (ModelRefused, NotInstalled) as error:
            # One of the findings.
            stack = error
        raise typer.Exit(examine_machine(stack, not_fetched, connection.api_key, quick=quick, as_json=as_json))
    refuse_together("--address", address, here | options_of(models))
    check_address("--address", address)
    if rest_address is not None:
        check_address("--rest-address", rest_address)
    raise typer.Exit(examine_gateway(address, rest_address, connection.api_key, tls, as_json=as_json))


@app.command("convert-head")
def convert_head(
    folder: options.PickledHead,
    out: options.ConvertedHead,
    *,
    theta: options.Theta = None,
    as_json: options.JsonReport = False,
) -> None:
    """Writes a pickled drafting head as safetensors, those of EAGLE in the layout of speculators."""
    run_converter(folder, out, theta, as_json=as_json)


@app.command(context_settings=bench.PASSING_ON, add_help_option=False)
def certs(context: typer.Context) -> None:
    """Makes an authority for development, and certificates for gateway, target, draft and a client."""
    run_module("outrider.process.certs", context.args)


@app.command()
def version(*, as_json: options.JsonReport = False) -> None:
    """Prints the version of Outrider; as JSON also those of what computes and carries."""
    tell_version(as_json=as_json)


def _stack(
    models: options.Models,
    machine: options.MachineOptions,
    hosted: options.HostedOptions,
    *,
    has_draft: bool,
    fetches: bool = True,
) -> Stack:
    """The stack to start; without speculation there is no use for a draft. Raises ModelRefused and NotInstalled."""
    check_installed(*Extra)
    refuse_together("--target", models.target, {"--pair": models.pair})
    machine.check_doors()
    OperatorDefaults.parse("--generation-defaults", machine.generation_defaults or "")
    named, head, defaults = (models.target, models.draft), hosted.head, machine.generation_defaults or ""
    if models.target is None:
        pair = choose_pair(models.pair, fetches=fetches)
        if pair.reason and fetches:
            note(f"Serving the embedded pair that tells tales: {pair.reason}")
        named = (pair.target, models.draft or pair.draft)
        head = head or (pair.head if has_draft else None)
        defaults = ",".join(filter(None, (pair.generation_defaults, defaults)))
    target, draft = choose_models(*named, no_draft=not has_draft)
    if draft is None and models.cascade is not None:
        raise InvalidRequest("--cascade", models.cascade, f"left out without a draft, and none was named for {target}")
    target_flags = hosted.target_flags(draft, machine.draft_threads)
    target_flags |= {"--head": None if head is None else check_model("--head", head)}
    if draft is None and has_draft and not any(target_flags.values()):
        note(f"No draft was named for {target}, so guesses are only looked up; name one with --draft.")
    return Stack(
        target=target,
        draft=None if hosted.draft_in_target else draft,
        target_flags=target_flags,
        draft_flags=models.draft_flags(),
        gateway_flags={
            "--generation-defaults": defaults or None,
            "--served-model-name": machine.served_model_name,
            "--no-auth": machine.no_auth,
        },
        host=machine.host,
        kv_tokens=models.kv_tokens,
        kv_dtype=models.kv_dtype or KvDtype.AUTO,
        context_len=models.context_len,
        dtype=models.dtype or Dtype.AUTO,
        device=machine.device,
        draft_device=machine.draft_device or machine.device,
        threads=machine.threads or available_cpus(),
        draft_threads=machine.draft_threads,
        gateway_port=machine.port,
        rest_port=machine.rest_port,
        draft_port=machine.draft_port,
        target_port=machine.target_port,
        draft_dtype=models.draft_dtype,
        branches=machine.branches,
        workers=machine.workers,
        api_keys=machine.api_keys,
    )
