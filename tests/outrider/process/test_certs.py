"""`outrider certs`: an authority and certificates for development, as files that others cannot read the keys of."""

import json
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from outrider.errors import InvalidRequest
from outrider.process.certs import CA, CERT, KEY, NAMES, hosts_of, write_certificates

START = "import sys; from outrider.cli.app import app; sys.argv[0] = 'outrider'; app()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.process.certs", *arguments], capture_output=True, text=True, check=False
    )


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def named_in(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in names]


@pytest.mark.slow
def test_the_command_writes_a_folder_for_each(tmp_path: Path) -> None:
    """Each has its certificate, its key for no other user, and the signing authority, and says who it is first."""
    ended = subprocess.run(
        [sys.executable, "-c", START, "certs", str(tmp_path), "--host", "target=10.0.0.7", "--days", "2", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout)["names"] == list(NAMES)
    authority = read(tmp_path / "authority" / CERT)
    for name in NAMES:
        found = read(tmp_path / name / CERT)
        found.verify_directly_issued_by(authority)
        assert read(tmp_path / name / CA) == authority
        assert named_in(found)[:2] == [name, "localhost"]
        assert timedelta(days=1) < found.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=2)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / name / CERT, tmp_path / name / KEY)
    assert "10.0.0.7" in named_in(read(tmp_path / "target" / CERT))
    assert "10.0.0.7" not in named_in(read(tmp_path / "draft" / CERT))
    keys = sorted(tmp_path.rglob(KEY))
    assert len(keys) == len(NAMES) + 1
    assert {each.stat().st_mode & 0o777 for each in keys} == {0o600}
    assert {each.name for each in tmp_path.rglob("*") if each.is_file()} == {CA, CERT, KEY}


def test_the_authority_is_kept(tmp_path: Path) -> None:
    """The second time there are new certificates of the same authority."""
    hosts = {"target": ("target",)}
    assert write_certificates(tmp_path, hosts, timedelta(days=1)) == ["target"]
    before = read(tmp_path / "authority" / CERT), read(tmp_path / "target" / CERT)
    write_certificates(tmp_path, hosts, timedelta(days=1))
    assert read(tmp_path / "authority" / CERT) == before[0]
    assert read(tmp_path / "target" / CERT) != before[1]
    read(tmp_path / "target" / CERT).verify_directly_issued_by(before[0])


def test_one_more_name() -> None:
    """Who is not one of the four gets a certificate, too."""
    assert hosts_of(["target-2=b.example", "target-2=c.example"], {})["target-2"] == (
        *("target-2", "localhost", "127.0.0.1", "::1"),
        *("b.example", "c.example"),
    )


@pytest.mark.slow
def test_whatever_has_a_certificate_gets_a_new_one_with_its_names(tmp_path: Path) -> None:
    """Those of an earlier call and those that are new, and each is named; a stranger's certificate is left alone."""
    strangers = tmp_path / "stranger"
    strangers.mkdir()
    leaf = trustme.CA().issue_cert("a.example")
    (strangers / CERT).write_bytes(leaf.cert_chain_pems[0].bytes())
    assert run(str(tmp_path), "--host", "target=10.0.0.7", "--host", "extra=b.example").returncode == 0
    before = {name: read(tmp_path / name / CERT) for name in (*NAMES, "extra")}
    ended = run(str(tmp_path), "--host", "target=c.example", "--host", "target=10.0.0.7")
    local = "localhost, 127.0.0.1, ::1"
    assert ended.stdout.splitlines()[1:] == [
        f"gateway: gateway, {local}",
        f"target: target, {local}, 10.0.0.7, c.example",
        f"draft: draft, {local}",
        f"client: client, {local}",
        f"extra: extra, {local}, b.example",
    ]
    for name, certificate in before.items():
        assert read(tmp_path / name / CERT) != certificate
    assert named_in(read(tmp_path / "target" / CERT))[-2:] == ["10.0.0.7", "c.example"]
    assert "O=Outrider" in read(tmp_path / "extra" / CERT).subject.rfc4514_string()
    assert read(strangers / CERT).subject == x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).subject


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    """Neither replaced, which all its certificates would be worthless by, nor used with the key of another one."""
    for name in ("one", "other"):
        write_certificates(tmp_path / name, {}, timedelta(days=1))
    key = tmp_path / "one" / "authority" / KEY
    key.write_bytes((tmp_path / "other" / "authority" / KEY).read_bytes())
    before = read(tmp_path / "one" / "authority" / CERT)
    whole = "must be without authority, or with a whole one"
    with pytest.raises(InvalidRequest, match=f"^DIR is .* {whole}: tls.key is not the key of tls.crt$"):
        write_certificates(tmp_path / "one", {}, timedelta(days=1))
    key.unlink()
    with pytest.raises(InvalidRequest, match=f"^DIR is .* {whole}: tls.key is not there$"):
        write_certificates(tmp_path / "one", {}, timedelta(days=1))
    assert read(tmp_path / "one" / "authority" / CERT) == before


@pytest.mark.parametrize(
    "entry",
    ["target", "=10.0.0.7", "target=", "Target=x", "../x=y", "authority=x", "target=10.0.0.0/8", "target=a@b.c"],
)
def test_names_that_are_refused(entry: str) -> None:
    """They become folders, and one of them is taken; hosts are names and single addresses."""
    with pytest.raises(InvalidRequest, match=r"^--host is "):
        hosts_of([entry], {})


@pytest.mark.slow
def test_refusals_are_sentences(tmp_path: Path) -> None:
    """A host that no certificate can name, an authority that is no longer whole, a folder that is none."""
    ended = run(str(tmp_path), "--host", "target=a b")
    assert (ended.returncode, ended.stderr[:33]) == (64, "outrider: --host is 'a b', but mu")
    (tmp_path / "authority" / CERT).write_text("")
    ended = run(str(tmp_path))
    assert (ended.returncode, ended.stderr[:18]) == (64, "outrider: DIR is '")
    ended = run("")
    assert (ended.returncode, ended.stderr) == (64, "outrider: DIR is '', but must be a folder\n")
    ended = run(str(tmp_path / "authority" / CERT))
    assert (ended.returncode, ended.stderr.count("\n")) == (64, 1)
    assert "must be a folder that can be written: Not a directory" in ended.stderr
