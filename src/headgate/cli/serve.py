"""`headgate serve`."""

from __future__ import annotations

import argparse
import secrets
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from headgate import __version__
from headgate.cli.help import CommandParser
from headgate.cli.tls import add_listener_tls, listener_tls
from headgate.config import (
    DTYPES,
    FP8,
    KV_TRANSPORTS,
    LOOPBACK,
    PREEMPTED,
    REASONING_PARSERS,
    TOOL_PARSERS,
    EngineConfig,
    LogprobsMode,
    Pooling,
    Registration,
    ServerConfig,
    TlsFiles,
)
from headgate.errors import RequestError

if TYPE_CHECKING:
    from headgate.api.server import ServerReady

ROLES = ("mixed", "prefill", "decode")
KV_LISTEN = "127.0.0.1:0"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_serve(command: CommandParser) -> None:
    command.usage = "headgate serve [MODEL] [options]"
    command.set_defaults(run=serve)
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id (SmolLM2-135M-Instruct)"
    )
    _add_network(command.add_argument_group("network").add_argument)
    _add_compute(command.add_argument_group("compute").add_argument)
    _add_limits(command.add_argument_group("limits").add_argument)
    _add_access(command.add_argument_group("access and logging").add_argument)
    _add_web_pages(command.add_rare_group("web pages").add_argument)
    _add_answers(command.add_rare_group("answers").add_argument)
    _add_fleets(command.add_rare_group("fleets").add_argument)


def _add_network(add: Callable[..., argparse.Action]) -> None:
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s, local only)")
    add("--port", type=int, default=8000, help="port to bind; 0: any free port (default: %(default)s)")
    add("--served-name", metavar="NAME", help="model name in the API (default: the model's own)")
    add_listener_tls(add)
    # Used by a supervising process that holds the other end of our standard input: the server exits when it closes.
    add("--with-parent", action="store_true", help=argparse.SUPPRESS)


def _add_compute(add: Callable[..., argparse.Action]) -> None:
    add("--replicas", type=int, default=1, metavar="N", help="engine processes behind one API (default: 1)")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="processes that share one model, per engine (1)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", choices=DTYPES, default="auto", metavar="TYPE", help=f"{', '.join(DTYPES)} (the checkpoint's)")
    add(
        "--fp8",
        choices=FP8,
        default="none",
        metavar="WHAT",
        help="FP8 storage on a GPU: weights, kv or both (none)",
    )
    add("--deterministic", action="store_true", help="bitwise identical answers whatever else is running")


def _add_limits(add: Callable[..., argparse.Action]) -> None:
    add("--max-context", type=int, metavar="TOKENS", help="prompt and answer together (default: the model's)")
    add("--max-running", type=int, default=256, metavar="N", help="answers computed at once, per engine (256)")
    add("--max-queue", type=int, default=1024, metavar="N", help="answers that may wait beyond those (1024)")
    add("--kv-blocks", type=int, metavar="N", help="KV cache blocks of 32 tokens (default: what fits)")
    add("--client-stall-timeout", type=float, default=30.0, metavar="S", help="drop clients that read nothing (30)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="let requests finish at shutdown (30)")


def _add_access(add: Callable[..., argparse.Action]) -> None:
    add("--api-keys", type=Path, metavar="FILE", help="name:key lines or JSON; default: $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; prefer $HEADGATE_ADMIN_KEY")
    add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        metavar="FORMAT",
        help="text or json (text)",
    )
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        default="INFO",
        metavar="LEVEL",
        help="debug, info, warning or error (info)",
    )


def _add_web_pages(add: Callable[..., argparse.Action]) -> None:
    add("--cors-origin", action="append", default=[], metavar="URL", help="web page origin that may call, or *")


def _add_answers(add: Callable[..., argparse.Action]) -> None:
    add(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        default="raw",
        metavar="MODE",
        help="default of requests: raw, scaled or processed (raw)",
    )
    add("--pooling", choices=get_args(Pooling), metavar="HOW", help="vectors: last token or mean (the checkpoint's)")
    add(
        "--generation-config",
        default="auto",
        metavar="WHAT",
        help="sampling of requests that do not set it: auto (the model's file), none, or a path (auto)",
    )
    for flag, parsers in (("--reasoning-parser", REASONING_PARSERS), ("--tool-parser", TOOL_PARSERS)):
        add(flag, choices=parsers, default="auto", metavar="NAME", help=f"{', '.join(parsers)} (auto)")
    add("--routed-experts", action="store_true", help="keep the experts of tokens, for return_routed_experts")


