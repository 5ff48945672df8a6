"""Which processes a stack has, and how each is started."""

import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_service.server import DraftSettings
from gateway.settings import GatewaySettings
from outrider.cli.local_stack import Stack, choose_models, gateway_launch, model_launch, start_stack
from outrider.cli.options import HostedOptions, MachineOptions, Models
from outrider.cli.up import check_ports, outlasting
from outrider.errors import InvalidRequest, ModelRefused, NotReady
from outrider.model_files import model_names
from outrider.model_files.model_names import embedded_model
from outrider.process.children import Launch, RestartPolicy, Supervisor
from outrider.process.options import settings_of
from outrider.process.run import ProcessSettings
from target_service.server import TargetSettings

PAIR = Stack("models/target", "models/draft", threads=4, draft_threads=1)


def test_embedded_pair_is_the_default() -> None:
    """Without names both embedded models are served."""
    target, draft = choose_models(None, None, no_draft=False)
    assert (Path(target).name, Path(draft or "").name) == ("target", "draft")


def test_another_target_has_no_draft_unless_named() -> None:
    """The embedded draft fits the embedded target alone."""
    assert choose_models("big", None, no_draft=False) == ("big", None)
    assert choose_models("big", "small", no_draft=False) == ("big", "small")
    assert choose_models("big", "small", no_draft=True) == ("big", None)


def test_a_sized_target_takes_the_embedded_draft() -> None:
    """It has the same vocabulary; a preset of both roles means that of its option, in every later place."""
    target, draft = choose_models("sized:1b", None, no_draft=False)
    assert (target, Path(draft or "").name) == ("sized:target-1b", "draft")
    assert choose_models("sized:200m@3", "sized:1b", no_draft=False) == ("sized:target-200m@3", "sized:draft-1b")
    assert choose_models("sized:draft-1b", "sized:1b", no_draft=True) == ("sized:draft-1b", None)
    with pytest.raises(ModelRefused, match="200m, 1b, 3b, 8b, 32b for a target") as refusal:
        choose_models(None, "sized:7b", no_draft=False)
    assert refusal.value.exit_code == 78


def test_a_simulated_target_takes_a_simulated_draft() -> None:
    """The embedded one would be right about nothing; a draft that is named is taken, and wrong names are refused."""
    assert choose_models("sim:h100-8b", None, no_draft=False) == ("sim:h100-8b", "sim:h100-1b")
    assert choose_models("sim:h100-8b", None, no_draft=True) == ("sim:h100-8b", None)
    named = choose_models("sim:h100-70b@stretch=2.0", "sim:h100-1b@acceptance=0.9", no_draft=False)
    assert named == ("sim:h100-70b@stretch=2", "sim:h100-1b@acceptance=0.9")
    with pytest.raises(ModelRefused, match="is no simulated model"):
        choose_models("sim:h100", None, no_draft=False)


