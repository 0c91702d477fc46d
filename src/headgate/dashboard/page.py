"""The files of the dashboard page, and security headers that keep browsers from running any other code in it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

ROOT = "/"
PATH = "/dashboard"
EVENTS = f"{PATH}/events"
NUMBERS = f"{PATH}/numbers"

# path -> file, media type
ASSETS = {
    PATH: ("page.html", "text/html"),
    f"{PATH}/page.css": ("page.css", "text/css"),
    f"{PATH}/page.js": ("page.js", "text/javascript"),
    f"{PATH}/icon.svg": ("icon.svg", "image/svg+xml"),
}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def content(path: str) -> bytes:
    """Return the content of the file at `ROOT` or a path of `ASSETS`."""
    name = "root.html" if path == ROOT else ASSETS[path][0]
    return (files("headgate.dashboard") / "assets" / name).read_bytes()
