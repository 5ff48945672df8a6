"""The settings of a service with a model: threads, models and addresses, before anything is loaded."""

import os
from pathlib import Path

import pytest
from support.certificates import issue, shown_by
from typer.testing import CliRunner

from outrider.engine.ops import native
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_service.settings import MAX_THREADS, ModelServiceSettings, available_cpus, check_model
from target_service import __main__


def test_a_large_machine_does_not_ask_for_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the number of CPUs, as far as the kernels can use them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    assert available_cpus() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(384)))
    assert available_cpus() == MAX_THREADS == native.MAX_THREADS


@pytest.mark.parametrize("num_threads", [0, 257])
def test_the_engine_refuses_what_its_kernels_cannot_use(num_threads: int) -> None:
    """Before it looks for a model, and not as an error of the kernels."""
    with pytest.raises(InvalidRequest, match=rf"num_threads is {num_threads}, but must be in \[1, 256\]"):
        ModelRunner.load("/nope", num_threads=num_threads)


def test_a_model_is_a_folder_or_a_hub_id(tmp_path: Path) -> None:
    """What looks like a path must be a folder; whether a hub id exists is not known here."""
    assert check_model("--model", str(tmp_path)) == str(tmp_path)
    assert check_model("--model", "someone/some-model") == "someone/some-model"
    (tmp_path / "file").touch()
    for path in (str(tmp_path / "nope"), str(tmp_path / "file"), "./nope", "~nobody-here/model", "", "/" + "n" * 5000):
        with pytest.raises(ModelRefused, match=r"^--model is .*but must be a folder"):
            check_model("--model", path)


def test_a_sized_model_is_one_of_the_service_s_own_role() -> None:
    """The size that both roles have; the explicit name goes on from here."""
    assert check_model("--model", "sized:1b", "draft") == "sized:draft-1b"
    assert check_model("--model", "sized:1b", "target") == "sized:target-1b"
    with pytest.raises(ModelRefused, match="10m, 100m, 600m, 1b for a draft"):
        check_model("--model", "sized:", "draft")


def test_the_address_is_checked_before_a_model_is_loaded() -> None:
    """Settings with an address that is none do not exist."""
    with pytest.raises(InvalidRequest, match=r"^listen is 'localhost', but must be HOST:PORT"):
        ModelServiceSettings("model", listen="localhost")
    with pytest.raises(InvalidRequest, match=r"^metrics_listen is '9102', but must be HOST:PORT"):
        ModelServiceSettings("model", metrics_listen="9102")


def test_certificates_are_read_before_a_model_is_loaded(tmp_path: Path) -> None:
    """An authority of clients needs a certificate to show to them, and names of those who are let in."""
    shown = shown_by(issue(tmp_path, "target"), "target")
    files = {"tls_cert": shown.cert, "tls_key": shown.key}
    assert ModelServiceSettings("model").clients == ()
    assert ModelServiceSettings("model", **files).clients == ()
    assert ModelServiceSettings("model", **files, tls_client_ca=shown.ca).clients == ("gateway",)
    for further, words in (
        ({"tls_client_ca": shown.ca}, "^--tls-client-ca is .* but must be given with --tls-cert$"),
        ({"tls_cert": shown.cert}, "^--tls-cert is .* but must be given with --tls-key"),
        ({**files, "tls_client_ca": shown.key}, "^--tls-client-ca is .* an authority's certificate"),
        ({**files, "tls_client_ca": shown.ca, "tls_clients": ","}, "^--tls-clients is ',', but must be at least one"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ModelServiceSettings("model", **further)


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [([], None, True), (["--no-prefix-cache"], None, False), ([], "0", False), (["--prefix-cache"], "0", True)],
)
def test_the_prefix_cache_can_be_switched_off(
    words: list[str], variable: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag and by variable, of which the flag wins."""
    given: list[ModelServiceSettings] = []
    monkeypatch.setattr(__main__, "run_service", lambda role, start, settings: given.append(settings))
    result = CliRunner().invoke(
        __main__.app, ["--model", str(tmp_path), *words], env={"OUTRIDER_PREFIX_CACHE": variable}
    )
    assert result.exit_code == 0
    assert [settings.prefix_cache for settings in given] == [expected]
