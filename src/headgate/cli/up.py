"""`headgate up`: a fleet on this machine in one command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from headgate import __version__
from headgate.cli.serve import LOG_LEVELS, checked_port, read_keys
from headgate.config import DTYPES, POLICIES, EngineConfig, RouteConfig
from headgate.errors import RequestError

if TYPE_CHECKING:
    from headgate.cluster.local import LocalWorker

log = logging.getLogger(__name__)

SERVED = ("device", "dtype", "max_context", "max_running", "kv_blocks")  # what is passed on to every server


def add_up(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate up [MODEL] [--mixed N | --prefill N --decode N] [options]"
    command.set_defaults(run=up)
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")
    add("--mixed", type=int, default=0, metavar="N", help="servers that do all of a request (2, if none is asked)")
    add("--prefill", type=int, default=0, metavar="N", help="servers for prompts")
    add("--decode", type=int, default=0, metavar="N", help="servers for answers")

    add = command.add_argument_group("where it listens").add_argument
    add("--host", default="127.0.0.1", help="address (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--served-name", metavar="NAME", help="what clients call the model (default: its own name)")
    add("--policy", choices=POLICIES, default="cache_aware", metavar="NAME", help="as of headgate route")

    add = command.add_argument_group("each server, as of headgate serve").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", choices=DTYPES, default="auto", metavar="TYPE", help=f"{', '.join(DTYPES)} (the checkpoint's)")
    add("--max-context", type=int, metavar="TOKENS", help="prompt and answer together (default: the model's)")
    add("--max-running", type=int, default=256, metavar="N", help="answers computed at once (256)")
    add("--kv-blocks", type=int, metavar="N", help="blocks of 32 tokens of KV cache (default: what fits)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="for requests to finish at the end (30)")

    add = command.add_argument_group("who may call, and what is logged").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="lines of name:key, or JSON; else $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; better in $HEADGATE_ADMIN_KEY")
    add("--log-format", choices=("text", "json"), default="text", metavar="FORMAT", help="text or json (text)")
    add("--log-level", type=str.upper, choices=LOG_LEVELS, default="INFO", metavar="LEVEL", help="default: info")


def up(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    import uvloop

    from headgate.listening import take_port
    from headgate.logs import set_up
    from headgate.zoo.find import Places, find_model

    set_up(options.log_format, options.log_level, "up")
    roles = chosen_roles(options)
    EngineConfig(**{name: getattr(options, name) for name in SERVED})  # refused here rather than by every server
    keys, admin_key = read_keys(options, environ)
    worker_key = secrets.token_urlsafe(32) if keys or admin_key else None
    config = RouteConfig(
        host=options.host,
        policy=options.policy,
        drain_timeout_s=options.drain_timeout,
        api_keys=keys,
        admin_key=admin_key,
        worker_key=worker_key,
        log_format=options.log_format,
        log_level=options.log_level,
    )
    with take_port(options.host, checked_port(options.port)) as listener:
        model = find_model(options.model, Places.of(environ))
        name = options.served_name or model.name
        arguments = [str(model.path), "--served-name", name, *served(options)]
        local = environment(environ, len(roles), worker_key)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, listener, name, arguments, roles, local))
    return 0


def chosen_roles(options: argparse.Namespace) -> list[str]:
    counts = {role: getattr(options, role) for role in ("mixed", "prefill", "decode")}
    for role, count in counts.items():
        if count < 0:
            raise RequestError(f"--{role} must be at least 0, not {count}")
    if counts["prefill"] and not (counts["decode"] or counts["mixed"]):
        raise RequestError("--prefill needs somebody for the answers: add --decode N or --mixed N")
    if not any(counts.values()):
        counts["mixed"] = 2
    return [role for role, count in counts.items() for _ in range(count)]


def served(options: argparse.Namespace) -> list[str]:
    """The flags of `headgate serve` that every server gets."""
    arguments = ["--drain-timeout", str(options.drain_timeout), "--log-level", options.log_level]
    for name in SERVED:
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def environment(environ: Mapping[str, str], servers: int, worker_key: str | None) -> dict[str, str]:
    """A server's: keys are the router's business, and the cores are shared out."""
    local = {
        name: value for name, value in environ.items() if name not in ("HEADGATE_API_KEYS", "HEADGATE_ADMIN_KEY")
    }
    local.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // servers)))
    if worker_key is not None:
        local["HEADGATE_ADMIN_KEY"] = worker_key
    return local


async def run(
    config: RouteConfig,
    listener: socket.socket,
    model: str,
    arguments: Sequence[str],
    roles: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Start the servers, route until a signal comes, then let both end in that order."""
    from headgate.cluster.local import LocalFleet
    from headgate.listening import StopSignals
    from headgate.router.router import Router
    from headgate.router.server import serving
    from headgate.router.worker import Role

    began_s = time.monotonic()
    router = Router(config)

    def on_ready(worker: LocalWorker) -> None:
        role = next(role for role in get_args(Role) if role == worker.role)
        router.fleet.add(worker.url, role, pid=worker.pid)
        took_s = time.monotonic() - began_s
        log.info("worker %d is ready: %s at %s after %.1f s", worker.index, role, worker.url, took_s)

    log.info("starting %d servers for %s", len(roles), model)
    fleet = LocalFleet(arguments, roles, environ, on_ready, drain_timeout_s=config.drain_timeout_s)
    with StopSignals() as signals:
        try:
            async with fleet:
                await fleet.ready()
                async with serving(router, listener, __version__) as url:
                    announce(config, url, model, fleet.workers, router.keys.warning)
                    signals.on_stop = router.hurry
                    await signals.first()
                    await router.drain()
        except asyncio.CancelledError:
            if not signals.seen:
                raise
            log.info("stopped before the servers were ready")


def announce(config: RouteConfig, url: str, model: str, workers: Sequence[LocalWorker], warning: str | None) -> None:
    if config.log_format == "json":
        told = [{"url": worker.url, "role": worker.role, "pid": worker.pid} for worker in workers]
        log.info("ready", extra={"fields": {"url": url, "model": model, "workers": told}})
    else:
        print(ready_block(config, url, model, workers), flush=True)
    if warning is not None:
        log.warning(warning)


def ready_block(config: RouteConfig, url: str, model: str, workers: Sequence[LocalWorker]) -> str:
    told = "\n".join(
        f"  worker {worker.index}   {worker.url} ({worker.role}, pid {worker.pid})" for worker in workers
    )
    body = shlex.quote('{"prompt": "Once upon a time", "temperature": 0.2, "max_tokens": 100, "stream": true}')
    key = ' -H "Authorization: Bearer $KEY"' if config.api_keys else ""
    curl = f"curl -sN {url}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"
    return (
        f"\nHeadgate {__version__} is ready.\n\n  model      {model}\n{told}\n"
        f"  listening  {url} ({url}/v1/workers says how they fare)\n  dashboard  {url}/dashboard\n\nTry it:\n\n  {curl}\n"
    )
