"""TLS contexts of servers, routers and clients, made from PEM files. The oldest version is TLS 1.2.

A file that is missing or unusable is reported by its name, when the process starts.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from headgate.config import TlsFiles
from headgate.errors import RequestError

MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
NOT_TLS = "the other side does not speak TLS; is its address http://?"
CLIENT_REFUSED = "the other side does not accept our client certificate"
EXPLANATIONS = {
    "WRONG_VERSION_NUMBER": NOT_TLS,
    "HTTP_REQUEST": NOT_TLS,
    "RECORD_LAYER_FAILURE": NOT_TLS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side requires a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": CLIENT_REFUSED,
    "SSLV3_ALERT_BAD_CERTIFICATE": CLIENT_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our client certificate has expired",
    # Sent by OpenSSL to a client of TLS 1.2 without a certificate, among others.
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the other side refuses the handshake; it may require a client certificate",
}


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for accepting connections. With `files.ca`, clients must present a certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_identity(context, files)
    if files.ca is not None:
        _load_authorities(context, files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that verifies servers with the CAs in `files`, or with the system's if it names none."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is not None:
        _load_authorities(context, files.ca)
    else:
        context.load_default_certs()
    if files.certificate is not None:
        load_identity(context, files)
    return context


def load_identity(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load the certificate and its key. Connections that are open keep the ones they have."""
    certificate, key = files.certificate, files.key
    assert certificate is not None and key is not None
    _check_pem(certificate, b"CERTIFICATE-----", "certificate")
    _check_pem(key, b"PRIVATE KEY-----", "private key")
    try:
        context.load_cert_chain(certificate, key, _refused_password(key))
    except ssl.SSLError as error:
        if error.reason in MISMATCHES:
            raise RequestError(f"the key in {key} does not belong to the certificate in {certificate}") from None
        raise RequestError(f"the certificate in {certificate} or the key in {key} is damaged: {why(error)}") from None


def why(error: BaseException) -> str:
    """Describe the failure of a connection to a server."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return EXPLANATIONS.get(error.reason) or f"TLS: {error.reason.lower().replace('_', ' ')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_authorities(context: ssl.SSLContext, ca: Path) -> None:
    _check_pem(ca, b"CERTIFICATE-----", "certificate")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise RequestError(f"the CA certificates in {ca} are damaged: {why(error)}") from None


def _check_pem(path: Path, mark: bytes, kind: str) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"the {kind} file {path} cannot be read: {error.strerror}") from None
    if mark not in content:
        raise RequestError(f"{path} has no {kind} in PEM format")


def _refused_password(key: Path) -> Callable[[], str]:
    def refuse() -> str:  # without this, OpenSSL would ask on the terminal
        raise RequestError(f"the key in {key} is encrypted; decrypt it, for example with `openssl pkey`")

    return refuse
