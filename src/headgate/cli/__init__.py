"""The command line: the only reader of flags and environment variables.

Commands turn flags and variables into a config; `main` turns errors into one sentence and an exit code. Each command
is a module with a function that adds its flags and a function that runs it. Slow imports are made inside the function
that needs them. Command modules do not import from this one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from headgate import __version__
from headgate.cli.bench import (
    add_bench_compare,
    add_bench_disagg,
    add_bench_lifecycle,
    add_bench_prefix,
    add_bench_router,
    add_bench_serve,
)
from headgate.cli.chaos import add_chaos
from headgate.cli.completion import add_completion
from headgate.cli.doctor import add_doctor
from headgate.cli.exits import FAILED, WRONG_USE
from headgate.cli.help import CommandParser
from headgate.cli.replay import add_replay
from headgate.cli.route import add_route
from headgate.cli.scale import add_scale
from headgate.cli.serve import add_serve, read_keys
from headgate.cli.simulate import add_simulate
from headgate.cli.talk import add_chat, add_run
from headgate.cli.top import add_top
from headgate.cli.up import add_up
from headgate.errors import CannotStart, HeadgateError, RequestError

__all__ = ["FAILED", "WRONG_USE", "main", "parser", "read_keys"]


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    options = parser().parse_args(arguments)
    try:
        result: int = options.run(options, environ)
        sys.stdout.flush()
    except CannotStart:
        return FAILED  # the engine has logged the reason
    except RequestError as error:
        return fail(str(error), WRONG_USE)
    except HeadgateError as error:
        return fail(str(error), FAILED)
    except BrokenPipeError:
        # The reader of our output has closed the pipe; keep the interpreter from flushing the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    return result


def fail(sentence: str, code: int) -> int:
    print(f"headgate: {sentence}", file=sys.stderr)
    return code


def parser() -> CommandParser:
    root = CommandParser(prog="headgate", description="Serve large language models.")
    root.add_argument("--version", action="version", version=f"headgate {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(_command(commands, "serve", "serve a model over HTTP with an OpenAI-compatible API"))
    add_run(_command(commands, "run", "answer one prompt in the terminal"))
    add_chat(_command(commands, "chat", "chat with a model in the terminal"))
    add_route(_command(commands, "route", "route requests to several servers behind one address"))
    add_up(_command(commands, "up", "start several servers and a router, locally or on a Ray cluster"))
    add_scale(_command(commands, "scale", "change the number of servers of a running fleet"))
    add_top(_command(commands, "top", "show the live state of a server or a fleet in the terminal"))
    bench = _command(commands, "bench", "benchmark a server or a router")
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    add_bench_serve(_command(benches, "serve", "send requests to a server and measure latency and throughput"))
    add_bench_lifecycle(_command(benches, "lifecycle", "measure how long aborts and pauses take under load"))
    add_bench_prefix(_command(benches, "prefix", "measure time to first token with and without a cached prefix"))
    add_bench_disagg(_command(benches, "disagg", "measure token latency of streams while long prompts arrive"))
    add_bench_router(_command(benches, "router", "measure a router's overhead and its cache-aware placement"))
    add_bench_compare(_command(benches, "compare", "compare the results of several benchmark runs"))
    add_doctor(_command(commands, "doctor", "check whether this machine can serve models"))
    add_replay(_command(commands, "replay", "replay the last steps of a crashed engine on a fake device"))
    add_simulate(_command(commands, "simulate", "simulate a fleet in one process, with faults drawn from a seed"))
    add_chaos(_command(commands, "chaos", "inject faults into a fleet of real processes and check every answer"))
    add_completion(_command(commands, "completion", "print a shell completion script"), root)
    return root


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: Commands[CommandParser], name: str, what: str) -> CommandParser:
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
