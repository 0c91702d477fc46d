"""`headgate serve | bench`: the only reader of flags and environment.

It turns them into a config, and the errors of what it calls into one sentence and an exit code. Nothing that takes long
is imported before it is known to be needed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headgate import __version__
from headgate.config import DTYPES, EngineConfig, ServerConfig
from headgate.errors import CannotStart, HeadgateError, RequestError

if TYPE_CHECKING:
    from headgate.api.server import Ready

FAILED, WRONG_USE = 1, 2

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    options = parser().parse_args(arguments)
    try:
        result: int = options.run(options, environ)
    except CannotStart:
        return FAILED  # the engine has said why
    except RequestError as error:
        return say(str(error), WRONG_USE)
    except HeadgateError as error:
        return say(str(error), FAILED)
    except KeyboardInterrupt:
        return say("interrupted", 130)
    return result


def say(sentence: str, code: int) -> int:
    print(f"headgate: {sentence}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="headgate", description="Serve large language models.")
    root.add_argument("--version", action="version", version=f"headgate {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(_command(commands, "serve", "serve a model over HTTP, with OpenAI's API"))
    bench = _command(commands, "bench", "measure a server")
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    add_bench_serve(_command(benches, "serve", "send requests to a server and time its answers"))
    add_bench_lifecycle(_command(benches, "lifecycle", "abort and pause under load and time that"))
    add_replay(_command(commands, "replay", "run the last plans of a crashed engine again, on a fake device"))
    return root


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: Commands[argparse.ArgumentParser], name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")


# ------------------------------------------------------------------------------------------------------------ serve


def add_serve(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate serve [MODEL] [options]"
    command.set_defaults(run=serve)
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")

    add = command.add_argument_group("where it listens").add_argument
    add("--host", default="127.0.0.1", help="address (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--served-name", metavar="NAME", help="what clients call the model (default: its own name)")

    add = command.add_argument_group("how it computes").add_argument
    add("--replicas", type=int, default=1, metavar="N", help="engine processes behind one API (default: 1)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    add("--dtype", choices=DTYPES, default="auto", metavar="TYPE", help=f"{', '.join(DTYPES)} (the checkpoint's)")
    add("--deterministic", action="store_true", help="answers never depend on what else runs, to the bit")

    add = command.add_argument_group("limits").add_argument
    add("--max-context", type=int, metavar="TOKENS", help="prompt and answer together (default: the model's)")
    add("--max-running", type=int, default=256, metavar="N", help="answers computed at once, per engine (256)")
    add("--max-queue", type=int, default=1024, metavar="N", help="answers that may wait beyond those (1024)")
    add("--kv-blocks", type=int, metavar="N", help="blocks of 32 tokens of KV cache (default: what fits)")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="for requests to finish at the end (30)")

    add = command.add_argument_group("who may call, and what is logged").add_argument
    add("--api-keys", type=Path, metavar="FILE", help="lines of name:key, or JSON; else $HEADGATE_API_KEYS")
    add("--admin-key", metavar="KEY", help="for control calls; better in $HEADGATE_ADMIN_KEY")
    add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        metavar="FORMAT",
        help="text or json (default: text)",
    )
    add("--log-level", type=str.upper, choices=LOG_LEVELS, default="INFO", metavar="LEVEL", help="default: info")


def serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.api.server import run_server, take_port
    from headgate.logs import set_up
    from headgate.zoo.find import Places, find_model

    set_up(options.log_format, options.log_level, "api")
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
            max_queue=options.max_queue,
            drain_timeout_s=options.drain_timeout,
            api_keys=keys,
            admin_key=admin_key,
            log_format=options.log_format,
            log_level=options.log_level,
            otlp_endpoint=environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
        )
        run_server(config, listener, __version__, announce)
    return 0


def engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        dtype=options.dtype,
        deterministic=options.deterministic,
        max_context=options.max_context,
        max_running=options.max_running,
        kv_blocks=options.kv_blocks,
    )


def checked_port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise RequestError(f"--port must be between 0 and 65535, not {port}")
    return port


def read_keys(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """API keys by tenant, and the admin key; a flag wins over the environment."""
    from headgate.api.keys import parse_keys, read_keys

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
        # A script whose variable is not set must not open the server to everyone.
        raise RequestError(f"{where} is empty; give it a key or leave it out")
    return key


def announce(ready: Ready) -> None:
    """Tell that requests are taken now: a block for people, a line for machines."""
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
        fields |= {"kv_blocks": info.num_blocks, "max_context": info.max_context, "replicas": config.replicas}
        log.info("ready", extra={"fields": fields})
    else:
        print(ready_block(ready), flush=True)
    if ready.warning is not None:
        log.warning(ready.warning)


def ready_block(ready: Ready) -> str:
    config, info = ready.config, ready.info
    kv_tokens = info.num_blocks * info.block_size
    lines = {
        "model": f"{config.model_name} ({info.dtype}, {info.backend} backend on {info.device})",
        "context": f"{info.max_context} tokens",
        "KV cache": f"{info.num_blocks} blocks of {info.block_size} tokens: {kv_tokens} tokens per engine",
        "engines": f"{config.replicas}, each with up to {info.max_running} answers at once; {config.max_queue} may wait",
        "listening": f"{ready.url} ({ready.url}/openapi.json says what there is)",
    }
    told = "\n".join(f"  {name:<10} {value}" for name, value in lines.items())
    return f"\nHeadgate {__version__} is ready.\n\n{told}\n\nTry it:\n\n  {curl(ready)}\n"


def curl(ready: Ready) -> str:
    """A command that can be pasted into a shell."""
    # Small models lose the thread at OpenAI's default temperature of 1.
    settings = '"temperature": 0.2, "max_tokens": 100, "stream": true'
    path, body = "/v1/completions", f'{{"prompt": "Once upon a time", {settings}}}'
    if ready.chat:
        question = '{"role": "user", "content": "What is the capital of France?"}'
        path, body = "/v1/chat/completions", f'{{"messages": [{question}], {settings}}}'
    key = ' -H "Authorization: Bearer $KEY"' if ready.config.api_keys else ""
    return f"curl -sN {ready.url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


# ------------------------------------------------------------------------------------------------------ bench serve


def add_bench_serve(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench serve [URL] [options]"
    command.set_defaults(run=bench_serve)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="a server (default: %(default)s)")

    load = command.add_argument_group("load")
    add, pace = load.add_argument, load.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="PER_S", help="open loop: requests arrive at random, so many a second"
    )
    pace.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N clients, each waiting (default: 8)"
    )
    add("--requests", type=int, default=100, metavar="N", help="how many in all (default: %(default)s)")
    add("--seed", type=int, default=0, help="of arrivals and prompts (default: 0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="for one request (default: 600)")

    add = command.add_argument_group("requests").add_argument
    add("--api", choices=("chat", "completions"), default="chat", help="default: chat")
    add("--model", help="name (default: the first that the server lists)")
    add("--prompt-words", type=int, default=64, metavar="N", help="words in a prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens in an answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="answers always have --max-tokens (not every server can)")
    add("--api-key", metavar="KEY", help="else $OPENAI_API_KEY")

    add = command.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write them, and every request, as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw them as PNG (needs the extra `bench`)")


def bench_serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.load import ClosedLoop, Load, OpenLoop, run
    from headgate.bench.report import save_json, save_plot, table

    concurrency = 8 if options.concurrency is None else options.concurrency
    load = Load(
        url=options.url,
        api=options.api,
        model=options.model,
        pace=ClosedLoop(concurrency) if options.rate is None else OpenLoop(options.rate),
        requests=options.requests,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        timeout_s=options.timeout,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
    )
    result = run(load, progress=sys.stderr.isatty())
    print(table(result))
    if options.json:
        save_json(result, options.json)
    if options.plot:
        save_plot(result, options.plot)
    return 0 if result.completed else FAILED


# -------------------------------------------------------------------------------------------------- bench lifecycle


def add_bench_lifecycle(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench lifecycle [URL ...] [options]"
    command.set_defaults(run=bench_lifecycle)
    add = command.add_argument
    add("url", nargs="*", metavar="URL", help="servers, one after another (default: http://127.0.0.1:8000)")
    add("--concurrency", type=int, default=8, metavar="N", help="answers at once (default: %(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="of each kind (default: %(default)s)")
    add("--max-tokens", type=int, default=1000, metavar="N", help="of an answer that nobody ends (default: 1000)")
    add("--model", help="name (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="the admin's; else $HEADGATE_ADMIN_KEY")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")


def bench_lifecycle(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.lifecycle import Trial, run, save_json, table

    reports = run(
        [
            Trial(
                url=url,
                concurrency=options.concurrency,
                rounds=options.rounds,
                max_tokens=options.max_tokens,
                model=options.model,
                api_key=options.api_key or environ.get("HEADGATE_ADMIN_KEY"),
            )
            for url in options.url or ["http://127.0.0.1:8000"]
        ]
    )
    print(table(reports))
    if options.json:
        save_json(reports, options.json)
    return 0


# ----------------------------------------------------------------------------------------------------------- replay


def add_replay(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=replay)
    command.add_argument("file", type=Path, metavar="FILE", help="what the engine left behind; its log says where")


def replay(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Exits with 1 if a plan makes no sense."""
    from headgate.engine.replay import replay as run_again

    try:
        found = run_again(options.file)
    except (OSError, ValueError) as error:
        raise RequestError(f"{options.file} cannot be replayed: {error}") from None
    print(f"the engine died of: {found.error.strip().splitlines()[-1] if found.error else 'nothing it knew'}")
    print(found)
    return 0 if found.fault is None else FAILED


if __name__ == "__main__":
    sys.exit(main())
