"""Starts a server of SGLang; here the server is running before the adapter is created."""

from __future__ import annotations

from typing import Any, NoReturn


def launch_server(server_args: Any) -> NoReturn:
    raise NotImplementedError("create the adapter with launch_server=False")
