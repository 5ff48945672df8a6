"""Certificates of authorities that live as long as a test: sound ones, and those that a peer must refuse."""

import asyncio
import os
import shutil
import ssl
from datetime import timedelta
from pathlib import Path

from outrider.process.certs import CA, CERT, KEY, LOCAL_HOSTS, write_certificates
from outrider.rpc.tls import Tls

DAY = timedelta(days=1)


def issue(folder: Path, *names: str, lifetime: timedelta = DAY, hosts: tuple[str, ...] = LOCAL_HOSTS) -> Path:
    """Writes certificates of the authority in a folder, which is made where there is none; returns the folder."""
    write_certificates(folder, {name: (name, *hosts) for name in names}, lifetime)
    return folder


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
    """Puts files in the place of others, as whoever renews certificates does."""
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
