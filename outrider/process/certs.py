"""`python -m outrider.process.certs DIR`: what `outrider certs` runs; a process of its own, because of what it imports.

The authority signs whatever its key is used for, so it is for development, and for one machine or network that belongs
to one operator. Every name gets a folder that can be handed over alone, with the names that Kubernetes has for the
files of such a secret.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import trustme
import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from outrider.errors import InvalidRequest
from outrider.process.options import between, run_app, service_app

# The first is the name that a service's list of clients has for it.
NAMES = ("gateway", "target", "draft", "client")
# Each is also called so on the machine that it runs on.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
AUTHORITY, ORGANIZATION = "authority", "Outrider"
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
DAYS, MAX_DAYS = 365, 36_500

app = service_app()


@app.command()
def certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder to write; an authority there is kept.")],
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host name or address of one of them, or of one more, as target=10.0.0.7.", metavar="NAME=HOST"
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="How long the certificates are valid.", callback=between(1, MAX_DAYS))
    ] = DAYS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Makes an authority for development, and certificates for gateway, target, draft and a client.

    Once more, it makes new certificates of the same authority for all that have one there, with the names that they
    had, which running processes take up by themselves.
    """
    # The path of no text would be that of the working directory.
    if not folder:
        raise InvalidRequest("DIR", folder, "a folder")
    place = Path(folder)
    try:
        hosts = hosts_of(host or [], hosts_in(place))
        names = write_certificates(place, hosts, timedelta(days=days))
    except OSError as error:
        raise InvalidRequest("DIR", folder, f"a folder that can be written: {error.strerror}") from None
    line = {"folder": folder, "authority": str(place / AUTHORITY / CERT), "names": names, "hosts": hosts}
    sentence = f"{folder} has certificates, valid for {days} days. Keep its {AUTHORITY} secret.\n"
    lines = sentence + "\n".join(f"{name}: {', '.join(found)}" for name, found in hosts.items())
    sys.stdout.write((json.dumps(line) if as_json else lines) + "\n")


def hosts_in(folder: Path) -> dict[str, tuple[str, ...]]:
    """The hosts in certificates of authorities of ours, by name; raises InvalidRequest about broken ones."""
    hosts = {}
    for path in sorted(folder.glob(f"*/{CERT}")):
        name = path.parent.name
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except ValueError as error:
            raise InvalidRequest("DIR", str(folder), f"without {path}, or with a whole one: {error}") from None
        issuers = certificate.issuer.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        if name != AUTHORITY and ORGANIZATION in [each.value for each in issuers]:
            try:
                found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            except x509.ExtensionNotFound as error:
                raise InvalidRequest("DIR", str(folder), f"without {path}, which is for no host: {error}") from None
            hosts[name] = tuple(str(each.value) for each in found)
    return hosts


def hosts_of(given: list[str], known: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The names of certificates with the hosts of each; raises InvalidRequest about what is not NAME=HOST."""
    hosts = {name: (name, *LOCAL_HOSTS) for name in NAMES} | dict(known)
    for entry in given:
        name, _, host = entry.partition("=")
        if not NAME.fullmatch(name) or not host or name == AUTHORITY:
            raise InvalidRequest("--host", entry, f"NAME=HOST, with a NAME in small letters other than {AUTHORITY}")
        # Of these the library would make a network and an address of mail.
        if not {"/", "@"}.isdisjoint(host):
            raise InvalidRequest("--host", entry, "NAME=HOST, with a HOST that is a host name or a single address")
        hosts[name] = tuple(dict.fromkeys((*hosts.get(name, (name, *LOCAL_HOSTS)), host)))
    return hosts


def write_certificates(folder: Path, hosts: Mapping[str, tuple[str, ...]], lifetime: timedelta) -> list[str]:
    """Writes a folder for the authority, unless it is there, and one for each name; returns the names.

    Raises InvalidRequest about a host that no certificate can name, and half an authority or one that cannot be read.
    """
    place, whole, own = str(folder), f"without {AUTHORITY}, or with a whole one", folder / AUTHORITY
    missing = [name for name in (CERT, KEY) if not (own / name).exists()]
    if len(missing) == 1:
        raise InvalidRequest("DIR", place, f"{whole}: {missing[0]} is not there")
    if missing:
        authority = trustme.CA(organization_name=ORGANIZATION, organization_unit_name="Development authority")
        _write(own / CERT, authority.cert_pem.bytes())
        _write(own / KEY, authority.private_key_pem.bytes(), mode=0o600)
    else:
        certificate, key = (own / CERT).read_bytes(), (own / KEY).read_bytes()
        try:
            authority = trustme.CA.from_pem(certificate, key)
            public = load_pem_private_key(key, None).public_key()
            fits = x509.load_pem_x509_certificate(certificate).public_key() == public
        except (TypeError, ValueError) as error:
            raise InvalidRequest("DIR", place, f"{whole}: {error}") from None
        if not fits:
            raise InvalidRequest("DIR", place, f"{whole}: {KEY} is not the key of {CERT}")
    expires = datetime.now(UTC) + lifetime
    issued = {}
    for name, names in hosts.items():
        try:
            issued[name] = authority.issue_cert(
                *names,
                common_name=name,
                organization_name=ORGANIZATION,
                organization_unit_name="Development certificate",
                not_after=expires,
            )
        except ValueError as error:
            raise InvalidRequest("--host", names[-1], f"a host name or an address: {error}") from None
    for name, leaf in issued.items():
        _write(folder / name / KEY, leaf.private_key_pem.bytes(), mode=0o600)
        _write(folder / name / CERT, b"".join(each.bytes() for each in leaf.cert_chain_pems))
        _write(folder / name / CA, authority.cert_pem.bytes())
    return list(issued)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replaces a file as a whole, so that no reader sees half of it; a key was never readable to others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=path.parent)
    with open(handle, "wb") as file:
        file.write(data)
    os.chmod(new, mode)
    os.replace(new, path)


if __name__ == "__main__":
    run_app(app, prefix="outrider: ")
