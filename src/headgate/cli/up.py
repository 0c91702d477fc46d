"""`headgate up`: start a router and its servers, on this machine or on the machines of a Ray cluster."""

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
from headgate.cli.help import CommandParser
from headgate.cli.route import add_disaggregation
from headgate.cli.serve import LOG_LEVELS, ROLES, add_serve, checked_port, read_keys
from headgate.cli.tls import add_listener_tls, listener_tls
from headgate.config import DTYPES, POLICIES, PREEMPTED, EngineConfig, RouteConfig
from headgate.errors import RequestError

if TYPE_CHECKING:
    from headgate.cluster.autoscale import ScaleBounds
    from headgate.cluster.fleet import Hooks, Launcher, Recipe, ServerFleet, ServerProcess
    from headgate.listening import StopSignals
    from headgate.router.router import Router

log = logging.getLogger(__name__)

# Flags passed on to every server, and flags of `headgate serve` that only `headgate up` may set.
SERVED = ("device", "dtype", "max_context", "max_running", "kv_blocks", "on_preempt")
RESERVED = (
    *("--host", "--port", "--served-name", "--register", "--role", "--api-keys", "--admin-key", "--log-format"),
    *("--tls-certificate", "--tls-key", "--tls-client-ca"),
)


def add_up(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate up [MODEL] [--mixed N | --prefill N --decode N | --fleet FILE] [options]"
    command.set_defaults(run=up)
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")
    add("--model", dest="named", metavar="MODEL", help="the model, as a flag instead of an argument")
    add("--mixed", type=int, metavar="N", help="servers for prefill and decode (2, if no role is given)")
    add("--prefill", type=int, metavar="N", help="servers for prefill only")
    add("--decode", type=int, metavar="N", help="servers for decode only")
    add("--fleet", type=Path, metavar="FILE", help="TOML or JSON file with servers per role: docs/ray.md")
    add("--autoscale", action="append", default=[], metavar="ROLE=A:B", help="keep A to B servers, depending on load")

    add = command.add_argument_group("Ray cluster (needs the extra `ray`)").add_argument
    add("--ray", metavar="ADDRESS", help="HOST:PORT of the head, or auto; run on a cluster machine")
    add("--cpus", type=float, metavar="N", help="CPUs that Ray reserves per server (1)")
    add("--gpus", type=float, metavar="N", help="GPUs that Ray reserves per server (0)")
    add("--room-timeout", type=float, default=60.0, metavar="S", help="wait for cluster resources (60)")

    add = command.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s, local only)")
    add("--port", type=int, default=8000, help="port to bind; 0: any free port (default: %(default)s)")
    add("--cors-origin", action="append", default=[], metavar="URL", help="web page origin that may call, or *")
    add("--served-name", metavar="NAME", help="model name in the API (default: the model's own)")
    add(
        "--policy",
        choices=POLICIES,
        default="cache_aware",
        metavar="NAME",
        help=f"{', '.join(POLICIES)} (cache_aware)",
    )
    add_listener_tls(add)

    add = command.add_argument_group("each server (see headgate serve)").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", choices=DTYPES, default="auto", metavar="TYPE", help=f"{', '.join(DTYPES)} (the checkpoint's)")
    add("--max-context", type=int, metavar="TOKENS", help="prompt and answer together (default: the model's)")
    add("--max-running", type=int, default=256, metavar="N", help="answers computed at once (256)")
    add("--kv-blocks", type=int, metavar="N", help="KV cache blocks of 32 tokens (default: what fits)")
    add("--client-stall-timeout", type=float, default=30.0, metavar="S", help="drop clients that read nothing (30)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="let requests finish at shutdown (30)")

    add = command.add_argument_group("prefill/decode disaggregation").add_argument
    add_disaggregation(add)
    add(
        "--on-preempt",
        choices=PREEMPTED,
        default="recompute",
        metavar="WHAT",
        help="recompute here or reschedule elsewhere (recompute)",
    )

    add = command.add_argument_group("access and logging").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="name:key lines or JSON; default: $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; prefer $HEADGATE_ADMIN_KEY")
    add("--log-format", choices=("text", "json"), default="text", metavar="FORMAT", help="text or json (text)")
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        default="INFO",
        metavar="LEVEL",
        help="debug, info, warning or error (info)",
    )


