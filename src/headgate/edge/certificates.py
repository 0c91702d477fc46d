"""Loads a certificate again when its files change, so that a renewal needs no restart. Open connections keep theirs."""

from __future__ import annotations

import asyncio
import logging
import ssl

from headgate.config import TlsFiles
from headgate.errors import RequestError
from headgate.tls import client_context, load_identity

log = logging.getLogger(__name__)

INTERVAL_S = 5.0

Stamp = tuple[int, ...]


async def renew(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Check the files of our certificate for changes, for ever."""
    if files.certificate is None:
        return
    stamp = _stamp(files)
    while True:
        await asyncio.sleep(INTERVAL_S)
        if (now := _stamp(files)) not in (stamp, None):
            stamp = now
            reload(context, files)


def reload(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        client_context(files)  # in case only one of the files has been replaced yet; loading it would harm `context`
        load_identity(context, files)
    except RequestError as error:
        log.warning("the TLS certificate is unchanged: %s", error)
    else:
        log.info("loaded the renewed certificate in %s", files.certificate)


def _stamp(files: TlsFiles) -> Stamp | None:
    """Return numbers that change with the files; None while one of them is missing."""
    assert files.certificate is not None and files.key is not None
    try:
        found = [path.stat() for path in (files.certificate, files.key)]
    except OSError:
        return None
    return tuple(number for each in found for number in (each.st_ino, each.st_mtime_ns, each.st_size))