def _add_fleets(add: Callable[..., argparse.Action]) -> None:
    add("--register", metavar="URL", help="router to join; its key: $HEADGATE_ROUTER_KEY")
    add("--register-as", metavar="URL", help="this server's URL there (default: the address it is reached at)")
    add("--router-ca", type=Path, metavar="FILE", help="CAs of an https:// router; default: the system's")
    add("--role", choices=ROLES, default="mixed", metavar="ROLE", help="role there: mixed, prefill, decode (mixed)")
    add(
        "--kv-listen",
        default=KV_LISTEN,
        metavar="IP:PORT",
        help="bind address for KV transfer (%(default)s)",
    )
    add(
        "--kv-transport",
        choices=KV_TRANSPORTS,
        default="auto",
        metavar="KIND",
        help="KV transfer backend: auto, tcp or nixl (auto)",
    )
    add("--kv-peers", default=",".join(LOOPBACK), metavar="NETS", help="networks to fetch KV from (this machine)")
    add(
        "--kv-times",
        type=kv_times,
        default=KvTimes(),
        metavar="L,W,E",
        help="KV lease, fetch and export timeouts (30,10,30)",
    )
    add(
        "--on-preempt",
        choices=PREEMPTED,
        default="recompute",
        metavar="WHAT",
        help="recompute here or reschedule elsewhere (recompute)",
    )


def serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.api.server import run_server
    from headgate.cli.recommended import recommended_sampling
    from headgate.listening import take_port
    from headgate.logs import set_up
    from headgate.model_store.find import Places, find_model
    from headgate.model_store.pooling import read_pooling

    set_up(options.log_format, options.log_level, "api")
    if options.with_parent:
        end_with_parent()
    engine = engine_config(options)
    keys, admin_key = read_keys(options, environ)
    with take_port(options.host, checked_port(options.port)) as listener:
        model = find_model(options.model, Places.of(environ))
        config = ServerConfig(
            model=model.path,
            model_name=options.served_name or model.name,
            engine=engine,
            replicas=options.replicas,
            host=options.host,
            tls=listener_tls(options),
            cors_origins=tuple(options.cors_origin),
            logprobs_mode=options.logprobs_mode,
            pooling=options.pooling or read_pooling(model.path) or "last",
            sampling=recommended_sampling(model, options.generation_config),
            reasoning_parser=options.reasoning_parser,
            tool_parser=options.tool_parser,
            max_queue=options.max_queue,
            client_stall_timeout_s=options.client_stall_timeout,
            drain_timeout_s=options.drain_timeout,
            api_keys=keys,
            admin_key=admin_key,
            worker_key=worker_key(options, environ, keys),
            log_format=options.log_format,
            log_level=options.log_level,
            otlp_endpoint=environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
            register=registration(options, environ),
        )
        run_server(config, listener, __version__, announce)
    return 0


def registration(options: argparse.Namespace, environ: Mapping[str, str]) -> Registration | None:
    if options.register is None:
        return None
    key = checked_key(environ.get("HEADGATE_ROUTER_KEY"), "HEADGATE_ROUTER_KEY")
    # A router may require client certificates; the server's own then identifies it.
    tls = TlsFiles(certificate=options.tls_certificate, key=options.tls_key, ca=options.router_ca)
    return Registration(router=options.register, role=options.role, key=key, url=options.register_as, tls=tls)


def worker_key(options: argparse.Namespace, environ: Mapping[str, str], api_keys: Mapping[str, str]) -> str | None:
    """Return the key that a router must present; a server with this key accepts requests from that router only.

    If the server joins a router that has keys, the key is drawn at random and sent to the router at registration.
    """
    if (key := checked_key(environ.get("HEADGATE_WORKER_KEY"), "HEADGATE_WORKER_KEY")) is not None:
        return key
    registers = options.register is not None and "HEADGATE_ROUTER_KEY" in environ
    return secrets.token_urlsafe(32) if registers and not api_keys else None


def end_with_parent() -> None:
    """Send ourselves SIGTERM when the other end of standard input closes."""
    import os
    import signal
    import threading

    def watch() -> None:
        # Not read through `sys.stdin`, whose lock the interpreter takes at exit.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="headgate-parent", daemon=True).start()


class KvTimes(NamedTuple):
    lease_s: float = 30.0
    wait_s: float = 10.0
    export_s: float = 30.0


