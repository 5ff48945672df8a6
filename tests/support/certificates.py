"""Certificates of authorities that live as long as a test: sound ones, and those that a peer must refuse."""

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
