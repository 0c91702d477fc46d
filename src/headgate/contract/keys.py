"""API keys: each key identifies a tenant; one admin key allows the calls that control the server.

A server behind a router may have a worker key: the router presents it, and callers without a key are refused.
Without any key, every caller is the tenant "". If only this machine can connect, callers are also admins, except browsers
that send requests for another site's page. A key is looked up by its keyed digest, so the time of the lookup reveals
nothing about any key.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headgate.contract.access import access_of
from headgate.contract.errors import Forbidden, Unauthorized
from headgate.contract.operations.operation import Access
from headgate.errors import RequestError

ADMIN = "admin"

TENANT = b"x-headgate-tenant"
LONGEST_TENANT = 256

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. It may see and end the requests of its tenant; an admin, those of all tenants."""

    tenant: str
    admin: bool

    def sees(self, tenant: str) -> bool:
        return self.admin or tenant == self.tenant

    def is_foreign(self, tenant: str) -> bool:
        """Whether an answer to this caller names the tenant: an admin sees all tenants, several of which may use one id."""
        return self.admin and bool(tenant) and tenant != self.tenant

    def check_may_list(self) -> None:
        """Refuse a caller without a key: all such callers are one tenant, and only the ids they know separate them."""
        if not (self.tenant or self.admin):
            raise Forbidden("callers without a key must name requests by id; send a key to list or abort all of them")


_KEYLESS_TENANT = Caller("", admin=False)


class Keys:
    """The keys of this server, by tenant. `exposed`: other machines can connect."""

    def __init__(
        self,
        tenants: Mapping[str, str] | None = None,
        admin: str | None = None,
        *,
        worker: str | None = None,
        exposed: bool = False,
    ) -> None:
        self.tenants = dict(tenants or {})
        self.admin = admin
        self.exposed = exposed
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, tuple[str, Caller]] = {}
        self.closed = bool(self.tenants) or worker is not None  # callers without a key are refused
        self._keyless = Caller("", admin=admin is None and not self.closed and not exposed)
        for name, key in self.tenants.items():
            self._add(key, Caller(name, admin=False))
        if admin is not None:
            self._add(admin, Caller(ADMIN, admin=True))
        if worker is not None and worker != admin:
            self._add(worker, Caller(ADMIN, admin=True))

    def _add(self, key: str, caller: Caller) -> None:
        digest = _digest(self._secret, key)
        if digest in self._callers:
            other = self._callers[digest][1].tenant
            raise RequestError(f"{other!r} and {caller.tenant!r} have the same API key; give each its own")
        self._callers[digest] = key, caller

    def __repr__(self) -> str:  # keys must not appear in logs
        return f"<Keys of {len(self.tenants)} tenants, {'an' if self.admin else 'no'} admin key>"

    @property
    def warning(self) -> str | None:
        """A warning for the operator if other machines can use the model without a key."""
        if not self.exposed or self.closed:
            return None
        control = "control calls need the admin key" if self.admin else "control calls are refused"
        return (
            f"anyone who can reach this address can use the model: there are no API keys (see --api-keys); {control}"
        )

    def caller(self, path: str, headers: Headers) -> Caller:
        """The caller that sent these headers; raises unless it may call `path`."""
        access = access_of(path)
        caller = _acting(self._identify(access, headers), headers)
        if access is Access.ADMIN and not caller.admin:
            raise Forbidden(self._why_closed())
        return caller

    def _identify(self, access: Access, headers: Headers) -> Caller:
        key = presented(headers) if self._callers else None
        if key is not None:
            digest = _digest(self._secret, key)
            expected, caller = self._callers.get(digest, ("", None))
            if caller is not None and hmac.compare_digest(expected.encode(), key.encode()):
                return caller
        if not self.closed or access is Access.OPEN:
            return _KEYLESS_TENANT if self._keyless.admin and from_elsewhere(headers) else self._keyless
        if key is None:
            raise Unauthorized("no API key; send it as `Authorization: Bearer KEY`", code="missing_api_key")
        raise Unauthorized("this API key is not known here; check it for typing errors")

    def _why_closed(self) -> str:
        if self.admin is not None:
            return "this call controls the server and needs the admin key"
        if self.closed:
            return "this call controls the server; start it with --admin-key to allow it"
        if not self.exposed:
            return (
                "this call controls the server and its Origin or Host is not the server's own; "
                "start it with --admin-key to allow such calls with that key"
            )
        return (
            "this server can be reached by others and has no keys; start it with --admin-key to allow control calls"
        )