def test_missing_embedded_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says where it was looked for and which option names another."""
    monkeypatch.setattr(model_names, "PACKAGE", tmp_path)
    with pytest.raises(ModelRefused, match="name a model with --draft") as refusal:
        embedded_model("draft")
    assert str(tmp_path) in refusal.value.message


@pytest.mark.parametrize("option", ["target", "draft"])
def test_a_path_that_is_no_folder_is_told_with_its_option(option: str, tmp_path: Path) -> None:
    """Before anything starts: the service would know the path only."""
    models = {"target": str(tmp_path), "draft": None, option: str(tmp_path / "nope")}
    with pytest.raises(ModelRefused, match=rf"^--{option} is '.*nope', but must be a folder"):
        choose_models(models["target"], models["draft"], no_draft=False)


def test_command_lines() -> None:
    """Each service gets its own model, threads and address, and to stop with its stdin."""
    target = model_launch("target", PAIR)
    argv = replace(target, listen="127.0.0.1:7").argv
    assert argv[1:4] == ("-P", "-m", "target_service")
    assert argv[argv.index("--model") + 1] == "models/target"
    assert argv[argv.index("--threads") + 1] == "4"
    assert argv[-3:] == ("--listen", "127.0.0.1:7", "--stop-with-stdin")
    assert target.listen == "127.0.0.1:0"
    draft = model_launch("draft", PAIR).command
    assert draft[draft.index("--threads") + 1] == "1"
    gateway = gateway_launch(PAIR, "127.0.0.1:7", None).command
    assert gateway[gateway.index("--draft") + 1] == ""
    assert "--workers" not in gateway
    assert "--generation-defaults" not in gateway
    plain = replace(PAIR, gateway_flags={"--generation-defaults": "none"})
    gateway = gateway_launch(plain, "127.0.0.1:7", None).command
    assert gateway[gateway.index("--generation-defaults") + 1] == "none"
    gateway = gateway_launch(replace(PAIR, workers=3), "127.0.0.1:7", None).command
    assert gateway[gateway.index("--workers") + 1] == "3"


def test_a_draft_with_a_device_of_its_own_runs_ahead() -> None:
    """Unless the user says otherwise; on one device only where the user says so."""

    def words(**settings: Any) -> list[str]:
        command = gateway_launch(replace(PAIR, **settings), "127.0.0.1:7", "127.0.0.1:8").command
        place = command.index("--branches") if "--branches" in command else len(command)
        return list(command[place : place + 2])

    two = {"device": "cuda:0", "draft_device": "cuda:1"}
    assert (words(), words(branches=4), words(**two)) == ([], ["--branches", "4"], ["--branches", "16"])
    assert words(**two, branches=0) == ["--branches", "0"]
    assert words(device="cuda:0", draft=None) == []


def test_the_draft_may_have_a_dtype_and_a_top_n_of_its_own() -> None:
    """It takes the target's dtype and its own default unless an option says otherwise; the target hears of neither."""
    stack = replace(PAIR, dtype="float32")
    for role in ("target", "draft"):
        words = model_launch(role, stack).command
        assert words[words.index("--dtype") + 1] == "float32"
        assert "--top-n" not in words
    # A draft beside a file's own bits need not be such a file.
    beside = model_launch("draft", replace(PAIR, dtype="file")).command
    assert beside[beside.index("--dtype") + 1] == "auto"
    stack = replace(stack, draft_dtype="bfloat16", draft_flags={"--top-n": 16})
    target, draft = (model_launch(role, stack).command for role in ("target", "draft"))
    assert (target[target.index("--dtype") + 1], "--top-n" in target) == ("float32", False)
    assert (draft[draft.index("--dtype") + 1], draft[draft.index("--top-n") + 1]) == ("bfloat16", "16")


def test_a_cascade_is_the_draft_s_alone() -> None:
    """With its depth; without one no service hears of any."""
    models = Models(cascade="lookup", cascade_depth=2)
    stack = replace(PAIR, draft_flags=models.draft_flags())
    target, draft = (model_launch(role, stack).command for role in ("target", "draft"))
    assert "--cascade" not in target
    assert draft[draft.index("--cascade") :][:4] == ("--cascade", "lookup", "--cascade-depth", "2")
    assert "--cascade" not in model_launch("draft", replace(PAIR, draft_flags=Models().draft_flags())).command
    with pytest.raises(InvalidRequest, match="--cascade-depth is 2, but must be left out without --cascade"):
        Models(cascade_depth=2).draft_flags()


def test_what_guesses_in_the_target_s_process_is_told_to_the_target_alone() -> None:
    """A head's folder, a layer, and a switch; none unless wanted."""
    hosted = HostedOptions(head="models/head", lookahead=True, exit_layer=3)
    stack = replace(PAIR, target_flags=hosted.target_flags("models/draft", 2))
    target, draft = (model_launch(role, stack).command for role in ("target", "draft"))
    assert target[target.index("--head") + 1] == "models/head"
    assert target[target.index("--exit-layer") + 1] == "3"
    assert "--lookahead" in target
    bare = replace(PAIR, target_flags=HostedOptions(lookahead=False).target_flags("models/draft", 2))
    for words in (draft, model_launch("target", bare).command):
        assert not {"--head", "--exit-layer", "--lookahead", "--draft-model"} & set(words)


def test_a_draft_in_the_target_s_process_has_threads_of_its_own() -> None:
    """As many as it would have in a service; without a draft the target gets neither."""
    hosted = HostedOptions(draft_in_target=True)
    given = {name: value for name, value in hosted.target_flags("models/draft", 2).items() if value is not None}
    assert given == {"--draft-model": "models/draft", "--draft-threads": 2}
    assert not any(hosted.target_flags(None, 2).values())


