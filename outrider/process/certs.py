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

from outrider.errors import InvalidRequest
from outrider.process.options import between, run_app, service_app

# The first is the name that a service's list of clients has for it.
NAMES = ("gateway", "target", "draft", "client")
# Each is also called so on the machine that it runs on.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
AUTHORITY = "authority"
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
DAYS, MAX_DAYS = 365, 36_500

app = service_app()


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; an authority there is kept.")],
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

    Once more, it makes new certificates of the same authority, which running processes take up by themselves.
    """
    try:
        names = write_certificates(folder, hosts_of(host or []), timedelta(days=days))
    except OSError as error:
        raise InvalidRequest("DIR", str(folder), f"a folder that can be written: {error.strerror}") from None
    line = {"folder": str(folder), "authority": str(folder / AUTHORITY / CERT), "names": names}
    sentence = f"{folder} has certificates for {', '.join(names)}, valid for {days} days. Keep its {AUTHORITY} secret."
    sys.stdout.write((json.dumps(line) if as_json else sentence) + "\n")


def hosts_of(given: list[str]) -> dict[str, tuple[str, ...]]:
    """The names of certificates with the hosts of each; raises InvalidRequest about what is not NAME=HOST."""
    hosts: dict[str, tuple[str, ...]] = {name: (name, *LOCAL_HOSTS) for name in NAMES}
    for entry in given:
        name, _, host = entry.partition("=")
        if not NAME.fullmatch(name) or not host or name == AUTHORITY:
            raise InvalidRequest("--host", entry, f"NAME=HOST, with a NAME in small letters other than {AUTHORITY}")
        hosts[name] = (*hosts.get(name, (name, *LOCAL_HOSTS)), host)
    return hosts


def write_certificates(folder: Path, hosts: Mapping[str, tuple[str, ...]], lifetime: timedelta) -> list[str]:
    """Writes a folder for the authority, unless it is there, and one for each name; returns the names.

    Raises InvalidRequest about a host that no certificate can name, and an authority that cannot be read.
    """
    authority = _authority(folder / AUTHORITY)
    expires = datetime.now(UTC) + lifetime
    issued = {}
    for name, names in hosts.items():
        try:
            issued[name] = authority.issue_cert(*names, common_name=name, not_after=expires)
        except ValueError as error:
            raise InvalidRequest("--host", names[-1], f"a host name or an address: {error}") from None
    for name, leaf in issued.items():
        _write(folder / name / KEY, leaf.private_key_pem.bytes(), mode=0o600)
        _write(folder / name / CERT, b"".join(each.bytes() for each in leaf.cert_chain_pems))
        _write(folder / name / CA, authority.cert_pem.bytes())
    return list(issued)


def _authority(folder: Path) -> trustme.CA:
    if (folder / KEY).exists():
        try:
            return trustme.CA.from_pem((folder / CERT).read_bytes(), (folder / KEY).read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                "DIR", str(folder.parent), f"without {AUTHORITY}, or with a whole one: {error}"
            ) from None
    authority = trustme.CA(organization_name="Outrider", organization_unit_name="Development authority")
    _write(folder / CERT, authority.cert_pem.bytes())
    _write(folder / KEY, authority.private_key_pem.bytes(), mode=0o600)
    return authority


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replaces a file as a whole, so that nobody reads half of it; a key has never been anybody else's to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=path.parent)
    with open(handle, "wb") as file:
        file.write(data)
    os.chmod(new, mode)
    os.replace(new, path)


if __name__ == "__main__":
    run_app(app, prefix="outrider: ")
