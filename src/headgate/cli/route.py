"""`headgate route`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from headgate import __version__
from headgate.cli.serve import LOG_LEVELS, checked_key, checked_port, end_with_parent, read_keys
from headgate.config import POLICIES, RouteConfig


def add_route(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate route [URL ...] [options]"
    command.set_defaults(run=route)
    add = command.add_argument
    add("worker", nargs="*", metavar="URL", help="workers, as URL or URL=ROLE (mixed, prefill, decode)")
    add("--workers", type=Path, metavar="FILE", help="lines of `URL [role]`; read again when it changes")

    add = command.add_argument_group("where it listens").add_argument
    add("--host", default="127.0.0.1", help="address (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")

    add("--with-parent", action="store_true", help=argparse.SUPPRESS)  # as of headgate serve

    add = command.add_argument_group("who gets a request").add_argument
    add("--policy", choices=POLICIES, default="cache_aware", metavar="NAME", help=f"{', '.join(POLICIES)}")
    add("--prefill-policy", choices=POLICIES, default="cache_aware", metavar="NAME", help="for prompts alone")
    add("--decode-policy", choices=POLICIES, default="least_tokens", metavar="NAME", help="for answers alone")

    add = command.add_argument_group("where prompts and answers are computed apart").add_argument
    add_disaggregation(add)
    add("--ticket-timeout", type=float, default=10.0, metavar="S", help="for a prefill worker to begin (10)")

    add = command.add_argument_group("limits").add_argument
    add("--max-in-flight", type=int, metavar="N", help="requests at once (default: what the workers take)")
    add("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait beyond those (1024)")
    add("--retries", type=int, default=3, metavar="N", help="attempts that bring no token, beyond the first (3)")
    add("--patience", type=float, default=30.0, metavar="S", help="for a worker to come back when none is ready (30)")
    add("--client-stall-timeout", type=float, default=30.0, metavar="S", help="for a client to read on (30)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="for requests to finish at the end (30)")

    add = command.add_argument_group("who may call, and what is logged").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="lines of name:key, or JSON; else $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; better in $HEADGATE_ADMIN_KEY")
    add("--worker-key", metavar="KEY", help="the workers' admin key; better in $HEADGATE_WORKER_KEY")
    add("--log-format", choices=("text", "json"), default="text", metavar="FORMAT", help="text or json (text)")
    add("--log-level", type=str.upper, choices=LOG_LEVELS, default="INFO", metavar="LEVEL", help="default: info")


def add_disaggregation(add: Callable[..., argparse.Action]) -> None:
    """Flags of `headgate route` that `headgate up` has as well."""
    add(
        "--disaggregate-tokens",
        type=int,
        default=256,
        metavar="N",
        help="shorter prompts are not sent elsewhere (256)",
    )
    add(
        "--preempt-retry-count",
        type=int,
        default=3,
        metavar="N",
        help="moves of an answer for want of room; it stays where the last one goes (3)",
    )
    add(
        "--preempt-retry-exclude-decode",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="not back to the worker that had no room, unless it is the only one (default)",
    )


def route(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.listening import take_port
    from headgate.logs import set_up
    from headgate.router.server import parse_worker, run_router

    set_up(options.log_format, options.log_level, "router")
    if options.with_parent:
        end_with_parent()
    keys, admin_key = read_keys(options, environ)
    config = RouteConfig(
        workers=tuple(parse_worker(text.replace("=", " ", 1), "worker") for text in options.worker),
        workers_file=options.workers,
        host=options.host,
        policy=options.policy,
        prefill_policy=options.prefill_policy,
        decode_policy=options.decode_policy,
        disaggregate_tokens=options.disaggregate_tokens,
        ticket_timeout_s=options.ticket_timeout,
        preempt_retry_count=options.preempt_retry_count,
        preempt_retry_exclude_decode=options.preempt_retry_exclude_decode,
        max_in_flight=options.max_in_flight,
        max_queue=options.max_queue,
        retries=options.retries,
        patience_s=options.patience,
        client_stall_timeout_s=options.client_stall_timeout,
        drain_timeout_s=options.drain_timeout,
        api_keys=keys,
        admin_key=admin_key,
        worker_key=options.worker_key or checked_key(environ.get("HEADGATE_WORKER_KEY"), "HEADGATE_WORKER_KEY"),
        log_format=options.log_format,
        log_level=options.log_level,
    )
    with take_port(options.host, checked_port(options.port)) as listener:
        run_router(config, listener, __version__, announce)
    return 0


def announce(url: str, workers: list[str]) -> None:
    told = ", ".join(workers) or "none yet; POST /v1/workers adds one"
    print(f"\nHeadgate {__version__} routes.\n", flush=True)
    print(f"  listening  {url}\n  dashboard  {url}/dashboard\n  workers    {told}\n", flush=True)
