"""Transport security: the files of a certificate, taken up again when they are replaced, and why a peer was refused.

A client's name is the first DNS name among the subject alternative names of its certificate. It is read from the
certificate itself: what gRPC hands over mixes it with addresses and URIs, and ends at a zero. Who has no
certificate of the authority that a server asks for is turned away within the handshake, where gRPC informs no code in
Python; its own line on stderr ("Handshake failed with error ...") is the server's word about it. The client learns
nothing but the end of the connection, so it finds the reason with a handshake of its own (`why_refused`).
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.x509.oid import PublicKeyAlgorithmOID

from outrider.errors import Field, InvalidRequest, OutriderError, PeerLost
from outrider.rpc.errors import error_from, said_by_peer

log = structlog.get_logger()

PROBE_S = 5.0
# What gRPC begins with where it has no connection at all, as when a handshake fails; streams that break say less.
NOT_CONNECTED = "failed to connect to all addresses"
# Words of OpenSSL for what a reader would not recognize.
FOREIGN = frozenset({"unable to get local issuer certificate", "self-signed certificate in certificate chain"})
NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"
PLAINTEXT = frozenset({"HTTP_REQUEST", "WRONG_VERSION_NUMBER"})
ALERT = "_ALERT_"
CERTIFICATE_ALERTS = ("certificate", "unknown ca", "access denied")
# Of a connection that began without a handshake of its own, which gRPC allows.
RESUMED, CERTIFICATE = "ssl_session_reused", "x509_pem_cert"
# What is raised about a certificate in which no names can be found, beside ValueError.
NAMELESS = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, x509.InvalidVersion)
CURVES = frozenset({"secp256r1", "secp384r1"})

Context = grpc.aio.ServicerContext[Any, Any]


class TlsFailed(PeerLost):
    """The operator must change a certificate, an authority or an option: until then there is no connection."""

    reason = "TLS_FAILED"
    exit_code = 78


class ClientRefused(OutriderError):
    """The operator must let the client in by its name, or give it another certificate."""

    status = "PERMISSION_DENIED"
    reason = "CLIENT_REFUSED"
    exit_code = 77


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM; "" for none: `ca` must have signed the other side's certificate, `cert` and `key` are one's own.

    Raises InvalidRequest where only one of cert and key is given.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            limit = ("given with ", Field(f"tls.{missing}"), ", or left out")
            raise InvalidRequest(f"tls.{given}", getattr(self, given), limit)

    def context(self, purpose: int) -> ssl.SSLContext:
        """Context for Python's own handshakes, of the files as they are now; raises InvalidRequest about unusable ones.

        A server asks for certificates where there is an authority, and a client trusts no other one.
        """
        context = ssl.SSLContext(purpose)
        if self.cert:
            try:
                # Without a password the library would ask the terminal for one.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ValueError) as error:
                limit = f"a certificate in PEM that fits the key in {self.key}: {_words(error)}"
                raise InvalidRequest("tls.cert", self.cert, limit) from None
        if self.ca:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ValueError) as error:
                raise InvalidRequest("tls.ca", self.ca, f"an authority's certificate in PEM: {_words(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
            if purpose == ssl.PROTOCOL_TLS_SERVER:
                # Who takes up an earlier session shows no certificate again: neither its end nor another authority
                # would be noticed. Before TLS 1.3 sessions come from a cache too, which Python cannot switch off.
                context.num_tickets = 0
                context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def _words(error: Exception) -> str:
    """Fault in a library's words, without the place in its source."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "it cannot be read"
    return getattr(error, "strerror", None) or type(error).__name__


class Contents(NamedTuple):
    """Contents of files that fitted together, and a server's context of them."""

    ca: bytes
    cert: bytes
    key: bytes
    context: ssl.SSLContext


