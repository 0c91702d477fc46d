"""The TLS flags that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from headgate.config import TlsFiles
from headgate.errors import RequestError

Add = Callable[..., argparse.Action]


def add_listener_tls(add: Add) -> None:
    """Add the flags of commands that accept connections."""
    add("--tls-certificate", type=Path, metavar="FILE", help="serve HTTPS: PEM certificate and intermediates")
    add("--tls-key", type=Path, metavar="FILE", help="private key of that certificate, not encrypted")
    add("--tls-client-ca", type=Path, metavar="FILE", help="require client certificates of these CAs")


def listener_tls(options: argparse.Namespace) -> TlsFiles | None:
    check_pair(options, "--tls-certificate", "--tls-key")
    if options.tls_certificate is None:
        if options.tls_client_ca is not None:
            raise RequestError("--tls-client-ca needs --tls-certificate and --tls-key")
        return None
    return TlsFiles(certificate=options.tls_certificate, key=options.tls_key, ca=options.tls_client_ca)


def add_url_ca(add: Add) -> None:
    """Add the flag of commands that call a server."""
    add("--ca", type=Path, metavar="FILE", help="CAs of an https:// URL; default: $SSL_CERT_FILE or the system's")


def url_tls(options: argparse.Namespace) -> TlsFiles:
    return TlsFiles(ca=options.ca)


def check_pair(options: argparse.Namespace, certificate: str, key: str) -> None:
    given = [getattr(options, flag[2:].replace("-", "_")) is not None for flag in (certificate, key)]
    if any(given) and not all(given):
        raise RequestError(f"{certificate} and {key} must be given together")