def _acting(caller: Caller, headers: Headers) -> Caller:
    """The tenant for which an admin makes this call: a router acts for its own callers.

    An empty name stands for a caller without a key: the call loses admin rights, and nothing else changes.
    """
    named = next((value for name, value in headers if name == TENANT), None)
    if named is None:
        return caller
    if not named:
        return _KEYLESS_TENANT if caller.admin else caller
    if not caller.admin:
        raise Forbidden("X-Headgate-Tenant names another caller, which needs the admin key; leave it out")
    try:
        tenant = named.decode()
    except UnicodeDecodeError:
        tenant = ""
    if not 0 < len(tenant) <= LONGEST_TENANT or not tenant.isprintable() or ":" in tenant:
        raise RequestError(
            f"must be 1 to {LONGEST_TENANT} printable characters without a colon", param="X-Headgate-Tenant"
        )
    return Caller(tenant, admin=False)


def _digest(secret: bytes, key: str) -> bytes:
    return blake2b(key.encode(), key=secret, digest_size=32).digest()


def presented(headers: Headers) -> str | None:
    """The key in `Authorization: Bearer` or, failing that, in `X-API-Key`."""
    fallback = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            fallback = value.strip().decode("latin-1")
    return fallback


def from_elsewhere(headers: Headers) -> bool:
    """Whether a browser sends this request for another site's page, or to a host name that is not this machine's.

    Browsers report the origin of a page in `Origin`, or in `Sec-Fetch-Site` if the page only requests an image. A `Host`
    that is not this machine is a foreign DNS name that resolves to it (DNS rebinding). Other programs send neither `Origin`
    nor `Sec-Fetch-Site`.
    """
    given = {name: value.decode("latin-1").lower() for name, value in headers if name in _PROVENANCE}
    host, origin = given.get(b"host"), given.get(b"origin")
    if host is not None and not _names_this_machine(host):
        return True
    if origin is not None and origin.partition("://")[2] != host:
        return True
    return given.get(b"sec-fetch-site", "none") not in ("none", "same-origin")


_PROVENANCE = frozenset((b"host", b"origin", b"sec-fetch-site"))


@lru_cache(256)
def _names_this_machine(host: str) -> bool:
    return is_loopback(_hostname(host))


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------- reading keys


def read_keys(path: Path) -> dict[str, str]:
    """Keys by tenant, from a file of `name:key` lines or a JSON object."""
    try:
        return parse_keys(path.read_text("utf-8"), str(path))
    except OSError as error:
        raise RequestError(f"the API keys in {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"the API keys in {path} cannot be read: the file is not UTF-8 text") from None


def parse_keys(text: str, where: str) -> dict[str, str]:
    """Keys by tenant. Empty lines and lines that begin with # are skipped; a comma separates entries like a line end."""
    keys: dict[str, str] = {}
    for name, key in _json_pairs(text, where) if text.lstrip().startswith("{") else _line_pairs(text, where):
        _check(bool(name and key), where, "a name or a key is empty")
        _check(":" not in name, where, f"the name {name!r} has a colon in it")
        _check(name not in keys, where, f"tenant {name!r} has two keys")
        _check(name != ADMIN, where, f"a tenant cannot be called {ADMIN!r}; use --admin-key")
        _check(
            key.isascii() and key.isprintable() and " " not in key, where, f"the key of {name!r} has odd characters"
        )
        keys[name] = key
    # An empty file must not open the server to callers without a key.
    _check(bool(keys), where, "there is no key in it")
    return keys


def _line_pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    for line in map(str.strip, text.replace(",", "\n").splitlines()):
        if line and not line.startswith("#"):
            name, colon, key = line.partition(":")
            _check(bool(colon), where, "each line must be `name:key`")
            yield name.strip(), key.strip()


def _json_pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    try:
        yield from msgspec.json.decode(text, type=dict[str, str]).items()
    except msgspec.MsgspecError as error:
        raise RequestError(f"API keys in {where}: {error}") from None


def _check(ok: bool, where: str, message: str) -> None:
    if not ok:
        raise RequestError(f"API keys in {where}: {message}")