class TlsFiles:
    """The files of a `Tls` and what they hold, looked at again whenever somebody asks.

    Files are replaced one by one: as long as they do not fit together, what they held before holds. Raises
    InvalidRequest about files that do not fit at the beginning.
    """

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._marks = self._look()
        self._contents = self._load()

    @classmethod
    def of(cls, tls: Tls | None) -> Self | None:
        """Files of a `Tls`; None for plaintext. Raises as the constructor."""
        return None if tls is None else cls(tls)

    def renew(self) -> bool:
        """Takes up what has been replaced; returns whether there was something, and it fits."""
        marks = self._look()
        if marks == self._marks:
            return False
        try:
            contents = self._load()
        except Exception as error:  # noqa: BLE001 - whatever a library says of files that are none
            log.warning("certificate not taken up", cert=self.tls.cert, reason=str(error))
            self._marks = marks
            return False
        if self._look() != marks:
            # What was checked need not be what was read; the next call looks again.
            return False
        self._marks, self._contents = marks, contents
        log.info("certificate taken up", cert=self.tls.cert)
        self._warn_of_time()
        return True

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, renewed with each connection; with an authority, clients need a certificate."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            held = self._contents
            return grpc.ssl_server_certificate_configuration([(held.key, held.cert)], held.ca or None)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            return configuration() if self.renew() else None

        self._warn_of_time()
        # None goes on with what there is, which the stubs do not know.
        return grpc.dynamic_ssl_server_credentials(configuration(), renewed, bool(self.tls.ca))  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel, as the files were when they were last looked at."""
        held = self._contents
        return grpc.ssl_channel_credentials(held.ca or None, held.key or None, held.cert or None)

    def server_context(self) -> ssl.SSLContext:
        """Context of a server of Python's own, renewed with each connection; it logs whom it refuses."""

        def choose(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            self.renew()
            handshake.context = self._contents.context

        context = self._contents.context
        context.sni_callback = choose
        context.sslobject_class = LoggedHandshake
        return context

    def _load(self) -> Contents:
        """The files, which fit; raises InvalidRequest and OSError."""
        context = self.tls.context(ssl.PROTOCOL_TLS_SERVER)
        ca, cert, key = (Path(path).read_bytes() if path else b"" for path in self._paths())
        if cert:
            # OpenSSL takes certificates that gRPC does not, with which every call would fail.
            path = self.tls.cert
            try:
                leaf = x509.load_pem_x509_certificate(cert)
                public = leaf.public_key()
            except (ValueError, UnsupportedAlgorithm):
                limit = "a certificate that gRPC can read, and none of OpenSSL's own"
                raise InvalidRequest("tls.cert", path, limit) from None
            # By the algorithm, because a key for RSA-PSS alone is of the same type.
            is_rsa = leaf.public_key_algorithm_oid == PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5
            if not is_rsa and not (isinstance(public, EllipticCurvePublicKey) and public.curve.name in CURVES):
                limit = "a certificate whose key is RSA, P-256 or P-384, which gRPC takes"
                raise InvalidRequest("tls.cert", path, limit)
        return Contents(ca, cert, key, context)

    def _warn_of_time(self) -> None:
        """Logs a certificate that is not valid yet, or any more; a client may have none."""
        if not self._contents.cert:
            return
        leaf = x509.load_pem_x509_certificate(self._contents.cert)
        begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not begin <= datetime.now(UTC) <= end:
            log.warning("certificate not valid now", cert=self.tls.cert, begin=str(begin), end=str(end))

    def _paths(self) -> tuple[str, str, str]:
        return self.tls.ca, self.tls.cert, self.tls.key

    def _look(self) -> list[tuple[int, ...]]:
        """Marks that differ when a file has been replaced, or what leads to it; nothing of one that is not there."""
        found: list[tuple[int, ...]] = []
        for path in self._paths():
            with suppress(OSError):
                mark = os.stat(path)
                found.append((mark.st_dev, mark.st_ino, mark.st_size, mark.st_mtime_ns))
        return found


def files_of(tls: Mapping[str, str], options: Mapping[str, str]) -> TlsFiles | None:
    """The files that options name, by the fields of `Tls`; None where no option is given.

    Raises InvalidRequest, in the names of the options, about files that cannot be used.
    """
    if not any(tls.values()):
        return None
    try:
        return TlsFiles(Tls(**tls))
    except InvalidRequest as error:
        raise error.rename_fields(lambda field: options.get(field.removeprefix("tls."), field)) from None


class LoggedHandshake(ssl.SSLObject):
    """The server's side of a handshake; one that fails is a line in the log, where asyncio would say nothing."""

    def do_handshake(self) -> None:
        """Makes a handshake like any other, and raises the same."""
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            log.warning("client refused", reason=_why_client_refused(error))
            raise


def _why_client_refused(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"Its certificate is refused: {_verdict(error, 'the authority that clients must have')}."
    if error.reason == NO_CERTIFICATE:
        return "It has shown no certificate."
    if error.reason in PLAINTEXT:
        return "It does not speak TLS."
    if error.reason == "UNSUPPORTED_PROTOCOL":
        return "It speaks no version of TLS that is spoken here."
    if _is_about_certificate(_alert(error)):
        return f"It does not accept our certificate: {_alert(error)}."
    return f"The handshake failed: {_words(error)}."


def _verdict(error: ssl.SSLCertVerificationError, authority: str) -> str:
    return f"it is not signed by {authority}" if error.verify_message in FOREIGN else error.verify_message.rstrip(".")


def _alert(error: OSError) -> str:
    """Words of the other side as it ended a handshake, in small letters; empty where it said nothing."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or "").partition(ALERT)[2].replace("_", " ").lower()


def _is_about_certificate(alert: str) -> bool:
    return any(words in alert for words in CERTIFICATE_ALERTS)


def client_name(context: Context) -> str:
    """The name in the certificate with which a call came; empty where clients show none.

    Without a DNS name it is another one with its kind, which is let in by no list.
    """
    names = _alternative_names(context)
    other = f"{type(names[0]).__name__}:{names[0].value}" if names else ""
    return _dns_name(names) or other


def _dns_name(names: Sequence[x509.GeneralName]) -> str:
    return next((name.value for name in names if isinstance(name, x509.DNSName)), "")


def _alternative_names(context: Context) -> Sequence[x509.GeneralName]:
    pem = next(iter(context.auth_context().get(CERTIFICATE, ())), None)
    if pem is None:
        return ()
    try:
        extensions = x509.load_pem_x509_certificate(pem).extensions
        return tuple(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, *NAMELESS):
        return ()


def check_client(context: Context, allowed: Collection[str]) -> None:
    """Raises ClientRefused, and logs it, unless the call came from one of those who are let in; none named is all.

    Nor is anybody let in again, by an earlier session of TLS, whose certificate has expired since.
    """
    auth = context.auth_context()
    is_resumed = b"true" in auth.get(RESUMED, ())
    if not allowed and not is_resumed:
        return
    name = client_name(context)
    is_unknown = bool(allowed) and _dns_name(_alternative_names(context)) not in allowed
    reason = "is not one of those that are let in" if is_unknown else ""
    for pem in auth.get(CERTIFICATE, ()) if is_resumed else ():
        end = x509.load_pem_x509_certificate(pem).not_valid_after_utc
        reason = f"has a certificate that was valid until {end}" if end < datetime.now(UTC) else reason
    if reason:
        message = f"The client {name!r} {reason}"
        # Who is let in is for the log alone.
        log.warning("client refused", reason=message, peer=context.peer(), allowed=sorted(allowed))
        raise ClientRefused(message, client=name)


def why_refused(address: str, tls: Tls | None, name: str = "") -> str:
    """Reason why a server that is there takes no connection, as one sentence; empty where it is not about TLS.

    `name` is what its certificate must say, where that is not the host of the address. Tries a handshake, and blocks:
    for seconds where there is no answer.
    """
    try:
        return _why_refused(address, tls, name)
    except InvalidRequest as error:
        # One of the files has gone, or is being replaced.
        return f"{error.message}."


def _why_refused(address: str, tls: Tls | None, name: str) -> str:
    is_heard, alert = False, ""
    try:
        host, _, port = address.rpartition(":")
        context = (tls or Tls()).context(ssl.PROTOCOL_TLS_CLIENT)
        if tls is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif not tls.ca:
            context.load_default_certs()
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as connection,
            context.wrap_socket(connection, server_hostname=name or host.strip("[]")) as secure,
        ):
            # A server of gRPC speaks first, unless it refuses the certificate of its client.
            is_heard = tls is not None and bool(secure.recv(1))
    except ssl.SSLCertVerificationError as error:
        authority = f"the authority in {tls.ca}" if tls is not None and tls.ca else "a known authority"
        return f"The certificate of {address} is refused: {_verdict(error, authority)}."
    except OSError as error:
        alert = _alert(error)
        is_plain = tls is not None and isinstance(error, ssl.SSLError) and error.reason in PLAINTEXT
        if not alert:
            return f"{address} does not speak TLS." if is_plain else ""
    if tls is None:
        return f"{address} speaks TLS, and was called without it."
    if is_heard or (alert and not _is_about_certificate(alert)):
        return f"{address} ends the handshake: {alert}." if alert else ""
    if not tls.cert:
        return f"{address} lets nobody in without a certificate, and none was given."
    return f"{address} does not accept the certificate in {tls.cert}: {_own_fault(tls)}."


async def refusal(
    error: grpc.RpcError, address: str, tls: Tls | None, name: str = ""
) -> TlsFailed | ClientRefused | None:
    """Error about certificates for a failed call, looked into with `why_refused`; None where that is not the reason."""
    raised = error_from(error)
    if isinstance(raised, ClientRefused):
        return raised
    sentence = await asyncio.to_thread(why_refused, address, tls, name) if has_no_connection(error) else ""
    return TlsFailed(sentence, address=address) if sentence else None


def has_no_connection(error: grpc.RpcError) -> bool:
    """Whether a call failed because no connection could be made, and not because one broke."""
    return not said_by_peer(error) and NOT_CONNECTED in (error.details() or "")


def _own_fault(tls: Tls) -> str:
    """Fault of one's own certificate, as far as that can be seen from here."""
    server, client = tls.context(ssl.PROTOCOL_TLS_SERVER), tls.context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _verdict(error, f"the authority in {tls.ca}")
    return (
        "its authority is not the one that is wanted there, or it came too early or too late; the log there says which"
    )