def up(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    import uvloop

    from headgate.listening import take_port
    from headgate.logs import set_up

    set_up(options.log_format, options.log_level, "up")
    if options.model and options.named not in (None, options.model):
        raise RequestError(f"give the model once: MODEL is {options.model} but --model is {options.named}")
    options.model = options.model or options.named
    spec = fleet_spec(options)
    EngineConfig(**{name: getattr(options, name) for name in SERVED})  # reports invalid values before servers start
    keys, admin_key = read_keys(options, environ)
    # If the router requires keys, or other machines can reach its servers, the servers accept only its requests.
    worker_key = secrets.token_urlsafe(32) if keys or admin_key or options.ray else None
    config = RouteConfig(
        host=options.host,
        tls=listener_tls(options),
        cors_origins=tuple(options.cors_origin),
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
        name, launcher = prepare(options, environ, spec, worker_keys(worker_key, admin_key))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, listener, name, launcher, spec))
    return 0


# ----------------------------------------------------------------------------------------------- the requested fleet


@dataclass(frozen=True, slots=True)
class RoleServers:
    """The servers of one role."""

    count: int
    bounds: ScaleBounds | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    serve: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The fleet that flags or a fleet file describe."""

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
        """The most servers at once, unless `headgate scale` asks for more."""
        groups = self.groups.values()
        return sum(max(group.count, group.bounds.most if group.bounds else 0) for group in groups)


def fleet_spec(options: argparse.Namespace) -> FleetSpec:
    spec = from_file(options) if options.fleet is not None else from_flags(options)
    if options.ray is None and (options.cpus is not None or options.gpus is not None):
        raise RequestError("--cpus and --gpus are reserved through Ray: add --ray ADDRESS")
    check_resources(options)
    counts = spec.counts
    if counts.get("prefill") and not (counts.get("decode") or counts.get("mixed")):
        raise RequestError("--prefill requires at least one --decode or --mixed server")
    if not (counts.get("decode") or counts.get("mixed")):
        raise RequestError("a fleet requires at least one mixed or decode server")
    for role, group in spec.groups.items():
        check_ranks(role, group.gpus, parsed([*spec.serve, *group.serve]).tensor_parallel)
    return spec


def from_flags(options: argparse.Namespace) -> FleetSpec:
    from headgate.cluster.autoscale import ScaleBounds

    counts = {role: getattr(options, role) for role in ROLES if getattr(options, role) is not None}
    for role, count in counts.items():
        if count < 0:
            raise RequestError(f"--{role} must be at least 0, not {count}")
    bounds: dict[str, ScaleBounds] = {}
    for text in options.autoscale:
        found = re.fullmatch(rf"({'|'.join(ROLES)})=(.*)", text)
        if found is None:
            raise RequestError(f"--autoscale {text!r} is not ROLE=LEAST:MOST, such as mixed=1:6")
        bounds[found[1]] = ScaleBounds.of(found[2], f"--autoscale {found[1]}")
    for role, bound in bounds.items():
        count = counts.setdefault(role, bound.least)
        if not bound.least <= count <= bound.most:
            raise RequestError(f"--{role} {count} is not within --autoscale {role}={bound.least}:{bound.most}")
    counts = counts or {"mixed": 2}
    cpus, gpus = resources(options)
    return FleetSpec({role: RoleServers(count, bounds.get(role), cpus, gpus) for role, count in counts.items()})


def from_file(options: argparse.Namespace) -> FleetSpec:
    from headgate.cluster.fleetfile import read_fleet_file

    given = [f"--{role}" for role in ROLES if getattr(options, role) is not None]
    given += ["--autoscale"] if options.autoscale else []
    if given:
        raise RequestError(f"--fleet sets the number of servers; leave out {', '.join(given)}")
    file = read_fleet_file(options.fleet)
    cpus, gpus = resources(options)
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
        raise RequestError(f"{options.fleet}: cpus and gpus are reserved through Ray: add --ray ADDRESS")
    return FleetSpec(groups, file.model, file.served_name, tuple(file.serve))


def resources(options: argparse.Namespace) -> tuple[float, float]:
    """Return the CPUs and GPUs to reserve per server."""
    return (1.0 if options.cpus is None else options.cpus), (0.0 if options.gpus is None else options.gpus)


def check_resources(options: argparse.Namespace) -> None:
    cpus, gpus = resources(options)
    if not cpus > 0:
        raise RequestError(f"--cpus must be above 0, not {cpus:g}")
    if not gpus >= 0:
        raise RequestError(f"--gpus must be at least 0, not {gpus:g}")
    if not options.room_timeout > 0:
        raise RequestError(f"--room-timeout must be above 0, not {options.room_timeout:g}")


def check_ranks(role: str, gpus: float, ranks: int) -> None:
    """Refuse fewer reserved GPUs than ranks, unless none are reserved: ranks see only their server's reserved GPUs."""
    if 0 < gpus < ranks:
        raise RequestError(f"{role}: {ranks} ranks need a GPU each, but gpus is {gpus:g}; set gpus = {ranks}")


