"""Certificates of authorities that live as long as a test: sound ones, and those that a peer must refuse."""

import asyncio
import os
import shutil
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from outrider.process.certs import CA, CERT, KEY, LOCAL_HOSTS, write_certificates
from outrider.rpc.tls import Tls

DAY = timedelta(days=1)
# Makers of keys that gRPC does not take, by kind; the last is a sound one, for a certificate of OpenSSL's own form.
KEYS: Mapping[str, Callable[[], ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey]] = {
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "brainpool": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
    "trusted": lambda: ec.generate_private_key(ec.SECP256R1()),
}


def issue(folder: Path, *names: str, lifetime: timedelta = DAY, hosts: tuple[str, ...] = LOCAL_HOSTS) -> Path:
    """Writes certificates of the authority in a folder, which is made where there is none; returns the folder."""
    write_certificates(folder, {name: (name, *hosts) for name in names}, lifetime)
    return folder


def self_signed(folder: Path, kind: str) -> Tls:
    """The files of a certificate with a key of one of KEYS."""
    key, name, now = KEYS[kind](), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    pem = builder.sign(key, algorithm).public_bytes(Encoding.PEM)
    if kind == "trusted":
        pem = pem.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE")
    (folder / CERT).write_bytes(pem)
    (folder / KEY).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Tls(cert=str(folder / CERT), key=str(folder / KEY))


def signed(folder: Path, name: str, *names: x509.GeneralName) -> Tls:
    """The files of a certificate of a folder's authority with these names and no others, but for its subject's."""
    authority = folder / "authority"
    issuer = x509.load_pem_x509_certificate((authority / CERT).read_bytes())
    signer = load_pem_private_key((authority / KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer.subject, subject, key.public_key(), number, now - DAY, now + DAY)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    place = folder / name
    place.mkdir()
    (place / CERT).write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
    (place / KEY).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    shutil.copyfile(authority / CERT, place / CA)
    return shown_by(folder, name)


def shown_by(folder: Path, name: str) -> Tls:
    """The files of one of them, all of one authority."""
    return Tls(*(str(folder / name / each) for each in (CA, CERT, KEY)))


def trusting(folder: Path, name: str) -> Tls:
    """Only the authority, as a client without a certificate has it."""
    return Tls(ca=str(folder / name / CA))


def server_of(folder: Path, name: str) -> Tls:
    """Only the certificate, as a server has it that lets everybody in."""
    return Tls(cert=str(folder / name / CERT), key=str(folder / name / KEY))


def replace_files(source: Tls, place: Tls, *names: str) -> None:
    """Puts files in the place of others, as a renewal of certificates does."""
    for name in names:
        new = f"{getattr(place, name)}.new"
        shutil.copyfile(getattr(source, name), new)
        os.replace(new, getattr(place, name))


def tls_settings(folder: Path) -> dict[str, dict[str, str]]:
    """What the settings of each process are for mutual TLS between gateway and services, and TLS before the gateway."""
    settings = {}
    for role in ("gateway", "target", "draft"):
        shown = shown_by(folder, role)
        settings[role] = {"tls_cert": shown.cert, "tls_key": shown.key}
        if role == "gateway":
            files = {"ca": shown.ca, "cert": shown.cert, "key": shown.key}
            settings[role] |= {f"service_tls_{name}": path for name, path in files.items()}
        else:
            settings[role]["tls_client_ca"] = shown.ca
    return settings


def pem_of(tls: Tls) -> str:
    """A certificate as its file has it."""
    return Path(tls.cert).read_text(encoding="ascii")


async def shown_at(address: str, tls: Tls) -> str:
    """The certificate that a server shows to a new connection, in PEM."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), ca_certs=tls.ca)