def test_the_host_is_the_gateway_s_and_sizes_are_of_the_services() -> None:
    """gRPC and REST answer there, the services on this machine alone; the draft reads as far as it can."""
    stack = replace(PAIR, host="[::]", rest_port=0, kv_tokens=640, context_len=512)
    target, draft = (model_launch(role, stack) for role in ("target", "draft"))
    gateway = gateway_launch(stack, "127.0.0.1:7", None)
    assert (gateway.listen, gateway.further["rest"]) == ("[::]:0", "[::]:0")
    assert {target.listen, draft.listen} == {"127.0.0.1:0"}
    for words in (target.command, draft.command):
        assert words[words.index("--kv-tokens") + 1] == "640"
    assert target.command[target.command.index("--context-len") + 1] == "512"
    assert "--context-len" not in draft.command


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"device": "cuda:0", "draft_device": "cuda:0"}, "0.45"),
        ({"device": "cuda:0", "draft_device": "cuda:1"}, None),
        ({"device": "cuda:0", "draft_device": "cuda:0", "draft": None}, None),
        ({"device": "cuda:0", "draft_device": "cuda:0", "kv_tokens": 64}, None),
        ({}, None),
    ],
)
def test_two_models_on_one_device_have_a_share_each_of_its_memory(options: dict[str, Any], share: str | None) -> None:
    """Unless it was said how many tokens each has."""
    for role in ("target", "draft"):
        words = model_launch(role, replace(PAIR, **options)).command
        assert (words[words.index("--kv-memory-share") + 1] if "--kv-memory-share" in words else None) == share


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "[::1]"}, ""),
        ({"host": "0.0.0.0", "api_keys": "keys.toml"}, ""),
        ({"host": "0.0.0.0", "no_auth": True}, ""),
        ({"host": "0.0.0.0"}, "--host is '0.0.0.0', but must be an address of this machine alone unless --api-keys"),
        ({"api_keys": "keys.toml", "no_auth": True}, "--no-auth is 'True', but must be left out with --api-keys"),
    ],
)
def test_who_comes_in_from_elsewhere_is_said_before_anything_is_loaded(options: dict[str, Any], refusal: str) -> None:
    """By the names of the options that were typed."""
    with pytest.raises(InvalidRequest, match=refusal) if refusal else nullcontext():
        MachineOptions(**options).check_doors()


def test_services_know_the_flags_that_they_get() -> None:
    """An option that they call otherwise would end them at their start."""
    stack = replace(PAIR, workers=2, api_keys="keys.toml", prefix_cache=False, kv_tokens=64, context_len=64)
    stack = replace(stack, target_flags=HostedOptions(draft_in_target=True, lookahead=True).target_flags("d", 1))
    stack = replace(stack, draft_flags=Models(top_n=4, cascade="lookup", cascade_depth=2).draft_flags())
    launches: dict[type[ProcessSettings], Launch] = {
        TargetSettings: model_launch("target", stack),
        DraftSettings: model_launch("draft", stack),
        GatewaySettings: gateway_launch(outlasting(RestartPolicy(), stack), "127.0.0.1:7", "127.0.0.1:8"),
    }
    for settings, launch in launches.items():
        known = {flag for option in settings_of(settings) for flag in option.flags.split("/")}
        assert {word for word in launch.argv if word.startswith("--")} <= known


def test_an_offline_stack_downloads_nothing() -> None:
    """The hub's library in each of its processes knows of it; any other stack has the environment that there is."""
    launches = [model_launch("target", PAIR), model_launch("draft", PAIR), gateway_launch(PAIR, "127.0.0.1:7", None)]
    assert [each.environment for each in launches] == [{}] * 3
    offline = replace(PAIR, offline=True)
    for launch in (model_launch("draft", offline), gateway_launch(offline, "127.0.0.1:7", None)):
        assert launch.environment == {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("name", ["OUTRIDER_TLS_CERT", "OUTRIDER_SERVICE_TLS_CA"])
async def test_a_variable_about_tls_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every process would have read it, and the gateway would have waited for services that it calls otherwise."""
    monkeypatch.setenv(name, "tls.crt")
    async with Supervisor(lambda _: None, lambda *_: None) as supervisor:
        with pytest.raises(InvalidRequest, match=f"^{name} is 'tls.crt', but must be left out of the environment"):
            await start_stack(supervisor, PAIR)


def test_taken_port_is_told_with_the_way_out() -> None:
    """A port in use ends `up` before anything starts, also when its owner would share it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(NotReady, match=rf"Port {port} is taken.*--draft-port") as taken:
            check_ports(Stack("t", "d", draft_port=port))
    assert taken.value.exit_code == 69
    check_ports(Stack("t", "d", draft_port=port))