def parsed(flags: Sequence[str]) -> argparse.Namespace:
    """Parse the `headgate serve` flags of a fleet file, to report errors before any server starts."""
    for flag in flags:
        if flag.partition("=")[0] in RESERVED:
            raise RequestError(f"{flag} of a server is set by headgate up; leave it out")
    command = CommandParser(prog="headgate serve")
    add_serve(command)
    return command.parse_args(["model", *flags])


# -------------------------------------------------------------------------------------------------- starting servers


def prepare(
    options: argparse.Namespace, environ: Mapping[str, str], spec: FleetSpec, keys: Mapping[str, str]
) -> tuple[str, Launcher]:
    """Return the model's name in the API, and the launcher of its servers."""
    model = options.model or spec.model
    given_name = options.served_name or spec.served_name
    if options.ray is not None:
        from headgate.cluster.ray import RayLauncher

        path, own_name = remote_model(model)
        name = given_name or own_name
        recipes = {role: recipe(options, spec, role, path, name, keys) for role in ROLES}
        times = {"drain_timeout_s": options.drain_timeout, "room_timeout_s": options.room_timeout}
        return name, RayLauncher(options.ray, recipes, **times)

    from headgate.cluster.local import LocalLauncher
    from headgate.model_store.find import Places, find_model

    found = find_model(model, Places.of(environ))
    name = given_name or found.name
    local = environment(environ, spec.most, keys)
    recipes = {role: recipe(options, spec, role, str(found.path), name, local) for role in ROLES}
    return name, LocalLauncher(recipes, drain_timeout_s=options.drain_timeout)


def remote_model(model: str | None) -> tuple[str, str]:
    """Return the model argument for servers on other machines, which find the model there, and the model's name."""
    from headgate.model_store import default_model

    if model is None:
        return "", default_model.NAME
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve()), path.resolve().stem if path.is_file() else path.resolve().name
    return model, Path(model).name if model.startswith(("/", "~", ".")) else model


def recipe(
    options: argparse.Namespace, spec: FleetSpec, role: str, model: str, name: str, environ: Mapping[str, str]
) -> Recipe:
    from headgate.cluster.fleet import Recipe

    group = spec.groups.get(role) or RoleServers(0, None, *resources(options))
    flags = [*spec.serve, *group.serve]
    arguments = (*filter(None, [model]), "--served-name", name, *served(options), *flags)
    # Engines of several ranks cannot exchange KV.
    single_rank = parsed(flags).tensor_parallel == 1
    return Recipe(arguments, environ, group.cpus, group.gpus, exchanges_kv=single_rank)


def worker_keys(worker_key: str | None, admin_key: str | None) -> dict[str, str]:
    """Return environment variables with a server's keys; other users cannot read the environment of a process."""
    keys = {"HEADGATE_WORKER_KEY": worker_key, "HEADGATE_ADMIN_KEY": admin_key}
    return {name: key for name, key in keys.items() if key is not None}


def served(options: argparse.Namespace) -> list[str]:
    """Return the `headgate serve` flags that every server gets."""
    # A server reports at level info that it is ready. This process drops what is below its own level.
    level = options.log_level if options.log_level.lower() == "debug" else "info"
    arguments = ["--drain-timeout", str(options.drain_timeout), "--log-level", level]
    arguments += ["--client-stall-timeout", str(options.client_stall_timeout)]
    for name in SERVED:
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