def kv_times(text: str) -> KvTimes:
    try:
        lease_s, wait_s, export_s = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"give three numbers of seconds, such as 30,10,30, not {text!r}") from None
    return KvTimes(lease_s, wait_s, export_s)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    if options.tensor_parallel > 1 and (options.role != "mixed" or options.kv_listen != KV_LISTEN):
        asked = f"--role {options.role}" if options.role != "mixed" else f"--kv-listen {options.kv_listen}"
        raise RequestError(
            f"{asked} and --tensor-parallel {options.tensor_parallel} cannot be combined: an engine of several ranks "
            f"does not exchange KV; leave one of them out"
        )
    return EngineConfig(
        device=options.device,
        dtype=options.dtype,
        fp8=options.fp8,
        deterministic=options.deterministic,
        routed_experts=options.routed_experts,
        tensor_parallel=options.tensor_parallel,
        max_context=options.max_context,
        max_running=options.max_running,
        kv_blocks=options.kv_blocks,
        kv_listen=options.kv_listen,
        kv_transport=options.kv_transport,
        kv_peers=tuple(filter(None, options.kv_peers.split(","))),
        lease_s=options.kv_times.lease_s,
        kv_wait_s=options.kv_times.wait_s,
        export_wait_s=options.kv_times.export_s,
        on_preempt=options.on_preempt,
    )


def checked_port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise RequestError(f"--port must be between 0 and 65535, not {port}")
    return port


def read_keys(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the API keys by tenant, and the admin key. Flags take precedence over the environment."""
    from headgate.contract.keys import parse_keys, read_keys

    keys: dict[str, str] = {}
    if options.api_keys is not None:
        keys = read_keys(options.api_keys)
    elif (text := environ.get("HEADGATE_API_KEYS")) is not None:
        keys = parse_keys(text, "HEADGATE_API_KEYS")
    if options.admin_key is not None:
        return keys, checked_key(options.admin_key, "--admin-key")
    return keys, checked_key(environ.get("HEADGATE_ADMIN_KEY"), "HEADGATE_ADMIN_KEY")


def checked_key(key: str | None, where: str) -> str | None:
    if key is not None and not key.strip():
        # A script with an unset variable must not start an unprotected server.
        raise RequestError(f"{where} is empty; give it a key or leave it out")
    return key


def announce(ready: ServerReady) -> None:
    """Report that the server accepts requests: as a block of text, or as one JSON log line."""
    import logging

    log = logging.getLogger(__name__)
    config, info = ready.config, ready.info
    if config.log_format == "json":
        fields: dict[str, object] = {
            "url": ready.url,
            "model": config.model_name,
            "dtype": info.dtype,
            "backend": info.backend,
        }
        fields |= {
            "kv_blocks": info.num_blocks // info.groups,
            "max_context": info.max_context,
            "replicas": config.replicas,
        }
        log.info("ready", extra={"fields": fields})
    else:
        print(ready_block(ready), flush=True)
    if ready.warning is not None:
        log.warning(ready.warning)


def ready_block(ready: ServerReady) -> str:
    from headgate.cli.recommended import described

    config, info = ready.config, ready.info
    engines = f"{config.replicas}, each" + (f" of {info.ranks} ranks" if info.ranks > 1 else "")
    lines = {
        "model": f"{config.model_name} ({info.dtype}, {info.backend} backend on {info.device})",
        "context": f"{info.max_context} tokens",
        "KV cache": f"{info.num_blocks} blocks of {info.block_size} tokens: {info.kv_tokens} tokens per engine",
        "engines": f"{engines} with up to {info.max_running} answers at once; {config.max_queue} may wait",
        "listening": f"{ready.url} (API description: {ready.url}/openapi.json)",
        "dashboard": f"{ready.url}/dashboard",
    }
    if config.sampling:
        lines["sampling"] = f"{described(config.sampling)}, unless a request sets them"
    if info.routed is not None:
        lines["KV cache"] += f", and {info.routed.token_bytes} bytes per token for its experts"
    table = "\n".join(f"  {name:<10} {value}" for name, value in lines.items())
    return f"\nHeadgate {__version__} is ready.\n\n{table}\n\nTry it:\n\n  {curl(ready)}\n"


def curl(ready: ServerReady) -> str:
    """Return a curl command that tries the server, to be pasted into a shell."""
    # Small models become incoherent at OpenAI's default temperature of 1.
    cool = "" if "temperature" in ready.config.sampling else '"temperature": 0.2, '
    settings = f'{cool}"max_tokens": 100, "stream": true'
    path, body = "/v1/completions", f'{{"prompt": "Once upon a time", {settings}}}'
    if ready.chat:
        question = '{"role": "user", "content": "What is the capital of Japan?"}'
        path, body = "/v1/chat/completions", f'{{"messages": [{question}], {settings}}}'
    key = ' -H "Authorization: Bearer $KEY"' if ready.config.api_keys else ""
    return f"curl -sN {ready.url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
