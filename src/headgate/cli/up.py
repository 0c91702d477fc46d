"""`headgate up`: a fleet in one command, on this machine or on the machines of a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from headgate import __version__
from headgate.cli.route import add_disaggregation
from headgate.cli.serve import LOG_LEVELS, ROLES, checked_port, read_keys
from headgate.config import DTYPES, POLICIES, PREEMPTED, EngineConfig, RouteConfig
from headgate.errors import RequestError

if TYPE_CHECKING:
    from headgate.cluster.autoscale import ScaleBounds
    from headgate.cluster.fleet import Hooks, Launcher, Recipe, ServerFleet, ServerProcess
    from headgate.listening import StopSignals
    from headgate.router.router import Router

log = logging.getLogger(__name__)

SERVED = (
    "device",
    "dtype",
    "max_context",
    "max_running",
    "kv_blocks",
    "on_preempt",
)  # what is passed on to every server
OURS = ("--host", "--port", "--served-name", "--register", "--role", "--api-keys", "--admin-key", "--log-format")


def add_up(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate up [MODEL] [--mixed N | --prefill N --decode N | --fleet FILE] [options]"
    command.set_defaults(run=up)
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")
    add("--model", dest="named", metavar="MODEL", help="the same, by its name")
    add("--mixed", type=int, metavar="N", help="servers that do all of a request (2, if none is asked)")
    add("--prefill", type=int, metavar="N", help="servers for prompts")
    add("--decode", type=int, metavar="N", help="servers for answers")
    add("--fleet", type=Path, metavar="FILE", help="all of that, for each role, in TOML or JSON: docs/ray.md")
    add("--autoscale", action="append", default=[], metavar="ROLE=A:B", help="between A and B of them, by load")

    add = command.add_argument_group("on the machines of a Ray cluster (extra ray)").add_argument
    add("--ray", metavar="ADDRESS", help="HOST:PORT of its head, or auto; run this on one of its machines")
    add("--cpus", type=float, metavar="N", help="that Ray sets aside for each server (1)")
    add("--gpus", type=float, metavar="N", help="that Ray sets aside for each server (0)")
    add("--room-timeout", type=float, default=60.0, metavar="S", help="for new servers to find room (60)")

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
    add("--client-stall-timeout", type=float, default=30.0, metavar="S", help="for a client to read on (30)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="for requests to finish at the end (30)")

    add = command.add_argument_group("where prompts and answers are computed apart").add_argument
    add_disaggregation(add)
    add(
        "--on-preempt",
        choices=PREEMPTED,
        default="recompute",
        metavar="WHAT",
        help="recompute in place, or reschedule elsewhere (recompute)",
    )

    add = command.add_argument_group("who may call, and what is logged").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="lines of name:key, or JSON; else $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; better in $HEADGATE_ADMIN_KEY")
    add("--log-format", choices=("text", "json"), default="text", metavar="FORMAT", help="text or json (text)")
    add("--log-level", type=str.upper, choices=LOG_LEVELS, default="INFO", metavar="LEVEL", help="default: info")


def up(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    import uvloop

    from headgate.listening import take_port
    from headgate.logs import set_up

    set_up(options.log_format, options.log_level, "up")
    if options.model and options.named not in (None, options.model):
        raise RequestError(f"MODEL and --model are the same, and here they differ: {options.model}, {options.named}")
    options.model = options.model or options.named
    asked = what_was_asked(options)
    EngineConfig(**{name: getattr(options, name) for name in SERVED})  # refused here rather than by every server
    keys, admin_key = read_keys(options, environ)
    # Where the router asks for keys, or other machines can reach its servers, these take no request but the router's.
    worker_key = secrets.token_urlsafe(32) if keys or admin_key or options.ray else None
    config = RouteConfig(
        host=options.host,
        policy=options.policy,
        disaggregate_tokens=options.disaggregate_tokens,
        preempt_retry_count=options.preempt_retry_count,
        preempt_retry_exclude_decode=options.preempt_retry_exclude_decode,
        client_stall_timeout_s=options.client_stall_timeout,
        drain_timeout_s=options.drain_timeout,
        api_keys=keys,
        admin_key=admin_key,
        worker_key=worker_key,
        log_format=options.log_format,
        log_level=options.log_level,
    )
    with take_port(options.host, checked_port(options.port)) as listener:
        name, launcher = prepare(options, environ, asked, worker_keys(worker_key, admin_key))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, listener, name, launcher, asked))
    return 0


# ------------------------------------------------------------------------------------------------------- what was asked


@dataclass(frozen=True, slots=True)
class RoleServers:
    """The servers of one role."""

    count: int
    bounds: ScaleBounds | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    serve: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    groups: dict[str, RoleServers]
    model: str | None = None
    served_name: str | None = None
    serve: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        return {role: group.count for role, group in self.groups.items()}

    @property
    def bounds(self) -> dict[str, ScaleBounds]:
        return {role: group.bounds for role, group in self.groups.items() if group.bounds is not None}

    @property
    def most(self) -> int:
        """Servers at once, unless somebody asks for more."""
        groups = self.groups.values()
        return sum(max(group.count, group.bounds.most if group.bounds else 0) for group in groups)


def what_was_asked(options: argparse.Namespace) -> Asked:
    asked = from_file(options) if options.fleet is not None else from_flags(options)
    if options.ray is None and (options.cpus is not None or options.gpus is not None):
        raise RequestError("--cpus and --gpus are set aside by Ray: add --ray ADDRESS")
    check_shares(options)
    counts = asked.counts
    if counts.get("prefill") and not (counts.get("decode") or counts.get("mixed")):
        raise RequestError("--prefill needs somebody for the answers: add --decode N or --mixed N")
    if not (counts.get("decode") or counts.get("mixed")):
        raise RequestError("a fleet needs at least one server for answers: mixed or decode")
    for role, group in asked.groups.items():
        check_ranks(role, group.gpus, parsed([*asked.serve, *group.serve]).tensor_parallel)
    return asked


def from_flags(options: argparse.Namespace) -> Asked:
    from headgate.cluster.autoscale import ScaleBounds

    counts = {role: getattr(options, role) for role in ROLES if getattr(options, role) is not None}
    for role, count in counts.items():
        if count < 0:
            raise RequestError(f"--{role} must be at least 0, not {count}")
    bounds: dict[str, ScaleBounds] = {}
    for text in options.autoscale:
        found = re.fullmatch(rf"({'|'.join(ROLES)})=(.*)", text)
        if found is None:
            raise RequestError(f"--autoscale is ROLE=LEAST:MOST, such as mixed=1:6, not {text!r}")
        bounds[found[1]] = ScaleBounds.of(found[2], f"--autoscale {found[1]}")
    for role, bound in bounds.items():
        count = counts.setdefault(role, bound.least)
        if not bound.least <= count <= bound.most:
            raise RequestError(f"--{role} {count} is not within --autoscale {role}={bound.least}:{bound.most}")
    counts = counts or {"mixed": 2}
    cpus, gpus = shares(options)
    return Asked({role: RoleServers(count, bounds.get(role), cpus, gpus) for role, count in counts.items()})


def from_file(options: argparse.Namespace) -> Asked:
    from headgate.cluster.fleetfile import read_fleet_file

    given = [f"--{role}" for role in ROLES if getattr(options, role) is not None]
    given += ["--autoscale"] if options.autoscale else []
    if given:
        raise RequestError(f"--fleet says how many servers there are; leave out {', '.join(given)}")
    file = read_fleet_file(options.fleet)
    cpus, gpus = shares(options)
    groups = {
        role: RoleServers(
            group.number,
            group.bounds,
            cpus if group.cpus is None else group.cpus,
            gpus if group.gpus is None else group.gpus,
            tuple(group.serve),
        )
        for role, group in file.groups.items()
    }
    if options.ray is None and any(group.cpus or group.gpus for group in file.groups.values()):
        raise RequestError(f"{options.fleet}: cpus and gpus are set aside by Ray: add --ray ADDRESS")
    return Asked(groups, file.model, file.served_name, tuple(file.serve))


def shares(options: argparse.Namespace) -> tuple[float, float]:
    return (1.0 if options.cpus is None else options.cpus), (0.0 if options.gpus is None else options.gpus)


def check_shares(options: argparse.Namespace) -> None:
    cpus, gpus = shares(options)
    if not cpus > 0:
        raise RequestError(f"--cpus must be above 0, not {cpus:g}")
    if not gpus >= 0:
        raise RequestError(f"--gpus must be at least 0, not {gpus:g}")
    if not options.room_timeout > 0:
        raise RequestError(f"--room-timeout must be above 0, not {options.room_timeout:g}")


def check_ranks(role: str, gpus: float, ranks: int) -> None:
    """The ranks of an engine see no more GPUs than were set aside for their server."""
    if 0 < gpus < ranks:
        raise RequestError(f"{role}: {ranks} ranks need a GPU each, and gpus is {gpus:g}; say gpus = {ranks}")


def parsed(flags: Sequence[str]) -> argparse.Namespace:
    """Flags of `headgate serve` from a fleet file; refused before any server is started with them."""
    from headgate.cli import parser

    for flag in flags:
        if flag.partition("=")[0] in OURS:
            raise RequestError(f"{flag} of its servers is the fleet's own business; leave it out")
    return parser().parse_args(["serve", "model", *flags])


# -------------------------------------------------------------------------------------------------- how servers are started


def prepare(
    options: argparse.Namespace, environ: Mapping[str, str], asked: Asked, keys: Mapping[str, str]
) -> tuple[str, Launcher]:
    """What clients call the model, and who starts its servers."""
    model = options.model or asked.model
    given_name = options.served_name or asked.served_name
    if options.ray is not None:
        from headgate.cluster.ray import RayLauncher

        path, own_name = model_elsewhere(model)
        name = given_name or own_name
        recipes = {role: recipe(options, asked, role, path, name, keys) for role in ROLES}
        times = {"drain_timeout_s": options.drain_timeout, "room_timeout_s": options.room_timeout}
        return name, RayLauncher(options.ray, recipes, **times)

    from headgate.cluster.local import LocalLauncher
    from headgate.model_store.find import Places, find_model

    found = find_model(model, Places.of(environ))
    name = given_name or found.name
    local = environment(environ, asked.most, keys)
    recipes = {role: recipe(options, asked, role, str(found.path), name, local) for role in ROLES}
    return name, LocalLauncher(recipes, drain_timeout_s=options.drain_timeout)


def model_elsewhere(model: str | None) -> tuple[str, str]:
    """What its machines look for, each in its own places, and its name."""
    from headgate.model_store import default_model

    if model is None:
        return "", default_model.NAME
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve()), path.resolve().stem if path.is_file() else path.resolve().name
    return model, Path(model).name if model.startswith(("/", "~", ".")) else model


def recipe(
    options: argparse.Namespace, asked: Asked, role: str, model: str, name: str, environ: Mapping[str, str]
) -> Recipe:
    from headgate.cluster.fleet import Recipe

    group = asked.groups.get(role) or RoleServers(0, None, *shares(options))
    flags = [*asked.serve, *group.serve]
    arguments = (*filter(None, [model]), "--served-name", name, *served(options), *flags)
    # Engines of several ranks keep their KV to themselves.
    alone = parsed(flags).tensor_parallel == 1
    return Recipe(arguments, environ, group.cpus, group.gpus, exchanges_kv=alone)


def worker_keys(worker_key: str | None, admin_key: str | None) -> dict[str, str]:
    """The keys of a server, in its environment, which no other user can read: the router's, and the operator's."""
    keys = {"HEADGATE_WORKER_KEY": worker_key, "HEADGATE_ADMIN_KEY": admin_key}
    return {name: key for name, key in keys.items() if key is not None}


def served(options: argparse.Namespace) -> list[str]:
    """The flags of `headgate serve` that every server gets."""
    arguments = ["--drain-timeout", str(options.drain_timeout), "--log-level", options.log_level]
    arguments += ["--client-stall-timeout", str(options.client_stall_timeout)]
    for name in SERVED:
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


KEYS = ("HEADGATE_API_KEYS", "HEADGATE_ADMIN_KEY", "HEADGATE_WORKER_KEY")


def environment(environ: Mapping[str, str], servers: int, keys: Mapping[str, str]) -> dict[str, str]:
    """A server's: tenants are the router's business, and the cores are shared out."""
    local = {name: value for name, value in environ.items() if name not in KEYS}
    local.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // servers)))
    return {**local, **keys}


# ------------------------------------------------------------------------------------------------------------ while it runs


async def run(config: RouteConfig, listener: socket.socket, model: str, launcher: Launcher, asked: Asked) -> None:
    from headgate.listening import StopSignals

    log.info("starting %d servers for %s", sum(asked.counts.values()), model)
    async with launcher:
        # Only now: Ray, too, takes SIGTERM for itself when it is joined, and would end us with a stack trace.
        with StopSignals() as signals:
            try:
                await keep(config, listener, model, launcher, asked, signals)
            except asyncio.CancelledError:
                if not signals.seen:
                    raise
                log.info("stopped before the servers were ready")


async def keep(
    config: RouteConfig,
    listener: socket.socket,
    model: str,
    launcher: Launcher,
    asked: Asked,
    signals: StopSignals,
) -> None:
    """Start the servers, route until a signal comes, then let both end in that order."""
    from headgate.cluster.fleet import ServerFleet
    from headgate.router.router import Router
    from headgate.router.server import prepare_process, serving

    router = Router(config, fast_path=prepare_process())
    async with ServerFleet(launcher, asked.counts, hooks(router), asked.bounds) as fleet:
        await fleet.ready()
        router.scaler = fleet
        async with serving(router, listener, __version__) as url, autoscaling(router, fleet, asked.bounds):
            announce(config, url, model, fleet.servers, router.keys.warning)
            signals.on_stop = router.hurry
            await signals.first()
            await router.drain()


def hooks(router: Router) -> Hooks:
    """How servers that come and go become workers of the router."""
    from headgate.cluster.fleet import Hooks
    from headgate.contract.fleet import Role
    from headgate.router.fleet.fleet import NoSuchWorker

    began_s = time.monotonic()

    def on_ready(server: ServerProcess) -> None:
        role = next(role for role in get_args(Role) if role == server.role)
        router.fleet.add(server.url, role, pid=server.pid)
        took_s = time.monotonic() - began_s
        log.info("worker %d is ready: %s at %s after %.1f s", server.index, role, server.url, took_s)

    def on_leave(server: ServerProcess) -> None:
        with suppress(NoSuchWorker):  # an operator may have removed it
            router.fleet.remove(router.fleet.find(server.url))

    def on_gone(server: ServerProcess) -> None:
        with suppress(NoSuchWorker):
            worker = router.fleet.find(server.url)
            router.fleet.give_up(
                worker
            )  # its answers go on elsewhere now; its connections may never say that it is dead
            router.fleet.remove(worker)

    return Hooks(on_ready, on_leave, on_gone)


@asynccontextmanager
async def autoscaling(router: Router, fleet: ServerFleet, bounds: Mapping[str, ScaleBounds]) -> AsyncIterator[None]:
    from headgate.cluster.autoscale import Autoscaler, Snapshot
    from headgate.router.control.scaling import load_of

    def look(role: str, now_s: float) -> Snapshot | None:
        load = load_of(router, role)
        return None if load is None else Snapshot(now_s, fleet.wanted[role], fleet.running[role], *load)

    task = asyncio.create_task(Autoscaler(bounds, look, fleet.want).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def announce(
    config: RouteConfig, url: str, model: str, servers: Sequence[ServerProcess], warning: str | None
) -> None:
    if config.log_format == "json":
        told = [{"url": server.url, "role": server.role, "pid": server.pid} for server in servers]
        log.info("ready", extra={"fields": {"url": url, "model": model, "workers": told}})
    else:
        print(ready_block(config, url, model, servers), flush=True)
    if warning is not None:
        log.warning(warning)


def ready_block(config: RouteConfig, url: str, model: str, servers: Sequence[ServerProcess]) -> str:
    told = "\n".join(
        f"  worker {server.index}   {server.url} ({server.role}, pid {server.pid})" for server in servers
    )
    body = shlex.quote('{"prompt": "Once upon a time", "temperature": 0.2, "max_tokens": 100, "stream": true}')
    key = ' -H "Authorization: Bearer $KEY"' if config.api_keys else ""
    curl = f"curl -sN {url}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"
    return (
        f"\nHeadgate {__version__} is ready.\n\n  model      {model}\n{told}\n"
        f"  listening  {url} ({url}/v1/workers says how they fare)\n  dashboard  {url}/dashboard\n\nTry it:\n\n  {curl}\n"
    )