KEYS = ("HEADGATE_API_KEYS", "HEADGATE_ADMIN_KEY", "HEADGATE_WORKER_KEY")


def environment(environ: Mapping[str, str], servers: int, keys: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: without API keys, which the router checks, and with a share of the CPU cores."""
    local = {name: value for name, value in environ.items() if name not in KEYS}
    local.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // servers)))
    return {**local, **keys}


# ------------------------------------------------------------------------------------------------------------ running


async def run(config: RouteConfig, listener: socket.socket, model: str, launcher: Launcher, spec: FleetSpec) -> None:
    from headgate.listening import StopSignals

    log.info("starting %d servers for %s", sum(spec.counts.values()), model)
    async with launcher:
        # Signals are handled after joining Ray, because Ray installs a SIGTERM handler that prints a stack trace.
        with StopSignals() as signals:
            try:
                await route_until_stopped(config, listener, model, launcher, spec, signals)
            except asyncio.CancelledError:
                if not signals.seen:
                    raise
                log.info("stopped before the servers were ready")


async def route_until_stopped(
    config: RouteConfig,
    listener: socket.socket,
    model: str,
    launcher: Launcher,
    spec: FleetSpec,
    signals: StopSignals,
) -> None:
    """Start the servers, route until a signal arrives, then drain the router and stop the servers."""
    from headgate.cluster.fleet import ServerFleet
    from headgate.router.router import Router
    from headgate.router.server import prepare_process, serving

    router = Router(config, fast_path=prepare_process())
    async with ServerFleet(launcher, spec.counts, hooks(router), spec.bounds) as fleet:
        await fleet.ready()
        router.scaler = fleet
        async with serving(router, listener, __version__) as url, autoscaling(router, fleet, spec.bounds):
            announce(config, url, model, fleet.servers, router.keys.warning)
            signals.on_stop = router.hurry
            await signals.first()
            await router.drain()


def hooks(router: Router) -> Hooks:
    """Return callbacks that add servers to the router as workers, and remove them."""
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
        with suppress(NoSuchWorker):  # an operator may have removed the worker
            router.fleet.remove(router.fleet.find(server.url))

    def on_gone(server: ServerProcess) -> None:
        with suppress(NoSuchWorker):
            worker = router.fleet.find(server.url)
            # Resume its answers elsewhere now, because the connections of a dead machine may never be closed.
            router.fleet.give_up(worker)
            router.fleet.remove(worker)

    return Hooks(on_ready, on_leave, on_gone)


@asynccontextmanager
async def autoscaling(router: Router, fleet: ServerFleet, bounds: Mapping[str, ScaleBounds]) -> AsyncIterator[None]:
    from headgate.cluster.autoscale import Autoscaler, Snapshot
    from headgate.router.control.scaling import load_of

    def snapshot(role: str, now_s: float) -> Snapshot | None:
        load = load_of(router, role)
        return None if load is None else Snapshot(now_s, fleet.wanted[role], fleet.running[role], *load)

    task = asyncio.create_task(Autoscaler(bounds, snapshot, fleet.want).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def announce(
    config: RouteConfig, url: str, model: str, servers: Sequence[ServerProcess], warning: str | None
) -> None:
    if config.log_format == "json":
        workers = [{"url": server.url, "role": server.role, "pid": server.pid} for server in servers]
        log.info("ready", extra={"fields": {"url": url, "model": model, "workers": workers}})
    else:
        print(ready_block(config, url, model, servers), flush=True)
    if warning is not None:
        log.warning(warning)


def ready_block(config: RouteConfig, url: str, model: str, servers: Sequence[ServerProcess]) -> str:
    workers = "\n".join(
        f"  worker {server.index}   {server.url} ({server.role}, pid {server.pid})" for server in servers
    )
    body = shlex.quote('{"prompt": "Once upon a time", "temperature": 0.2, "max_tokens": 100, "stream": true}')
    key = ' -H "Authorization: Bearer $KEY"' if config.api_keys else ""
    curl = f"curl -sN {url}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"
    return (
        f"\nHeadgate {__version__} is ready.\n\n  model      {model}\n{workers}\n"
        f"  listening  {url} (worker status: {url}/v1/workers)\n  dashboard  {url}/dashboard\n\nTry it:\n\n  {curl}\n"
    )
