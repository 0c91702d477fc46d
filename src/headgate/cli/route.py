"""`headgate route`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from headgate import __version__
from headgate.cli.serve import LOG_LEVELS, checked_key, checked_port, end_with_parent, read_keys
from headgate.cli.tls import add_listener_tls, check_pair, listener_tls
from headgate.config import POLICIES, RouteConfig, TlsFiles


def add_route(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate route [URL ...] [options]"
    command.set_defaults(run=route)
    add = command.add_argument
    add("worker", nargs="*", metavar="URL", help="workers, as URL or URL=ROLE (mixed, prefill, decode)")
    add("--workers", type=Path, metavar="FILE", help="file with lines of `URL [role]`; watched for changes")

    add = command.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s, local only)")
    add("--port", type=int, default=8080, help="port to bind; 0: any free port (default: %(default)s)")
    add_listener_tls(add)
    add("--worker-ca", type=Path, metavar="FILE", help="CAs of https:// workers; default: the system's")
    add("--worker-certificate", type=Path, metavar="FILE", help="client certificate for workers that require one")
    add("--worker-certificate-key", type=Path, metavar="FILE", help="private key of that certificate")
    add("--cors-origin", action="append", default=[], metavar="URL", help="web page origin that may call, or *")
    add("--with-parent", action="store_true", help=argparse.SUPPRESS)  # see headgate serve

    add = command.add_argument_group("load balancing").add_argument
    add(
        "--policy",
        choices=POLICIES,
        default="cache_aware",
        metavar="NAME",
        help=f"{', '.join(POLICIES)} (cache_aware)",
    )
    add(
        "--prefill-policy",
        choices=POLICIES,
        default="cache_aware",
        metavar="NAME",
        help="for prefill workers (cache_aware)",
    )
    add(
        "--decode-policy",
        choices=POLICIES,
        default="least_tokens",
        metavar="NAME",
        help="for decode workers (least_tokens)",
    )

    add = command.add_argument_group("prefill/decode disaggregation").add_argument
    add_disaggregation(add)
    add("--ticket-timeout", type=float, default=10.0, metavar="S", help="wait for a prefill worker to begin (10)")

    add = command.add_argument_group("limits").add_argument
    add("--max-in-flight", type=int, metavar="N", help="concurrent requests (default: the workers' capacity)")
    add("--max-queue", type=int, default=1024, metavar="N", help="queued requests beyond those (1024)")
    add("--retries", type=int, default=3, metavar="N", help="retries of attempts that produced no token (3)")
    add("--patience", type=float, default=30.0, metavar="S", help="wait for a worker when none is ready (30)")
    add("--client-stall-timeout", type=float, default=30.0, metavar="S", help="drop clients that read nothing (30)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="let requests finish at shutdown (30)")

    add = command.add_argument_group("access and logging").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="name:key lines or JSON; default: $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; prefer $HEADGATE_ADMIN_KEY")
    add("--worker-key", metavar="KEY", help="the workers' admin key; prefer $HEADGATE_WORKER_KEY")
    add("--log-format", choices=("text", "json"), default="text", metavar="FORMAT", help="text or json (text)")
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        default="INFO",
        metavar="LEVEL",
        help="debug, info, warning or error (info)",
    )


def add_disaggregation(add: Callable[..., argparse.Action]) -> None:
    """Add the flags that `headgate route` and `headgate up` share."""
    add(
        "--disaggregate-tokens",
        type=int,
        default=256,
        metavar="N",
        help="prompts below N tokens skip the prefill worker (256)",
    )
    add(
        "--preempt-retry-count",
        type=int,
        default=3,
        metavar="N",
        help="how often a preempted answer may move to another worker; after that it stays (3)",
    )
    add(
        "--preempt-retry-exclude-decode",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do not move a preempted answer back to the worker that preempted it, unless no other is left "
        "(default: on)",
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
        workers=tuple(map(parse_worker, options.worker)),
        workers_file=options.workers,
        host=options.host,
        tls=listener_tls(options),
        worker_tls=worker_tls(options),
        cors_origins=tuple(options.cors_origin),
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
        worker_key=worker_key(options, environ),
        log_format=options.log_format,
        log_level=options.log_level,
    )
    with take_port(options.host, checked_port(options.port)) as listener:
        run_router(config, listener, __version__, announce)
    return 0


def worker_key(options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Return the key of the workers. The flag takes precedence over the environment."""
    if options.worker_key is not None:
        return checked_key(options.worker_key, "--worker-key")
    return checked_key(environ.get("HEADGATE_WORKER_KEY"), "HEADGATE_WORKER_KEY")


def worker_tls(options: argparse.Namespace) -> TlsFiles:
    check_pair(options, "--worker-certificate", "--worker-certificate-key")
    key = options.worker_certificate_key
    return TlsFiles(certificate=options.worker_certificate, key=key, ca=options.worker_ca)


def announce(url: str, workers: list[str]) -> None:
    listed = ", ".join(workers) or "none yet; POST /v1/workers adds one"
    print(f"\nHeadgate {__version__} router is ready.\n", flush=True)
    print(f"  listening  {url}\n  dashboard  {url}/dashboard\n  workers    {listed}\n", flush=True)
