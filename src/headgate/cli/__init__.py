"""The command line: the only reader of flags and environment.

It turns them into a config, and the errors of what it calls into one sentence and an exit code. Each command is a module
with a function that adds its flags and one that runs it. Nothing that takes long is imported before it is known to be
needed.
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
from headgate.cli.replay import add_replay
from headgate.cli.route import add_route
from headgate.cli.scale import add_scale
from headgate.cli.serve import add_serve, read_keys
from headgate.cli.simulate import add_simulate
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
        return FAILED  # the engine has said why
    except RequestError as error:
        return say(str(error), WRONG_USE)
    except HeadgateError as error:
        return say(str(error), FAILED)
    except BrokenPipeError:
        # Whoever read our output has heard enough; the interpreter must not try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
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
    add_route(_command(commands, "route", "put one address in front of many servers"))
    add_up(_command(commands, "up", "start several servers, here or on a Ray cluster, and a router"))
    add_scale(_command(commands, "scale", "have more servers, or fewer, while they serve"))
    add_top(_command(commands, "top", "show what a server or a fleet is doing, in the terminal"))
    bench = _command(commands, "bench", "measure a server")
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    add_bench_serve(_command(benches, "serve", "send requests to a server and time its answers"))
    add_bench_lifecycle(_command(benches, "lifecycle", "abort and pause under load and time that"))
    add_bench_prefix(_command(benches, "prefix", "time first tokens with and without a cached prefix"))
    add_bench_disagg(_command(benches, "disagg", "time streams while long prompts arrive"))
    add_bench_router(_command(benches, "router", "time what a router adds, and see where it sends conversations"))
    add_bench_compare(_command(benches, "compare", "put the results of several benches side by side"))
    add_doctor(_command(commands, "doctor", "say what this machine has, and what that means"))
    add_replay(_command(commands, "replay", "run the last plans of a crashed engine again, on a fake device"))
    add_simulate(_command(commands, "simulate", "run a whole fleet in one process, with faults drawn from a seed"))
    add_chaos(_command(commands, "chaos", "break a fleet of real processes on purpose, and check every answer"))
    add_completion(_command(commands, "completion", "print what a shell needs to complete commands"))
    return root


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: Commands[argparse.ArgumentParser], name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
